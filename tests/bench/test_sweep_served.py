"""An engine in this process and served ones on the same chart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from served_doubles import served

from trtllm_dflash import LLM
from trtllm_dflash.cli.main import main


def test_other_engines_are_measured_with_the_same_prompts(
    tiny_engines: Callable[..., Path], tiny_llms: Callable[..., LLM], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    dataset, output = tmp_path / "prompts.jsonl", tmp_path / "out"
    rows = [f"the an {letter} in" for letter in "abcdef"]
    # One prompt that no engine of 256 tokens can take: it is left out for the servers too.
    dataset.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in [*rows, "a" * 500]))
    engines, llm = tiny_engines("llama-v2"), tiny_llms("llama-v2")
    with served(llm, "triton") as triton, served(llm, "openai") as openai, pytest.raises(SystemExit) as ended:
        main(
            [
                "sweep", "-e", str(engines), "--configs", "auto", "--url", triton, "--label", "Triton", "--url", openai,
                "--label", "another engine", "--dataset", str(dataset), "--concurrency", "2", "--repeats", "1",
                "--requests-per-user", "3", "--min-requests", "6", "--max-tokens", "12", "--device", "cpu",
                "-o", str(output),
            ]
        )  # fmt: skip
    assert ended.value.code == 0
    results = json.loads((output / "results.json").read_text())
    local, behind_triton, other = results["points"]
    assert [point["config"] for point in results["points"]] == ["auto", "Triton", "another engine"]
    assert local["outputs_sha256"] == behind_triton["outputs_sha256"]
    assert local["completion_tokens"] == behind_triton["completion_tokens"] == other["completion_tokens"]
    lengths = [point["acceptance"]["acceptance_length"] for point in results["points"]]
    assert lengths == pytest.approx([lengths[0]] * 3)
    assert not any("identical" in text for text in results["warnings"])
    assert {c["facts"]["prompts_left_out"] for c in results["configurations"]} == {1}
