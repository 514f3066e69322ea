"""``inspect``: what attention a model really has, and no facts of files that are not what was written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from trtllm_dflash.cli.main import main


def _inspect(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(path), *options])
    printed = capsys.readouterr()
    return int(str(ended.value.code or 0)), printed.out, printed.err


@pytest.mark.parametrize("kind", ["checkpoint", "engine"])
def test_windows_and_causality_of_every_layer(
    tiny_checkpoints: Callable[[str], Path],
    tiny_engines: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    """Target windows in every second layer; the drafter's only sliding layer is causal, as nothing says otherwise."""
    path = tiny_checkpoints("qwen3-v1") if kind == "checkpoint" else tiny_engines("qwen3-v1")
    code, out, _ = _inspect(capsys, path, "--json")
    assert code == 0
    facts = json.loads(out)
    assert (facts["kind"], facts["hashes"]) == (kind, "verified")
    assert facts["target_windows"] == [None, 16, None, 16]
    assert facts["drafter_layers"] == [
        {"window": None, "causal": False},
        {"window": 5, "causal": True},
        {"window": None, "causal": False},
    ]
    code, out, _ = _inspect(capsys, path)
    assert code == 0
    for line in ("layer 0: window full, not causal", "layer 1: window 5, causal", "layer 2: window full, not causal"):
        assert line in out


@pytest.mark.parametrize("kind", ["checkpoint", "engine"])
@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_damaged_rank_file_is_named(
    tiny_checkpoints: Callable[[str], Path],
    tiny_engines: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    damage: str,
) -> None:
    path = tmp_path / kind
    shutil.copytree(tiny_checkpoints("llama-v2") if kind == "checkpoint" else tiny_engines("llama-v2"), path)
    file = path / "drafter" / "rank0.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] if damage == "truncated" else content[:-1] + bytes([content[-1] ^ 1]))
    code, out, err = _inspect(capsys, path)
    assert (code, out) == (2, "")
    assert f"{file}: {damage}" in err
