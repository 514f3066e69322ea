"""A sweep's choice becomes a model repository, or a clear word why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtllm_dflash.bench.deploy_from_sweep import choice_of_sweep
from trtllm_dflash.bench.targets import SCHEMA_VERSION, write_deployment
from trtllm_dflash.cli.main import main
from trtllm_dflash.errors import ConfigError


def _choice(engines: Path, folder: Path, **changes: Any) -> Path:
    size = json.loads((engines / "config.json").read_text())["limits"]["block_size"]
    settings = {
        "kind": "deployment",
        "schema_version": SCHEMA_VERSION,
        "target": "at least 50 tok/s per user",
        "config": "DFlash 2",
        "engines": str(engines),
        "speculation": True,
        "block_size": size,
        "max_concurrency": 4,
    }
    write_deployment(settings | changes, folder)
    return folder


def test_deploy_takes_the_engine_of_the_sweep(
    tiny_engines: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = tiny_engines("llama-v2")
    folder = _choice(engines, tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["deploy", "--from-sweep", str(folder), "-o", str(tmp_path / "models"), "--json"])
    printed = capsys.readouterr()
    assert ended.value.code == 0
    assert Path(json.loads(printed.out)["engines"]) == engines.resolve()
    assert "DFlash 2 at concurrency 4" in printed.err
    assert "build with --max-batch-size 4" in printed.err


def test_another_block_size_needs_another_build(tiny_engines: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        choice_of_sweep(_choice(tiny_engines("llama-v2"), tmp_path, block_size=2))
    assert caught.value.hint is not None
    assert "--block-size 2 --max-batch-size 4" in caught.value.hint


def test_plain_decoding_of_an_engine_with_a_drafter_is_not_deployed_silently(
    tiny_engines: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="chose 'plain' with 1"):
        choice_of_sweep(_choice(tiny_engines("llama-v2"), tmp_path, block_size=1, config="plain"))


def test_an_engine_that_moved_is_named(tiny_engines: Callable[..., Path], tmp_path: Path) -> None:
    engines = tiny_engines("llama-v2")
    folder = _choice(engines, tmp_path)
    file = folder / "deployment.json"
    file.write_text(file.read_text().replace(str(engines), str(tmp_path / "gone")))
    with pytest.raises(ConfigError, match="no such directory"):
        choice_of_sweep(folder)
    assert choice_of_sweep(folder, engines).engines == engines


def test_deploy_needs_something_to_deploy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["deploy", "-o", str(tmp_path / "models")])
    assert ended.value.code == 2
    assert "--from-sweep" in capsys.readouterr().err
