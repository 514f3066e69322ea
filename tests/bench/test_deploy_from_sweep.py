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


def test_the_chosen_settings_reach_the_engine_process(tiny_engines: Callable[..., Path], tmp_path: Path) -> None:
    folder = _choice(tiny_engines("llama-v2"), tmp_path, block_size=2, max_concurrency=3)
    choice = choice_of_sweep(folder)
    assert (choice.speculation, choice.block_size, choice.max_running) == ("on", 2, 3)
    with pytest.raises(SystemExit) as ended:
        main(["deploy", "--from-sweep", str(folder), "-o", str(tmp_path / "models")])
    assert ended.value.code == 0
    config = (tmp_path / "models" / "dflash" / "config.pbtxt").read_text()
    for word in ("--speculation", "--block-size", "--max-running"):
        assert word in config


def _engine_command(folder: Path, output: Path, *options: str) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        main(["deploy", "--from-sweep", str(folder), "-o", str(output), *options])
    assert ended.value.code == 0
    text = (output / "dflash" / "config.pbtxt").read_text()
    quoted = next(line for line in text.splitlines() if '"engine_command"' in line).split("string_value: ")[1]
    command: list[str] = json.loads(json.loads(quoted[: quoted.rindex('"') + 1]))
    return command


def _value(command: list[str], option: str) -> str | None:
    return command[command.index(option) + 1] if option in command else None


def test_the_memory_of_the_sweep_reaches_the_engine_process(tiny_engines: Callable[..., Path], tmp_path: Path) -> None:
    folder = _choice(tiny_engines("llama-v2"), tmp_path, kv_cache_tokens=640)
    assert _value(_engine_command(folder, tmp_path / "models"), "--kv-cache-tokens") == "640"
    own = _engine_command(folder, tmp_path / "others", "--kv-cache-tokens", "1280")
    assert _value(own, "--kv-cache-tokens") == "1280"


def test_what_is_given_beside_a_sweep_wins(tiny_engines: Callable[..., Path], tmp_path: Path) -> None:
    """Also the word that is the default, and a speculation that leaves the sweep's block size without a meaning."""
    plain = _choice(tiny_engines("llama-v2"), tmp_path, block_size=1, config="plain")
    assert _value(_engine_command(plain, tmp_path / "a"), "--speculation") == "off"
    assert _value(_engine_command(plain, tmp_path / "b", "--speculation", "auto"), "--speculation") is None
    folder = _choice(tiny_engines("llama-v2"), tmp_path, block_size=2)
    command = _engine_command(folder, tmp_path / "c", "--no-speculation")
    assert (_value(command, "--speculation"), _value(command, "--block-size")) == ("off", None)


def test_a_block_size_beside_a_sweep_that_chose_plain_decoding_wins_too(
    tiny_engines: Callable[..., Path], tmp_path: Path
) -> None:
    plain = _choice(tiny_engines("llama-v2"), tmp_path, block_size=1, config="plain", speculation=False)
    command = _engine_command(plain, tmp_path / "a", "--block-size", "2")
    assert (_value(command, "--speculation"), _value(command, "--block-size")) == (None, "2")
    command = _engine_command(plain, tmp_path / "b", "--block-size", "1")
    assert (_value(command, "--speculation"), _value(command, "--block-size")) == ("off", "1")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_size", "8"),
        ("block_size", 0),
        ("max_concurrency", None),
        ("kv_cache_tokens", "all"),
        ("config", 5),
        ("speculation", "yes"),
    ],
)
def test_edited_settings_are_refused_by_file_and_key(
    tiny_engines: Callable[..., Path], tmp_path: Path, key: str, value: object
) -> None:
    folder = _choice(tiny_engines("llama-v2"), tmp_path, **{key: value})
    with pytest.raises(ConfigError, match=rf"deployment\.json: key '{key}'"):
        choice_of_sweep(folder)


def test_the_choice_of_a_sweep_reaches_tensorrt_llm(tiny_engines: Callable[..., Path], tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    folder = _choice(tiny_engines("llama-v2"), tmp_path, block_size=2, max_concurrency=3, kv_cache_tokens=640)
    with pytest.raises(SystemExit) as ended:
        main(["deploy", "--from-sweep", str(folder), "-o", str(tmp_path / "out"), "--runtime", "trtllm"])
    assert ended.value.code == 0
    settings = yaml.safe_load((tmp_path / "out" / "trtllm_serve.yaml").read_text())
    assert (settings["max_batch_size"], settings["speculative_config"]["max_draft_len"]) == (3, 1)
    assert settings["kv_cache_config"]["max_tokens"] == 640


def test_plain_decoding_of_an_engine_with_a_drafter_switches_speculation_off(
    tiny_engines: Callable[..., Path], tmp_path: Path
) -> None:
    choice = choice_of_sweep(_choice(tiny_engines("llama-v2"), tmp_path, block_size=1, config="plain"))
    assert (choice.speculation, choice.block_size) == ("off", None)


def test_larger_blocks_than_built_need_another_build(tiny_engines: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="was built for blocks of") as caught:
        choice_of_sweep(_choice(tiny_engines("llama-v2"), tmp_path, block_size=31))
    assert caught.value.hint is not None
    assert "--block-size 31 --max-batch-size 4" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--block-size", "99"], "block size is 99, expected 1 to"),
        (["--max-running", "0"], "max running is 0"),
        (["--kv-cache-tokens", "1"], "KV cache tokens are 1, expected at least"),
        (["--no-speculation", "--block-size", "2"], "block size is 2 and speculation is off"),
    ],
)
def test_settings_beyond_the_engine_are_refused(
    tiny_engines: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    words: str,
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["deploy", "-e", str(tiny_engines("llama-v2")), "-o", str(tmp_path / "models"), *options])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


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
