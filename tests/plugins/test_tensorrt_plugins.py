"""The TensorRT plugins: in a plugin registry on a CPU, and through their whole life in the host harness."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from trtllm_dflash.cli.plugins_cmd import plugins
from trtllm_dflash.ops.plugin_library import PluginLibrary, find_library

ROOT = Path(__file__).parents[2]
NAMES = (
    "DFlashPagedAttention",
    "DFlashKVInjection",
    "DFlashGroupedConv",
    "DFlashCandidates",
    "DFlashSelectorWalk",
)
REQUIRED: dict[str, dict[str, float]] = {
    "DFlashPagedAttention": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "scale": 0.088},
    "DFlashKVInjection": {"layers": 2, "num_kv_heads": 2, "head_dim": 128},
    "DFlashGroupedConv": {"block_size": 8, "groups": 32, "taps": 3},
    "DFlashCandidates": {"count": 16},
    "DFlashSelectorWalk": {},
}
# Reals among the fields above and below; all others are integers.
REALS = frozenset({"scale", "eps", "softcap", "multiplier", "k_scale", "v_scale", "k_scales", "v_scales"})


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The plugin library and the harness. A library that is already there is used when it holds the plugins."""
    if not (shutil.which("cmake") and shutil.which("nvcc")):
        pytest.skip("needs cmake and nvcc")
    folder = tmp_path_factory.mktemp("plugins")
    options = ["-DDFLASH_SM=90", "-DDFLASH_HARNESS=ON"]
    if torch.cuda.is_available():
        options[0] = f"-DDFLASH_SM={torch.cuda.get_device_capability()[0] * 10}"
    else:
        # Nothing will run: kernels that compile three times as fast are as good.
        options.append("-DCMAKE_CUDA_FLAGS=-Ofc=max")
    if shutil.which("ninja"):
        options += ["-G", "Ninja"]
    run("cmake", "-S", ROOT / "plugins", "-B", folder, *options)
    found = find_library()
    if found is not None and set(NAMES) <= set(PluginLibrary(found).info.plugins):
        library, targets = found, ["plugin_harness"]
    else:
        library, targets = folder / "libdflash_plugins.so", ["plugin_harness", "dflash_plugins"]
    run("cmake", "--build", folder, "--parallel", str(min(os.cpu_count() or 1, 8)), "--target", *targets)
    return library, folder / "plugin_harness"


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of harness cases."""
    folder = tmp_path_factory.mktemp("cases")
    run(sys.executable, ROOT / "plugins" / "tests" / "write_cases.py", folder, PYTHONPATH=str(ROOT))
    return folder


def run(*command: str | Path, **environment: str) -> str:
    """Run to success and return the output."""
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, check=False, timeout=600
    )
    assert done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}"
    return done.stdout


class Registry:
    """TensorRT-RTX's plugin registry with the library in it."""

    def __init__(self, trt: Any, library: Path) -> None:
        self.trt = trt
        # Creating a builder creates the registry.
        self.builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        self.registry = trt.get_plugin_registry()
        self.handle = self.registry.load_library(str(library))
        self.library = PluginLibrary(library)

    @property
    def reason(self) -> str:
        """Why the last refusal happened; TensorRT's own log belongs to whoever made the first builder."""
        return self.library.last_error()

    def creator(self, name: str) -> Any:
        return self.registry.get_creator(name, "1", "")

    def create(self, name: str, *, phase: str = "BUILD", **fields: Any) -> Any:
        """A plugin with the required fields and ``fields``; None where it was refused."""
        given = [self.field(key, value) for key, value in {**REQUIRED[name], **fields}.items() if value is not None]
        collection = self.trt.PluginFieldCollection(given)
        return self.creator(name).create_plugin("layer", collection, getattr(self.trt.TensorRTPhase, phase))

    def field(self, name: str, value: Any) -> Any:
        kind, dtype = ("FLOAT32", np.float32) if name in REALS else ("INT32", np.int32)
        if isinstance(value, np.ndarray):
            kind, dtype = {"f": "FLOAT32", "i": "INT32"}[value.dtype.kind], value.dtype.type
        array = np.atleast_1d(np.asarray(value, dtype))
        return self.trt.PluginField(name, array, getattr(self.trt.PluginFieldType, kind))


@pytest.fixture(scope="module")
def registry(built: tuple[Path, Path]) -> Registry:
    trt = pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install tensorrt-rtx-cu13")
    return Registry(trt, built[0])


def test_info_lists_the_plugins(built: tuple[Path, Path]) -> None:
    shown = CliRunner().invoke(plugins, ["info", str(built[0]), "--json"])
    assert shown.exit_code == 0, shown.output
    assert sorted(json.loads(shown.output)["plugins"]) == sorted(NAMES)


def test_the_registry_lists_the_creators(registry: Registry) -> None:
    assert registry.handle is not None
    found = {c.name: c.plugin_version for c in registry.registry.all_creators if c.name.startswith("DFlash")}
    assert found == dict.fromkeys(NAMES, "1")


@pytest.mark.parametrize("name", NAMES)
def test_a_plugin_is_created_with_its_required_fields(registry: Registry, name: str) -> None:
    plugin = registry.create(name)
    assert plugin is not None, registry.reason
    kinds = registry.trt.PluginCapabilityType
    core, build, runtime = (plugin.get_capability_interface(k) for k in (kinds.CORE, kinds.BUILD, kinds.RUNTIME))
    assert (core.plugin_name, core.plugin_version, core.plugin_namespace) == (name, "1", "")
    assert type(build).__name__ == "IPluginV3OneBuildV2"
    assert type(runtime).__name__ == "IPluginV3OneRuntime"
    # The timing cache must not take plugins with other fields for this one.
    for field, value in REQUIRED[name].items():
        if field not in REALS:
            assert f"{field}={value}," in build.timing_cache_id + ","


@pytest.mark.parametrize("name", [name for name in NAMES if REQUIRED[name]])
def test_every_required_field_is_required(registry: Registry, name: str) -> None:
    for field in REQUIRED[name]:
        without: dict[str, Any] = {field: None}
        assert registry.create(name, **without) is None
        assert registry.reason == f"{name} (layer layer): field {field} is missing"


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("DFlashPagedAttention", {"head_dim": 72}, "head_dim 72, compiled are 64, 80, 96, 128 and 256"),
        ("DFlashPagedAttention", {"num_kv_heads": 3}, "8 heads over 3 KV heads"),
        ("DFlashPagedAttention", {"scale": float("nan")}, "field scale: nan"),
        ("DFlashPagedAttention", {"scale": 0.0}, "scale 0, expected a positive number"),
        ("DFlashPagedAttention", {"block_size": 8, "write_kv": 1}, "a block is never written"),
        ("DFlashPagedAttention", {"rotary_dim": 64}, "belong to write_kv = 1"),
        ("DFlashPagedAttention", {"write_kv": 1, "rotary_dim": 24}, "rotary_dim 24, expected a multiple of 16"),
        ("DFlashPagedAttention", {"causal": np.array([1.0], np.float32)}, "field causal: type 1, expected kINT32"),
        ("DFlashPagedAttention", {"causal": 2}, "field causal: 2, expected 0 to 1"),
        ("DFlashPagedAttention", {"causal": np.array([1, 1], np.int32)}, "field causal: 2 values, expected one"),
        ("DFlashPagedAttention", {"block": 8}, "unknown field block, known are version, num_heads"),
        ("DFlashKVInjection", {"layers": 65}, "field layers: 65, expected 1 to 64"),
        ("DFlashKVInjection", {"k_scales": [1.0, 2.0, 3.0]}, "k_scales has 3 values"),
        ("DFlashKVInjection", {"v_scales": [1.0, 0.0]}, "field v_scales: 0"),
        ("DFlashGroupedConv", {"norm": 1}, "norm = 1 without residual = 1"),
        ("DFlashGroupedConv", {"taps": 9}, "field taps: 9, expected 1 to 8"),
        ("DFlashCandidates", {"count": 33}, "field count: 33, expected 1 to 32"),
        ("DFlashSelectorWalk", {"seeded": -1}, "field seeded: -1"),
        ("DFlashSelectorWalk", {"version": 2}, "the fields have version 2, this library reads version 1"),
    ],
)
def test_unusable_fields_are_refused_with_a_reason(
    registry: Registry, name: str, fields: dict[str, Any], reason: str
) -> None:
    assert registry.create(name, **fields) is None
    assert registry.reason.startswith(f"{name} (layer layer): ")
    assert reason in registry.reason


LOG_A_REFUSAL = """
import sys, tensorrt_rtx as trt

class Logger(trt.ILogger):
    def __init__(self):
        trt.ILogger.__init__(self)

    def log(self, severity, text):
        print(severity, text, flush=True)

builder = trt.Builder(Logger())
registry = trt.get_plugin_registry()
registry.load_library(sys.argv[1])
creator = registry.get_creator("DFlashCandidates", "1", "")
creator.create_plugin("head", trt.PluginFieldCollection([]), trt.TensorRTPhase.BUILD)
"""


def test_a_refusal_reaches_tensorrts_log(built: tuple[Path, Path]) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install tensorrt-rtx-cu13")
    # Its own process: TensorRT logs to the logger of a process's first builder.
    shown = run(sys.executable, "-c", LOG_A_REFUSAL, built[0])
    (line,) = (line for line in shown.splitlines() if "(layer head)" in line)
    assert line.endswith("DFlashCandidates (layer head): field count is missing")
    assert "ERROR" in line


def test_an_engine_without_a_field_version_is_refused(registry: Registry) -> None:
    assert registry.create("DFlashCandidates", phase="RUNTIME") is None
    assert "holds no field version" in registry.reason
    assert registry.create("DFlashCandidates", phase="RUNTIME", version=1) is not None


@pytest.mark.parametrize(
    ("name", "fields", "outputs"),
    [
        ("DFlashPagedAttention", {}, 1),
        ("DFlashPagedAttention", {"write_kv": 1, "qk_norm": 1, "rotary_dim": 128}, 3),
        ("DFlashPagedAttention", {"block_size": 16, "causal": 0}, 1),
        ("DFlashKVInjection", {"k_scales": [0.5, 0.25]}, 4),
        ("DFlashGroupedConv", {}, 1),
        ("DFlashGroupedConv", {"residual": 1}, 1),
        ("DFlashGroupedConv", {"residual": 1, "norm": 1}, 2),
        ("DFlashCandidates", {}, 2),
        ("DFlashSelectorWalk", {"seeded": 1}, 2),
    ],
)
def test_the_fields_choose_the_form(registry: Registry, name: str, fields: dict[str, Any], outputs: int) -> None:
    plugin = registry.create(name, **fields)
    build = plugin.get_capability_interface(registry.trt.PluginCapabilityType.BUILD)
    assert build.num_outputs == outputs


def test_loading_the_library_twice_registers_nothing_new(registry: Registry, built: tuple[Path, Path]) -> None:
    before = len(registry.registry.all_creators)
    registry.registry.load_library(str(built[0]))
    assert len(registry.registry.all_creators) == before


def test_the_library_exports_only_its_c_interface(built: tuple[Path, Path]) -> None:
    if shutil.which("nm") is None:
        pytest.skip("needs nm")
    symbols = {line.split()[-1] for line in run("nm", "-D", "--defined-only", built[0]).splitlines()}
    assert {symbol for symbol in symbols if not symbol.startswith("dflash_")} == {"getCreators", "setLoggerFinder"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU test below does more")
def test_harness_leads_every_case_up_to_enqueue(built: tuple[Path, Path], cases: Path) -> None:
    library, harness = built
    report = run(harness, library, *sorted(cases.iterdir()))
    assert f"0 of {len(list(cases.iterdir()))} cases failed; no GPU" in report


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("output values float32", "output values float16"), "type of values"),
        (("output ids int64 7,16 -1", "output ids int64 7,16 0"), "alias of ids"),
        (("int count 16", "int count 8"), "shape of values"),
        (("int count 16", "int count 64"), "field count: 64"),
    ],
)
def test_harness_fails_where_a_plugin_differs(
    built: tuple[Path, Path], cases: Path, tmp_path: Path, change: tuple[str, str], reason: str
) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(cases / "candidates", wrong)
    text = (wrong / "case.txt").read_text()
    assert change[0] in text
    (wrong / "case.txt").write_text(text.replace(*change))
    done = subprocess.run([built[1], built[0], wrong], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert reason in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_harness_runs_every_case_on_the_gpu(built: tuple[Path, Path], cases: Path) -> None:
    library, harness = built
    report = run(harness, library, *sorted(cases.iterdir()))
    assert f"0 of {len(list(cases.iterdir()))} cases failed; ran on the GPU" in report


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("case", ["attention_ragged", "inject_norm_rope", "conv_out_norm", "candidates", "walk"])
def test_harness_sees_a_wrong_result(built: tuple[Path, Path], cases: Path, tmp_path: Path, case: str) -> None:
    wrong = tmp_path / case
    shutil.copytree(cases / case, wrong)
    name = next(line.split()[1] for line in (wrong / "case.txt").read_text().splitlines() if line.startswith("output"))
    expected = np.fromfile(wrong / f"{name}.expected.bin", np.float64)
    expected[-1 if case != "inject_norm_rope" else 0] += 0.25
    expected.tofile(wrong / f"{name}.expected.bin")
    done = subprocess.run([built[1], built[0], wrong], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert f"{name}[" in done.stdout
