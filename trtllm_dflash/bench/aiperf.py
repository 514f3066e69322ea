"""AIPerf as the load generator of a served OpenAI endpoint: its command line written, its files read back.

AIPerf 0.13 sends each payload as it is (``raw-payload``), so requests are those of our own client. Its records have the
time of every chunk: they become our own records, and every figure has the same meaning whoever made the load. What
differs: AIPerf does not keep the load up after the last request was sent.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trtllm_dflash.bench.load import Load, LoadResult
from trtllm_dflash.bench.records import RequestRecord
from trtllm_dflash.bench.served import ServedModel, chat_payload
from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.errors import ConfigError, EngineError

RECORDS = "profile_export.jsonl"
SUMMARY = "profile_export_aiperf.json"
_WORDS_OF_LOG = 1500


def run_aiperf(
    served: ServedModel,
    prompts: Sequence[Any],
    params: SamplingParams,
    load: Load,
    *,
    tokenizer: Path | None = None,
    command: str = "aiperf",
) -> LoadResult:
    """Let AIPerf put ``load`` on an OpenAI endpoint.

    Args:
        served: the endpoint. prompts: chat messages. params, load: as :func:`~trtllm_dflash.bench.load.run_load`.
        tokenizer: directory for AIPerf's own counts; None takes its built-in one, which it may have to download (what
            is read back are the server's counts either way).
        command: the executable; AIPerf may live in an environment of its own.

    Raises:
        ConfigError: AIPerf is not there, or cannot make this load. EngineError: it failed.
    """
    executable = shutil.which(command)
    if executable is None:
        raise ConfigError(f"{command}: no such command", hint="pip install aiperf, or give --aiperf-command PATH")
    if served.api != "openai":
        raise ConfigError(f"{served.url}: AIPerf measures OpenAI endpoints; this one is {served.api}")
    with tempfile.TemporaryDirectory() as folder:
        payloads, artifacts, log = Path(folder) / "payloads.jsonl", Path(folder) / "out", Path(folder) / "log"
        _write_payloads(payloads, served, prompts, params, load)
        arguments = _arguments(served, payloads, artifacts, load, tokenizer)
        with log.open("wb") as output:
            done = subprocess.run([executable, *arguments], stdout=output, stderr=subprocess.STDOUT, check=False)
        if done.returncode or not (artifacts / SUMMARY).is_file():
            tail = log.read_text(errors="replace")[-_WORDS_OF_LOG:]
            raise EngineError(f"aiperf ended with {done.returncode} and no results; its last words:\n{tail}")
        return read_aiperf(artifacts)


def read_aiperf(artifacts: Path) -> LoadResult:
    """The records of an AIPerf artifact directory (its ``profile_export.jsonl``).

    Raises:
        ConfigError: there is no such file, or no profiled request in it.
    """
    file = artifacts / RECORDS
    if not file.is_file():
        raise ConfigError(f"{file}: no AIPerf records", hint="run aiperf profile with --export-level records")
    records: list[RequestRecord] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            records.append(_record(json.loads(line), len(records)))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file}, line {number}: is not a record of AIPerf 0.13: {error!r}") from error
    measured = [record for record in records if record.phase == "measured"]
    if not measured:
        raise ConfigError(f"{file}: has no profiled request")
    return LoadResult(
        tuple(records), (min(record.start for record in measured), max(record.end for record in measured))
    )


def aiperf_summary(artifacts: Path) -> dict[str, float]:
    """AIPerf's own means: ``tok_s``, ``tok_s_user``, ``ttft_ms``, ``requests_s``.

    Raises:
        ConfigError: there is no summary, or a figure is missing.
    """
    file = artifacts / SUMMARY
    names = {
        "tok_s": "output_token_throughput",
        "tok_s_user": "output_token_throughput_per_user",
        "ttft_ms": "time_to_first_token",
        "requests_s": "request_throughput",
    }
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        return {ours: float(document[theirs]["avg"]) for ours, theirs in names.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: is not a summary of AIPerf 0.13: {error!r}") from error


def _write_payloads(
    path: Path, served: ServedModel, prompts: Sequence[Any], params: SamplingParams, load: Load
) -> None:
    """Warm-up payloads first (from the end of the prompts, as in our own load), then the measured ones."""
    count = len(prompts)
    order = [count - 1 - number % count for number in range(load.warm_up_requests)]
    order += [number % count for number in range(load.requests)]
    with path.open("w", encoding="utf-8") as file:
        for index in order:
            if isinstance(prompts[index], str) or not isinstance(prompts[index][0], Mapping):
                raise ConfigError("AIPerf sends chat messages only", hint="leave --no-chat away")
            file.write(json.dumps(chat_payload(served.model, prompts[index], params)) + "\n")


def _arguments(served: ServedModel, payloads: Path, artifacts: Path, load: Load, tokenizer: Path | None) -> list[str]:
    arguments = ["profile", "--model", served.model, "--url", served.url, "--endpoint-type", "chat", "--streaming"]
    arguments += ["--input-file", str(payloads), "--custom-dataset-type", "raw-payload"]
    arguments += ["--dataset-sampling-strategy", "sequential", "--request-count", str(load.requests)]
    if load.concurrency is not None:
        arguments += ["--concurrency", str(load.concurrency)]
    if load.request_rate is not None:
        arguments += ["--request-rate", str(load.request_rate)]
    if load.warm_up_requests:
        arguments += ["--warmup-request-count", str(load.warm_up_requests)]
    nested = None if tokenizer is None else tokenizer / "tokenizer"
    directory = nested if nested is not None and nested.is_dir() else tokenizer
    arguments += ["--use-server-token-count", "--tokenizer", "builtin" if directory is None else str(directory)]
    arguments += ["--export-level", "records", "--artifact-dir", str(artifacts)]
    return [*arguments, "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"]


def _record(entry: Mapping[str, Any], index: int) -> RequestRecord:
    about, metrics = entry["metadata"], entry["metrics"]
    start = about["request_start_ns"] / 1e9
    record = RequestRecord(
        index=index,
        phase="warm-up" if about["benchmark_phase"] == "warmup" else "measured",
        start=start,
        end=about["request_end_ns"] / 1e9,
    )
    error = entry.get("error")
    if error:
        record.error = str(error.get("message", error))[:500]
        return record
    at = start + _value(metrics, "time_to_first_token") / 1e3
    record.events.append((at, 1))
    for gap_ms in metrics.get("inter_chunk_latency", {}).get("value", ()):
        at += gap_ms / 1e3
        record.events.append((at, 1))
    record.end = at
    record.completion_tokens = int(_value(metrics, "output_sequence_length"))
    record.prompt_tokens = int(_value(metrics, "input_sequence_length"))
    record.spread_evenly(record.completion_tokens)
    # Only where the server sends vLLM's metrics.speculative_decoding.
    if "spec_decode_steps" in metrics:
        record.cycles = int(_value(metrics, "spec_decode_steps"))
        record.accepted = int(_value(metrics, "spec_decode_accepted_draft_tokens"))
        record.drafted = int(_value(metrics, "spec_decode_draft_tokens"))
    return record


def _value(metrics: Mapping[str, Any], name: str) -> float:
    return float(metrics[name]["value"])
