"""AIPerf's command line and files; with AIPerf itself where it is installed."""

from __future__ import annotations

import json
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from served_doubles import served

from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.aiperf import aiperf_summary, read_aiperf, run_aiperf
from trtllm_dflash.bench.load import Load
from trtllm_dflash.bench.measurement import measure
from trtllm_dflash.bench.served import ServedModel, find_served_model
from trtllm_dflash.errors import ConfigError, EngineError

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
CHATS = [[{"role": "user", "content": f"the an {letter} in"}] for letter in "abcdef"]
NOBODY = ServedModel("openai", "http://127.0.0.1:9", "tiny")


def _line(start_s: float, ttft_ms: float, gaps_ms: list[float], tokens: int, *, phase: str = "profiling") -> str:
    """A record as AIPerf 0.13 writes it, less the metrics that nobody reads."""
    end_s = start_s + (ttft_ms + sum(gaps_ms)) / 1e3
    metadata = {
        "request_start_ns": int(start_s * 1e9),
        "request_end_ns": int(end_s * 1e9),
        "benchmark_phase": phase,
    }
    metrics = {
        "time_to_first_token": {"value": ttft_ms, "unit": "ms"},
        "inter_chunk_latency": {"value": gaps_ms, "unit": "ms"},
        "output_sequence_length": {"value": tokens, "unit": "tokens"},
        "input_sequence_length": {"value": 9, "unit": "tokens"},
    }
    return json.dumps({"metadata": metadata, "metrics": metrics})


def test_records_become_ours(tmp_path: Path) -> None:
    lines = [
        _line(100.0, 10.0, [], 8, phase="warmup"),
        _line(101.0, 20.0, [10.0, 20.0, 10.0], 8),
        _line(101.0, 40.0, [20.0, 20.0, 20.0], 8),
        json.dumps(
            {
                "metadata": {"request_start_ns": 101e9, "request_end_ns": 102e9, "benchmark_phase": "profiling"},
                "metrics": {},
                "error": {"type": "X", "message": "refused"},
            }
        ),
    ]
    (tmp_path / "profile_export.jsonl").write_text("\n".join(lines))
    figures = measure(read_aiperf(tmp_path))
    assert (figures.requests, figures.errors, figures.first_error) == (3, 1, "refused")
    assert figures.ttft_ms is not None
    assert figures.ttft_ms.mean == pytest.approx(30.0)
    assert figures.itl_ms is not None
    assert figures.itl_ms.mean == pytest.approx(100 / 6)
    # 8 tokens in 4 events: 6 after the first, in 40 and 60 ms.
    assert figures.tok_s_user == pytest.approx(12 / 0.1)
    assert figures.completion_tokens == 8


def test_files_of_something_else_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no AIPerf records"):
        read_aiperf(tmp_path)
    (tmp_path / "profile_export.jsonl").write_text('{"metadata": {}}\n')
    with pytest.raises(ConfigError, match="line 1: is not a record"):
        read_aiperf(tmp_path)
    with pytest.raises(ConfigError, match="is not a summary"):
        aiperf_summary(tmp_path)


def _stand_in(folder: Path, body: str) -> str:
    script = folder / "stand-in"
    script.write_text(f"#!{sys.executable}\nimport json, pathlib, sys\narguments = sys.argv[1:]\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def test_payloads_and_load_are_what_was_asked_for(tmp_path: Path) -> None:
    """A stand-in for the executable notes what it was given, and leaves one record."""
    body = f"""
value = lambda name: arguments[arguments.index(name) + 1]
pathlib.Path({str(tmp_path / "seen.json")!r}).write_text(json.dumps(
    [arguments, [json.loads(line) for line in open(value("--input-file"))]]))
out = pathlib.Path(value("--artifact-dir")); out.mkdir()
(out / "profile_export.jsonl").write_text({_line(1.0, 5.0, [5.0], 4)!r} + "\\n")
(out / "profile_export_aiperf.json").write_text("{{}}")"""
    run_aiperf(NOBODY, CHATS, GREEDY, Load(2, None, 4), command=_stand_in(tmp_path, body))
    arguments, payloads = json.loads((tmp_path / "seen.json").read_text())
    value: Callable[[str], str] = lambda name: arguments[arguments.index(name) + 1]  # noqa: E731
    assert (value("--concurrency"), value("--request-count"), value("--warmup-request-count")) == ("2", "4", "2")
    assert [payload["messages"] for payload in payloads] == [CHATS[5], CHATS[4], *CHATS[:4]]
    assert all(payload["max_tokens"] == 12 and payload["stream"] for payload in payloads)


def test_its_failure_is_said_in_its_own_words(tmp_path: Path) -> None:
    command = _stand_in(tmp_path, 'print("the server is on fire"); sys.exit(3)')
    with pytest.raises(EngineError, match=r"ended with 3(.|\n)*on fire"):
        run_aiperf(NOBODY, CHATS, GREEDY, Load(1, None, 1), command=command)


@pytest.mark.parametrize(
    ("endpoint", "prompts", "command", "words"),
    [
        (NOBODY, CHATS, "no-such-aiperf", "no such command"),
        (ServedModel("triton", "http://127.0.0.1:9", "m"), CHATS, sys.executable, "measures OpenAI endpoints"),
        (NOBODY, ["text"], sys.executable, "chat messages only"),
    ],
)
def test_what_it_cannot_do_is_refused(endpoint: ServedModel, prompts: Any, command: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run_aiperf(endpoint, prompts, GREEDY, Load(1, None, 1), command=command)


@pytest.mark.skipif(shutil.which("aiperf") is None, reason="aiperf is not installed")
def test_the_real_aiperf_measures_a_real_engine(
    tiny_llms: Callable[..., LLM], tiny_engines: Callable[..., Path]
) -> None:
    llm, engines = tiny_llms("llama-v2"), tiny_engines("llama-v2")
    with served(llm, "openai") as url:
        result = run_aiperf(find_served_model(url), CHATS, GREEDY, Load(2, None, 6), tokenizer=engines)
    outputs = llm.generate(CHATS, GREEDY)
    figures = measure(result)
    assert figures.errors == 0
    mean = sum(output.metrics.completion_tokens for output in outputs) / 6
    assert figures.completion_tokens == pytest.approx(mean)
    assert figures.acceptance is not None
    assert figures.acceptance.cycles == sum(output.metrics.cycles for output in outputs)
    assert figures.acceptance.accepted == sum(output.metrics.accepted_tokens for output in outputs)
