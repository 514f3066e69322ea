"""The same closed-loop load for an ``LLM`` in this process and for an OpenAI endpoint."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.runtime.outputs import OutputChunk

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class LoadResult:
    """One run: output ``tokens``, ``seconds`` from the first request to the last token, and the texts by request."""

    tokens: int
    seconds: float
    texts: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def in_process(llm: LLM, prompts: Sequence[Messages], *, streams: int, max_tokens: int) -> LoadResult:
    """``streams`` requests at a time, greedy, the model's end tokens ignored."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(prompts)):
        todo.put(index)
    texts = [""] * len(prompts)
    tokens = [0] * len(prompts)

    def worker() -> None:
        while True:
            try:
                index = todo.get_nowait()
            except queue.Empty:
                return
            done = threading.Event()

            def add(chunk: OutputChunk, index: int = index, done: threading.Event = done) -> None:
                texts[index] += chunk.text
                tokens[index] += len(chunk.token_ids)
                if chunk.finish_reason is not None:
                    done.set()

            llm.submit(prompts[index], params, add)
            done.wait()

    threads = [threading.Thread(target=worker) for _ in range(streams)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return LoadResult(sum(tokens), time.perf_counter() - begun, tuple(texts))


def served(
    host: str, port: int, model: str, prompts: Sequence[Messages], *, streams: int, max_tokens: int
) -> LoadResult:
    """The same through ``POST /v1/chat/completions``, streamed. The client is as light as can be: it shares the CPU."""
    return asyncio.run(_served(host, port, model, prompts, streams, max_tokens))


async def _served(
    host: str, port: int, model: str, prompts: Sequence[Messages], streams: int, max_tokens: int
) -> LoadResult:
    todo = list(range(len(prompts)))[::-1]
    bodies: dict[int, bytes] = {}

    async def worker() -> None:
        while todo:
            index = todo.pop()
            request = {
                "model": model,
                "messages": prompts[index],
                "max_tokens": max_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            bodies[index] = await _post(host, port, json.dumps(request).encode())

    begun = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(streams)))
    seconds = time.perf_counter() - begun
    texts, tokens = [], 0
    for index in range(len(prompts)):
        text, count = _parse(bodies[index])
        texts.append(text)
        tokens += count
    return LoadResult(tokens, seconds, tuple(texts))


async def _post(host: str, port: int, body: bytes) -> bytes:
    """The raw answer, chunked as it came; parsed when the clock has stopped."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    return answer


def _parse(answer: bytes) -> tuple[str, int]:
    head, _, raw = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise SystemExit(f"a request failed: {answer[:300]!r}")
    body = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        length = int(size, 16)
        body += raw[:length]
        raw = raw[length + 2 :]
    text, tokens = "", -1
    for line in body.split(b"\n\n"):
        if line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise SystemExit(f"a request failed: {chunk['error']}")
            for choice in chunk["choices"]:
                text += choice["delta"].get("content", "")
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    if tokens < 0:
        raise SystemExit("a stream ended without its usage")
    return text, tokens
