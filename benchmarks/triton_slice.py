"""A real tritonserver on real engines: equal texts, no leaked pages, recovery from a killed engine.

    python -m benchmarks.triton_slice --engines DIR --data ../shared/data

``triton_figures`` is also a part of ``benchmarks.slice``.
"""

from __future__ import annotations

import argparse
import http.client
import os
import random
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.result_file import write_result
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.datasets import load_prompts
from trtllm_dflash.serving.client import TritonClient, TritonHttpError
from trtllm_dflash.serving.repository import deploy
from trtllm_dflash.serving.tritonserver import ServerHandle, triton_server

STREAMS = 16


def triton_figures(
    engines: Path, prompts_file: Path, *, disconnects: int = 200, max_tokens: int = 64
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure one engine directory behind a real tritonserver.

    Args:
        engines: engine directory. prompts_file: JSON lines as :func:`load_prompts` reads them.
        disconnects: streams that are closed by the client after a random number of events.
        max_tokens: output length of the compared streams.

    Returns:
        (figures, details). ``triton_streams_equal``: share of 16 concurrent streams whose text is ``LLM.generate``'s;
        ``cancel_leaked_pages``: pages neither free nor cached afterwards that were before;
        ``triton_kill_error_s``: kill -9 of the engine until the last of 8 streams in flight has its error;
        ``triton_kill_recovery_s``: until the next request is served.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    with LLM(engines) as llm:
        prompts = [list(llm.encode(messages)) for messages in load_prompts(prompts_file, STREAMS)]
        expected = [output.text for output in llm.generate(prompts, params)]
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "repository"
        deploy(engines, repository)
        begun = time.perf_counter()
        with triton_server(repository, log=Path(folder) / "triton.log") as server:
            startup_s = time.perf_counter() - begun
            equal = _streams_equal(server, prompts, expected, max_tokens)
            leaked, cancelled = _disconnects(server, prompts, disconnects)
            errors_s, recovery_s, errors = _kill(server, prompts)
            begun = time.perf_counter()
        stop_s = time.perf_counter() - begun
    figures = {
        "triton_streams_equal": equal,
        "cancel_leaked_pages": leaked,
        "triton_kill_error_s": round(errors_s, 3),
        "triton_kill_recovery_s": round(recovery_s, 3),
    }
    details = {
        "streams": STREAMS,
        "max_tokens": max_tokens,
        "disconnects": disconnects,
        "requests_cancelled": cancelled,
        "startup_s": round(startup_s, 2),
        "stop_s": round(stop_s, 2),
        "kill_errors": sorted(set(errors)),
    }
    return figures, details


def _streams_equal(server: ServerHandle, prompts: list[list[int]], expected: list[str], max_tokens: int) -> float:
    def stream(prompt: list[int]) -> str:
        events = server.client().generate_stream(input_ids=prompt, max_tokens=max_tokens, temperature=0.0)
        return "".join(str(event["text_output"]) for event in events)

    with ThreadPoolExecutor(len(prompts)) as pool:
        texts = list(pool.map(stream, prompts))
    for index, (found, wanted) in enumerate(zip(texts, expected, strict=True)):
        if found != wanted:
            print(f"stream {index} differs:\n  served  {found!r}\n  offline {wanted!r}", flush=True)
    return sum(found == wanted for found, wanted in zip(texts, expected, strict=True)) / len(expected)


def _disconnects(server: ServerHandle, prompts: list[list[int]], count: int) -> tuple[int, int]:
    """Pages lost by ``count`` abandoned streams (every second with log probabilities), and requests cancelled."""
    before = _settled(server.client())

    def abandon(index: int) -> None:
        chance = random.Random(index)
        stream = server.client().generate_stream(
            input_ids=prompts[index % len(prompts)], max_tokens=400, temperature=0.0, return_log_probs=index % 2 == 0
        )
        for _ in range(chance.randint(1, 8)):
            next(stream, None)
        stream.close()

    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(abandon, range(count)))
    after = _settled(server.client())
    kept = ("pages_free", "pages_cached")
    leaked = sum(before[name] for name in kept) - sum(after[name] for name in kept)
    return leaked, after["requests_cancelled"] - before["requests_cancelled"]


def _settled(client: TritonClient, timeout_s: float = 60.0) -> dict[str, int]:
    """The engine's statistics when nothing runs any more, two heartbeats later."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        time.sleep(1.2)
        health = client.health()
        stats = health["stats"]
        if health["in_flight"] == 0 and isinstance(stats, dict) and stats.get("running") == stats.get("waiting") == 0:
            return {str(name): int(value) for name, value in stats.items()}
    raise SystemExit(f"requests are still running {timeout_s:.0f} s after their clients left: {client.health()}")


def _kill(server: ServerHandle, prompts: list[list[int]]) -> tuple[float, float, list[str]]:
    ends: list[tuple[float, str]] = []
    flowing = threading.Barrier(9)

    def stream(prompt: list[int]) -> None:
        waiting = True
        try:
            for _ in server.client().generate_stream(input_ids=prompt, max_tokens=1000, ignore_eos=True):
                if waiting:
                    waiting = False
                    flowing.wait(timeout=60)
            ends.append((time.perf_counter(), "finished"))
        except (TritonHttpError, OSError, http.client.HTTPException) as error:
            ends.append((time.perf_counter(), str(error)))

    threads = [threading.Thread(target=stream, args=(prompt,)) for prompt in prompts[:8]]
    for thread in threads:
        thread.start()
    flowing.wait(timeout=60)
    killed_at = time.perf_counter()
    os.kill(int(str(server.client().health()["engine_pid"])), signal.SIGKILL)
    for thread in threads:
        thread.join()
    while True:
        try:
            server.client().generate(input_ids=prompts[0], max_tokens=1)
            break
        except (TritonHttpError, OSError) as error:
            if time.perf_counter() - killed_at > 120:
                raise SystemExit(f"no request is served 120 s after the engine was killed: {error}") from error
            time.sleep(0.1)
    recovered_at = time.perf_counter()
    return max(at for at, _ in ends) - killed_at, recovered_at - killed_at, [text for _, text in ends]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, required=True, help="engine directory")
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k_test.jsonl")
    parser.add_argument("--disconnects", type=int, default=200)
    arguments = parser.parse_args()
    figures, details = triton_figures(
        arguments.engines, arguments.data / "gsm8k_test.jsonl", disconnects=arguments.disconnects
    )
    for name, value in {**figures, **details}.items():
        print(f"{name:26s} {value}", flush=True)
    print(write_result("triton_slice", figures, shapes={"streams": STREAMS}, details=details))


if __name__ == "__main__":
    main()
