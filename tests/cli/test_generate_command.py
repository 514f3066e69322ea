"""``generate``: what it says about outputs that were cut, and about options without effect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trtllm_dflash.cli.main import main


def _run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in ("generate", "--device", "cpu", *words)])
    printed = capsys.readouterr()
    return int(str(ended.value.code or 0)), printed.out, printed.err


def _prompts(folder: Path, count: int, tokens: int) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text((json.dumps({"token_ids": [5, 7] * (tokens // 2)}) + "\n") * count)
    return path


def test_outputs_that_were_cut_are_said_once(
    tiny_engines: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("-e", tiny_engines("llama-v2", max_seq_len=64), "--prompts-file", _prompts(tmp_path, 3, 60), "--json")
    code, out, err = _run(capsys, *words, "--max-tokens", 50)
    outputs = json.loads(out)["outputs"]
    assert code == 0
    assert {(output["finish_reason"], output["completion_tokens"]) for output in outputs} == {("length", 4)}
    assert [len(output["warnings"]) for output in outputs] == [1, 1, 1]
    assert err.count("warning: max_tokens: got 50, cut to 4") == 1
    assert "(and 2 more outputs)" in err
    code, out, err = _run(capsys, *words, "--max-tokens", 4)
    assert "warning" not in err
    assert not any("warnings" in output for output in json.loads(out)["outputs"])
