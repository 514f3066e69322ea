"""The OpenAI front end and Triton: what they cost, what they count, and what they survive.

    python -m benchmarks.serving_frontend --engines DIR --data FOLDER [--parts overhead malformed aiperf]

``overhead``: 16 streams through front end and Triton against the same load on ``LLM`` in this process, in turns.
``malformed``: 1,000 wrong requests, then a right one. ``aiperf``: AIPerf (its own environment: ``--aiperf PATH``)
drives the front end and the Triton endpoint; its token counts against our metrics.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.result_file import write_result
from benchmarks.serving_fuzz import malformed_requests, raw_garbage, send
from benchmarks.serving_load import LoadResult, in_process, served
from trtllm_dflash import LLM
from trtllm_dflash.bench.datasets import load_prompts
from trtllm_dflash.serving.front_end import FrontEnd
from trtllm_dflash.serving.repository import deploy
from trtllm_dflash.serving.triton_install import free_ports
from trtllm_dflash.serving.tritonserver import ServerHandle, triton_server

STREAMS = 16
HOST = "127.0.0.1"
PARTS = ("overhead", "malformed", "aiperf")
Figures = tuple[dict[str, Any], dict[str, Any]]


@contextmanager
def everything(engines: Path, folder: Path) -> Iterator[tuple[ServerHandle, FrontEnd, int]]:
    """A served repository of ``engines`` and its front end on a free port."""
    deploy(engines, folder / "repository")
    (port,) = free_ports(HOST, [0])
    with triton_server(folder / "repository", log=folder / "triton.log") as server:
        front_end = FrontEnd([server.http_url], triton_model=server.model_name, port=port, log=folder / "front.log")
        front_end.start()
        try:
            yield server, front_end, port
        finally:
            front_end.stop()


def overhead(
    server: ServerHandle, front_end: FrontEnd, engines: Path, data: Path, port: int, *, rounds: int, max_tokens: int
) -> Figures:
    """Throughput lost between ``LLM`` and an OpenAI client, as a share; each round runs both, one after the other."""
    prompts = load_prompts(data / "gsm8k_test.jsonl", 2 * STREAMS)
    direct: list[LoadResult] = []
    through: list[LoadResult] = []
    spent: list[tuple[float, float, float, float]] = []
    times: dict[str, list[float]] = {}
    front, engine = _processes(server, front_end)
    here = psutil.Process()
    with LLM(engines) as llm:
        for number in range(rounds + 1):
            # Every second round the other way round: what drifts on the machine then meets both alike.
            runs = {}
            for name in ("direct", "served") if number % 2 else ("served", "direct"):
                before = [_cpu_s([here]), _cpu_s([engine]), _cpu_s(front)]
                if name == "direct":
                    runs[name] = in_process(llm, prompts, streams=STREAMS, max_tokens=max_tokens)
                else:
                    runs[name] = served(HOST, port, "dflash", prompts, streams=STREAMS, max_tokens=max_tokens)
                after = [_cpu_s([here]), _cpu_s([engine]), _cpu_s(front)]
                times[name] = [end - begin for begin, end in zip(before, after, strict=True)]
            one, other = runs["direct"], runs["served"]
            print(
                f"round {number}: in process {one.tokens_per_second:.1f} tok/s, served {other.tokens_per_second:.1f}",
                flush=True,
            )
            if number:  # the first one warms both up
                direct.append(one)
                through.append(other)
                client_s, engine_s, front_s = times["served"]
                spent.append((times["direct"][0], engine_s, front_s, client_s))
    lost = [1 - b.tokens_per_second / a.tokens_per_second for a, b in zip(direct, through, strict=True)]
    equal = sum(a == b for a, b in zip(direct[0].texts, through[0].texts, strict=True)) / len(prompts)
    details = {
        "streams": STREAMS,
        "requests": len(prompts),
        "max_tokens": max_tokens,
        "rounds": rounds,
        "in_process_tok_s": [round(run.tokens_per_second, 1) for run in direct],
        "served_tok_s": [round(run.tokens_per_second, 1) for run in through],
        "lost_per_round": [round(share, 4) for share in lost],
        "texts_equal": equal,
        # Processor time does not depend on who else uses the machine: what the front end and Triton take beside the
        # engine, which is what they cost where the engine could use every core.
        "cpu_s_in_process": [round(seconds[0], 2) for seconds in spent],
        "cpu_s_engine": [round(seconds[1], 2) for seconds in spent],
        "cpu_s_triton_and_front_end": [round(seconds[2], 2) for seconds in spent],
        "cpu_s_client": [round(seconds[3], 2) for seconds in spent],
        "cpu_share_triton_and_front_end": round(
            statistics.median(seconds[2] / (seconds[1] + seconds[2]) for seconds in spent), 4
        ),
    }
    return {"frontend_overhead": round(statistics.median(lost), 4)}, {"overhead": details}


def _processes(server: ServerHandle, front_end: FrontEnd) -> tuple[list[psutil.Process], psutil.Process]:
    """(tritonserver, its stub and the front end; the engine process)."""
    engine = psutil.Process(int(str(server.client().health()["engine_pid"])))
    stub = engine.parent()
    triton = stub.parent() if stub is not None else None
    assert stub is not None
    assert triton is not None
    assert front_end.pid is not None
    return [triton, stub, psutil.Process(front_end.pid)], engine


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def malformed(server: ServerHandle, port: int, *, count: int = 1000) -> Figures:
    """Wrong requests that were not answered with a 4xx (5xx, no answer, or served)."""
    facts = server.client().health()
    limits = facts["limits"]
    assert isinstance(limits, dict)
    requests = malformed_requests(count, 7, "dflash", int(limits["max_seq_len"]))
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda request: send(HOST, port, request), requests))
    for seed in range(20):
        raw_garbage(HOST, port, seed)
    wrong = [(status, request) for status, request in zip(statuses, requests, strict=True) if not 400 <= status < 500]
    for status, (method, path, body, _) in wrong[:20]:
        print(f"  {status}: {method} {path} {body[:200]!r}", flush=True)
    time.sleep(1.2)
    after = server.client().health()
    healthy = (
        send(HOST, port, ("POST", "/v1/completions", b'{"model":"dflash","prompt":"hi","max_tokens":2}', {})) == 200
        and after["engine_pid"] == facts["engine_pid"]
        and after["in_flight"] == 0
        and server.restarts == 0
    )
    details = {
        "requests": count,
        "statuses": {str(status): times for status, times in sorted(Counter(statuses).items())},
        "healthy_after": healthy,
    }
    if not healthy:
        raise SystemExit(f"the server is not well after the malformed requests: {after}")
    return {"malformed_5xx": len(wrong)}, {"malformed": details}


def aiperf(server: ServerHandle, engines: Path, data: Path, port: int, folder: Path, program: str) -> Figures:
    """AIPerf's output tokens against the engine's counter, relative; its acceptance length against ours."""
    prompts = folder / "prompts.jsonl"
    rows = load_prompts(data / "gsm8k_test.jsonl", 32)
    prompts.write_text("".join(json.dumps({"text": row[0]["content"], "output_length": 64}) + "\n" for row in rows))
    figures: dict[str, Any] = {}
    details: dict[str, Any] = {}
    template = folder / "template.json"
    # Chat messages, as the front end sends them: raw text would often be answered with nothing but an end token.
    messages = """{{ [{"role": "user", "content": text}]|tojson|tojson }}"""
    template.write_text(
        f'{{"chat_messages": {messages}, "max_tokens": {{{{ max_tokens or 64 }}}}, "temperature": 0.0, "stream": true}}'
    )
    openai = ["--endpoint-type", "chat", "-u", f"http://{HOST}:{port}", "--use-server-token-count"]
    openai += ["--extra-inputs", "temperature:0"]
    triton = [
        *("--endpoint-type", "template", "-u", server.http_url),
        *("--custom-endpoint", f"/v2/models/{server.model_name}/generate_stream"),
        *("--extra-inputs", f"payload_template:{template}", "--extra-inputs", "response_field:text_output"),
    ]
    for name, options in (("openai", openai), ("triton", triton)):
        time.sleep(2.5)  # a heartbeat and a poll: what was served before is counted before
        before = _counters(port)
        report = _aiperf(program, options, engines / "tokenizer", prompts, folder / name)
        time.sleep(2.5)
        counted = {key: value - before.get(key, 0.0) for key, value in _counters(port).items()}
        tokens = counted["dflash_output_tokens_total"]
        theirs = float(report["total_output_tokens"]["avg"])
        details[f"aiperf_{name}"] = {
            "requests": report["request_count"]["avg"],
            "aiperf_tokens": theirs,
            "our_tokens": tokens,
            "our_acceptance_length": 1 + counted["dflash_accepted_tokens_total"] / counted["dflash_cycles_total"],
            "aiperf_metrics": {
                key: value.get("avg")
                for key, value in report.items()
                if isinstance(value, dict) and ("spec" in key or "accept" in key or key in _REPORTED)
            },
        }
        print(json.dumps(details[f"aiperf_{name}"], indent=1), flush=True)
        difference = abs(theirs - tokens) / tokens
        figures["aiperf_token_diff" if name == "openai" else "aiperf_triton_token_diff"] = round(difference, 5)
    return figures, details


_REPORTED = ("time_to_first_token", "inter_token_latency", "output_token_throughput", "request_latency")


def _aiperf(program: str, options: list[str], tokenizer: Path, prompts: Path, output: Path) -> dict[str, Any]:
    command = [
        *(program, "profile", "-m", "dflash", "--streaming", "--tokenizer", str(tokenizer.resolve())),
        *("--input-file", str(prompts), "--custom-dataset-type", "single_turn", "--concurrency", "4"),
        *("--request-count", "32", "--random-seed", "1", "--ui", "none", "--no-gpu-telemetry"),
        *("--artifact-dir", str(output), *options),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    reports = sorted(output.rglob("profile_export_aiperf.json"))
    if done.returncode or not reports:
        raise SystemExit(f"aiperf ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return dict(json.loads(reports[0].read_text()))


def _counters(port: int) -> dict[str, float]:
    """Samples without labels of the front end's metrics, summed over replicas."""
    found: Counter[str] = Counter()
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics") as answer:
        for line in answer.read().decode().splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                found[name.split("{", 1)[0]] += float(value)
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, required=True, help="engine directory of the demo pair")
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k_test.jsonl")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=8, help="measured rounds of overhead")
    parser.add_argument("--max-tokens", type=int, default=64, help="output tokens of a request of overhead")
    parser.add_argument("--aiperf", default=shutil.which("aiperf") or "aiperf", help="the aiperf program")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with everything(arguments.engines, folder) as (server, front_end, port):
            runs = {
                "overhead": lambda: overhead(
                    server,
                    front_end,
                    arguments.engines,
                    arguments.data,
                    port,
                    rounds=arguments.rounds,
                    max_tokens=arguments.max_tokens,
                ),
                "malformed": lambda: malformed(server, port),
                "aiperf": lambda: aiperf(server, arguments.engines, arguments.data, port, folder, arguments.aiperf),
            }
            for part in arguments.parts:
                some, more = runs[part]()
                figures |= some
                details |= more
    for key, value in {**figures, **details}.items():
        print(f"{key:26s} {value}")
    print(write_result("serving", figures, shapes={"frontend_streams": STREAMS}, details=details))


if __name__ == "__main__":
    main()
