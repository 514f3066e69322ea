"""``generate``: what it says about outputs that were cut, and about options without effect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from trtllm_dflash.cli.main import main

USER = {"role": "user", "content": "abc"}


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


def test_prompts_go_through_the_targets_chat_template(
    tiny_engines: Callable[..., Path],
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A drafter knows the texts that come after it. Chats have it always, a prompt can do without."""
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(json.dumps({"prompt": "abc"}) + "\n" + json.dumps({"messages": [USER]}) + "\n")
    words = ("-e", tiny_engines("llama-v2"), "--prompt", "abc", "--prompts-file", lines, "--max-tokens", 2, "--json")
    chat = len(tiny_tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False))
    plain = len(tiny_tokenizer.encode("abc"))
    assert chat > plain
    for option, expected in (((), [chat] * 3), (("--chat",), [chat] * 3), (("--no-chat",), [plain, plain, chat])):
        code, out, _ = _run(capsys, *words, *option)
        assert (code, [output["prompt_tokens"] for output in json.loads(out)["outputs"]]) == (0, expected)
