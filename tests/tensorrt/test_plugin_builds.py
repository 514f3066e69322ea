"""Building with the plugin lowering, through the public commands, with a stand-in for full TensorRT.

The stand-in is TensorRT-RTX with plugin layers that compute nothing: see ``stand_in/tensorrt/__init__.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from driven_sessions import drive
from recorded_plugins import recorded
from tensorrt_requests import request_of
from test_plan_builds import command
from tiny_pair import VOCAB_SIZE

from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.engine import plan_build, plan_lowering
from trtllm_dflash.engine.build import build
from trtllm_dflash.engine.directory import EngineDirectory, open_engine_directory
from trtllm_dflash.engine.paged_session import PagedSession
from trtllm_dflash.engine.plan_build import read_plan_facts
from trtllm_dflash.engine.plan_facts import Network
from trtllm_dflash.engine.tensorrt_emit import emit_network
from trtllm_dflash.engine.tensorrt_session import choose_profile, network_session
from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.plugin_library import ABI_VERSION, LIBRARY_VARIABLE, PluginLibrary, find_library
from trtllm_dflash.ops.tensorrt_library import TensorRTLibrary
from trtllm_dflash.ops.tensorrt_plugin import PLUGIN_NAMES

STAND_IN = Path(__file__).parent / "stand_in"
NETWORKS: tuple[Network, ...] = ("target", "inject", "draft")
LIMITS = ["--max-batch-size", "6", "--max-seq-len", "200", "--max-num-tokens", "64"]


@pytest.fixture(scope="module")
def library_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``library_file(sm=…, plugins=…)``: a library that says what ours says of itself, and holds no kernels."""

    def make(sm: tuple[str, ...] = ("120",), plugins: tuple[str, ...] = PLUGIN_NAMES) -> Path:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler")
        folder = tmp_path_factory.mktemp("library")
        facts = {"version": "0.1.0", "abi": ABI_VERSION, "cuda": "13.0", "sm": sm, "kernels": [], "plugins": plugins}
        text = json.dumps(json.dumps(facts))
        (folder / "library.c").write_text(
            f"int dflash_abi_version(void) {{ return {ABI_VERSION}; }}\n"
            'const char *dflash_last_error(void) { return ""; }\n'
            f"const char *dflash_library_info(void) {{ return {text}; }}\n"
        )
        library = folder / "libdflash_plugins.so"
        subprocess.run([compiler, "-shared", "-fPIC", str(folder / "library.c"), "-o", str(library)], check=True)
        return library

    return make


@pytest.fixture(scope="module")
def checkpoint(
    tiny_pairs: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory, rtx: TensorRTLibrary
) -> Path:
    """A tiny pair in bfloat16."""
    pair = tiny_pairs("qwen3-v2")
    output = tmp_path_factory.mktemp("pair") / "checkpoint"
    convert(str(pair.target), str(pair.drafter), output, dtype="bfloat16")
    return output


COMPILED = find_library()


@pytest.fixture
def full_tensorrt(monkeypatch: pytest.MonkeyPatch, rtx: TensorRTLibrary) -> None:
    """The stand-in, a GPU of SM120 to build for, and the tiny pairs' head size."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    monkeypatch.delenv(LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    monkeypatch.setattr(plan_lowering, "_HEAD_DIMS", (16,))


def build_arguments(checkpoint: Path, output: Path, *more: str) -> list[str]:
    return ["build", "-c", str(checkpoint), "-o", str(output), "--backend", "tensorrt", *LIMITS, *more]


@pytest.mark.usefixtures("full_tensorrt")
def test_build_inspect_and_open(
    checkpoint: Path,
    library_file: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rtx: TensorRTLibrary,
) -> None:
    engines, library = tmp_path / "engines", library_file()
    code, out, err = command(capsys, *build_arguments(checkpoint, engines, "--plugin-library", str(library), "--json"))
    assert code == 0, err
    facts = json.loads(out)
    assert facts["page_tokens"] == 32
    assert facts["tensorrt"]["lowering"] == "plugin"
    assert facts["tensorrt"]["cache"] == "paged"
    # The library that the plans were built with travels with them, its hash among those that are checked.
    assert (engines / "plugins" / "libdflash_plugins.so").read_bytes() == library.read_bytes()
    config = json.loads((engines / "config.json").read_text())
    recorded_hash = config["tensorrt"]["plugin_library"]["sha256"]
    assert config["files"]["plugins/libdflash_plugins.so"]["sha256"] == recorded_hash
    target = json.loads((engines / "target" / "config.json").read_text())
    assert target["build_config"]["kv_cache_type"] == "paged"

    code, out, _ = command(capsys, "inspect", str(engines), "--json")
    assert code == 0
    shown = json.loads(out)
    assert (shown["lowering"], shown["cache"]) == ("plugin", "paged")
    assert shown["plugin_library"]["sha256"] == recorded_hash
    # Narrow profiles first: the session takes the first that has room.
    assert list(shown["plans"]["target"]["profiles"]) == ["verify up to 6", "prefill"]
    assert list(shown["plans"]["draft"]["profiles"]) == ["verify up to 6"]

    opened = open_engine_directory(engines)
    request = recorded(request_of(rtx, checkpoint, limits=opened.limits))
    for network in NETWORKS:
        plan = read_plan_facts(engines, network, 0)
        emitted = emit_network(request, network).network
        made_by_plugins = {tensor.name for layer in emitted.layers for tensor in layer.outputs}
        inputs = {emitted.get_input(i).name for i in range(emitted.num_inputs)} - made_by_plugins
        assert {t.name for t in plan.inputs} | {b.input for b in plan.bindings} == inputs
        assert (engines / plan.file).stat().st_size == plan.plan_bytes > 100_000
    check_profiles(opened)


class ProfileRunner:
    """``NetworkRunner`` that only says which profile of the built plans each pass would run on."""

    def __init__(self, engines: Path) -> None:
        self.plans = {network: read_plan_facts(engines, network, 0) for network in NETWORKS}
        self.passes: list[tuple[str, str, bool]] = []

    def run(self, network: Network, inputs: Mapping[str, torch.Tensor], *, recurring: bool) -> dict[str, torch.Tensor]:
        plan = self.plans[network]
        assert set(inputs) == {tensor.name for tensor in plan.inputs}
        self.passes.append((network, plan.profiles[choose_profile(plan, inputs)].name, recurring))
        tokens, rows = len(inputs["positions"]) if "positions" in inputs else 0, len(inputs.get("logit_rows", ()))
        outputs = {"logits": torch.zeros(rows, VOCAB_SIZE), "features": torch.zeros(tokens, 3 * 64)}
        blocks = (len(inputs["anchors"]) if "anchors" in inputs else 0, 4)
        proposals = {name: torch.zeros(*blocks, 9) for name in ("candidates", "q_rows")}
        return outputs | proposals | {"draft_tokens": torch.zeros(blocks)}

    def close(self) -> None:
        pass


def check_profiles(opened: EngineDirectory) -> None:
    """The session's passes fit the plans that were built: prefill, draft and verify of several sizes."""
    runner = ProfileRunner(opened.path)
    session = network_session(opened, runner, torch.device("cpu"))
    assert isinstance(session, PagedSession)
    for sizes in ((40, 20), (2, 5, 3)):
        prompts = [torch.zeros(size, dtype=torch.int64) for size in sizes]
        drive(session, prompts, seed=0, temperatures=torch.zeros(len(sizes)), block_size=5)
    # A prompt within a block's extent takes the narrow profile.
    verify, prefill = "verify up to 6", "prefill"
    cycle = [("draft", verify, True), ("target", verify, True), ("inject", verify, True)]
    long, short = [("target", prefill, False), ("inject", prefill, False)], [("target", verify, False)]
    assert runner.passes == [*long, *cycle, *short, ("inject", verify, False), *cycle]
    with pytest.raises(EngineError, match="no profile has room") as caught:
        drive(session, [torch.zeros(65, dtype=torch.int64)], seed=0, temperatures=torch.zeros(1), block_size=5)
    assert "--max-num-tokens" in str(caught.value.hint)


@pytest.mark.usefixtures("full_tensorrt")
def test_the_compiled_plugins_take_our_fields(demo_checkpoint: Callable[[str], Path]) -> None:
    """The stand-in then creates every plugin of the compiled library too, and compares its outputs."""
    if COMPILED is None:
        pytest.skip("the plugin library is not compiled; trtllm-dflash plugins build")
    if not set(PLUGIN_NAMES) <= set(PluginLibrary(COMPILED).info.plugins):
        pytest.skip(f"{COMPILED} has no TensorRT plugins")
    code = subprocess.run(
        [sys.executable, "-c", _EMIT, str(demo_checkpoint("bfloat16")), str(COMPILED)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert code.returncode == 0, code.stderr
    # The target's layers; an injection; three draft layers with four convolutions each, candidates and walk.
    assert code.stdout.split() == ["30", "1", str(3 * 5 + 2)]


_EMIT = f"""
import sys
sys.path[:0] = [{str(STAND_IN)!r}, {str(STAND_IN.parent)!r}]
import tensorrt
from pathlib import Path
from tensorrt_requests import paged_limits, request_of
from trtllm_dflash.engine.tensorrt_emit import emit_network
from trtllm_dflash.ops.tensorrt_library import TensorRTLibrary
from trtllm_dflash.ops.tensorrt_plugin import RegistryPluginLayers

plugins = RegistryPluginLayers(tensorrt, sys.argv[2])
request = request_of(
    TensorRTLibrary("tensorrt", tensorrt, "11.1.0"), Path(sys.argv[1]), lowering="plugin", plugins=plugins,
    limits=paged_limits(8),
)
for name in ("target", "inject", "draft"):
    network = emit_network(request, name).network
    assert all(plugin.compiled is not None for plugin in network.plugins)
    print(len(network.plugins))
"""


@pytest.mark.usefixtures("full_tensorrt")
def test_native_with_full_tensorrt(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = command(
        capsys, *build_arguments(checkpoint, tmp_path / "engines", "--lowering", "native", "--dry-run", "--json")
    )
    assert code == 0, err
    estimate = json.loads(out)
    assert (estimate["backend"], estimate["lowering"], estimate["plugin_library"]) == ("tensorrt", "native", None)
    assert estimate["limits"]["page_tokens"] >= 200


@pytest.mark.usefixtures("full_tensorrt")
def test_dry_run_of_the_plugin_lowering(
    checkpoint: Path, library_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = library_file(sm=("90a", "120f"))
    dry = ["--plugin-library", str(library), "--dry-run", "--gpu-memory-gb", "0.02"]
    code, out, err = command(capsys, *build_arguments(checkpoint, tmp_path / "engines", *dry))
    assert code == 0, err
    assert "lowering plugin" in out
    assert str(library) in out
    code, out, _ = command(capsys, *build_arguments(checkpoint, tmp_path / "engines", *dry, "--json"))
    estimate = json.loads(out)
    # Seven pages of 32 tokens: 4 layers x K and V x 2 heads x 16 x 2 bytes.
    assert estimate["target_cache_mb"] == pytest.approx(4 * 2 * 2 * 16 * 7 * 32 * 2 / 1e6)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("full_tensorrt")
def test_a_builder_that_dies_leaves_nothing(
    checkpoint: Path,
    library_file: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_build, "WORKER", ("-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    monkeypatch.setenv(LIBRARY_VARIABLE, str(library_file()))
    code, _, err = command(capsys, *build_arguments(checkpoint, tmp_path / "engines"))
    assert code == 1
    assert "killed" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("full_tensorrt")
@pytest.mark.parametrize(
    ("sm", "plugins", "words"),
    [
        (("90a",), PLUGIN_NAMES, ["compiled for SM 90a", "for SM 120", "plugins build --sm 120"]),
        (("120a",), PLUGIN_NAMES[1:], ["has no TensorRT plugin DFlashPagedAttention", "plugins build"]),
    ],
)
def test_a_library_that_does_not_fit(
    checkpoint: Path,
    library_file: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sm: tuple[str, ...],
    plugins: tuple[str, ...],
    words: list[str],
) -> None:
    library = library_file(sm=sm, plugins=plugins)
    code, _, err = command(capsys, *build_arguments(checkpoint, tmp_path / "engines", "--plugin-library", str(library)))
    assert code == 1
    for word in words:
        assert word in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("full_tensorrt")
def test_a_missing_library(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = command(
        capsys, *build_arguments(checkpoint, tmp_path / "engines", "--plugin-library", str(tmp_path / "none.so"))
    )
    assert code == 1
    for word in ("none.so", "plugins build", "--plugin-library", LIBRARY_VARIABLE, "--lowering native"):
        assert word in err


@pytest.mark.usefixtures("full_tensorrt")
def test_models_that_the_plugins_do_not_have(
    tiny_checkpoints: Callable[[str], Path],
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, _, err = command(capsys, *build_arguments(tiny_checkpoints("qwen3-v2"), tmp_path / "engines"))
    assert code == 1
    assert "float32" in err
    assert "--dtype bfloat16" in err
    monkeypatch.setattr(plan_lowering, "_HEAD_DIMS", (64, 128))
    code, _, err = command(capsys, *build_arguments(checkpoint, tmp_path / "engines"))
    assert code == 1
    assert "head_dim 16" in err
    assert "--lowering native" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backend", "tensorrt-rtx", "--lowering", "plugin"], ["no plugin layers", "--backend tensorrt"]),
        (["--backend", "torch", "--lowering", "native"], ["torch backend has no plans"]),
        (["--backend", "tensorrt-rtx", "--plugin-library", "x.so"], ["--plugin-library x.so", "--lowering plugin"]),
        (["--backend", "tensorrt-rtx", "--timing-cache", "x"], ["--timing-cache x", "chooses kernels"]),
        (["--backend", "torch", "--timing-cache", "x"], ["--timing-cache", "no plans"]),
        (["--backend", "torch", "--weights", "embedded"], ["--weights embedded", "no plans"]),
        (["--backend", "auto", "--target-sm", "120"], ["--target-sm", "no plans"]),
    ],
)
def test_wrong_usage(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    code, _, err = command(capsys, "build", "-c", str(checkpoint), "-o", str(tmp_path / "engines"), *arguments)
    assert code == 2
    for word in words:
        assert word in err
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_without_a_drafter(
    tiny_pairs: Callable[[str], Any],
    full_tensorrt: None,
    library_file: Callable[..., Path],
    tmp_path: Path,
) -> None:
    convert(str(tiny_pairs("llama-v2").target), None, tmp_path / "checkpoint", dtype="bfloat16")
    report = build(
        tmp_path / "checkpoint",
        tmp_path / "engines",
        backend="tensorrt",
        max_batch_size=1,
        max_seq_len=64,
        plugin_library=library_file(),
    )
    assert report.tensorrt is not None
    assert report.tensorrt.cache == "paged"
    assert "features" not in {output.name for output in read_plan_facts(report.output, "target", 0).outputs}
