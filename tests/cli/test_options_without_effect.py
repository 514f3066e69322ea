"""An option that would change nothing is refused before anything else happens: exit code 2, the option's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtllm_dflash.cli.main import main

URL = "http://127.0.0.1:9"

CASES = [
    # deploy
    ("deploy -e e -o o --runtime trtllm --model-name m", "--model-name has no effect with --runtime trtllm"),
    ("deploy -e e -o o --runtime trtllm --max-queue 4 --device cpu", "--max-queue, --device have no effect"),
    ("deploy -e e -o o --target a/b", "belong to --runtime trtllm"),
    # serve
    (f"serve --openai-port 0 --triton-url {URL} --http-port 9000", "--http-port has no effect without -m"),
    (f"serve --openai-port 0 --triton-url {URL} --host 0.0.0.0", "--host has no effect without -m"),
    ("serve -m m --openai-port 0 --triton-model other", "--triton-model has no effect with -m"),
    ("serve -m m --openai-host 0.0.0.0", "--openai-host has no effect without --openai-port"),
    ("serve -m m --api-key sesame", "--api-key has no effect without --openai-port"),
    # sweep
    ("sweep -e e -o o --model m --gpus 2", "--model, --gpus have no effect without --url"),
    ("sweep -e e -o o --load-generator aiperf", "--load-generator has no effect without --url"),
    (f"sweep --url {URL} -o o --aiperf-command a", "--aiperf-command has no effect without --load-generator aiperf"),
    ("sweep -e e -o o --cycle-table t", "--cycle-table has no effect without --predict"),
    ("sweep -e e --configs c.yaml -o o", "--engines has no effect beside a YAML file"),
    ("sweep -e e compare . .", "--engines has no effect before compare"),
    # bench
    ("bench -e e --dataset d --api triton", "--api has no effect with --engines"),
    (f"bench --url {URL} --dataset d --prefix-cache", "--prefix-cache/--no-prefix-cache has no effect with --url"),
    (f"bench --url {URL} --dataset d --no-stages --device cpu", "--stages/--no-stages, --device have no effect"),
    ("bench -e e --synthetic-prompt-tokens 9 --force-acceptance-length 2 --chat", "--chat/--no-chat has no effect"),
    # build, generate
    ("build -c c -o o --gpu-memory-gb 80", "--gpu-memory-gb has no effect without --dry-run"),
    ("generate -e e --prompt p --logprobs 2", "--logprobs has no effect without --json"),
]


@pytest.mark.parametrize(("words", "message"), CASES, ids=[words for words, _ in CASES])
def test_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_what_devices_and_open_engines_a_server_has_is_not_ours_to_say(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "--url", URL, "-o", str(tmp_path / "o"), "--device", "cpu", "--max-open", "1"])
    assert ended.value.code == 2
    assert "--device, --max-open have no effect without engines in this process" in capsys.readouterr().err


def test_a_key_in_the_environment_without_a_front_end_is_a_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole fleets share an environment, so it cannot be refused."""
    monkeypatch.setenv("TRTLLM_DFLASH_API_KEY", "sesame")
    with pytest.raises(SystemExit) as ended:
        main(["serve", "-m", str(tmp_path)])
    err = capsys.readouterr().err
    assert ended.value.code == 2  # no repository there
    assert "warning: TRTLLM_DFLASH_API_KEY guards the OpenAI front end" in err
    assert "sesame" not in err
