"""The process that prepares grammars: ``python -m trtllm_dflash.runtime.grammar_worker DESCRIPTOR SECONDS``.

A process of its own because xgrammar cannot be interrupted: a text of a few bytes can keep it busy for minutes, and
only a process can be killed. It answers jobs on a connection, one at a time, and ends with it.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

READY, COMPILED, INVALID, FAILED = b"R", b"G", b"P", b"C"
"""First byte of an answer: started; the grammar (xgrammar's JSON follows); it is none, or does not compile (why)."""

_GRACE_S = 5
_EXTRA_MEMORY_BYTES = 4 << 30
_CACHE_BYTES = 32 << 20
_NICENESS = 5


@dataclass(frozen=True)
class TokenizerFacts:
    """A vocabulary as xgrammar sees it. ``texts``: the bytes of every token, ``[V]``; empty: in no grammar."""

    texts: list[bytes]
    vocab_size: int
    add_prefix_space: bool

    def info(self) -> Any:
        """xgrammar's object; equal facts give equal ones, so that a grammar can go from process to process."""
        import xgrammar

        return xgrammar.TokenizerInfo(
            self.texts,
            xgrammar.VocabType.RAW,
            vocab_size=self.vocab_size,
            add_prefix_space=self.add_prefix_space,
        )


@dataclass(frozen=True)
class GrammarJob:
    """One grammar to prepare.

    Attributes:
        kind, text: as in ``StructuredOutput``. vocabulary: name of the tokenizer facts.
        facts: these facts, or None when this process has got them before.
    """

    kind: str
    text: str
    vocabulary: str
    facts: TokenizerFacts | None


def serve(connection: Connection, timeout_s: float) -> None:
    """Answer jobs until the other end closes."""
    compilers: dict[str, Any] = {}
    connection.send_bytes(READY)
    while True:
        try:
            job: GrammarJob = connection.recv()
        except (EOFError, OSError):
            return
        # Should the parent die while xgrammar works, nobody is left to kill this process: then the clock does.
        signal.alarm(int(timeout_s) + _GRACE_S)
        answer = _prepared(job, compilers)
        with suppress(OSError):
            connection.send_bytes(answer)
        signal.alarm(0)


def _prepared(job: GrammarJob, compilers: dict[str, Any]) -> bytes:
    import xgrammar

    if job.facts is not None:
        compilers[job.vocabulary] = xgrammar.GrammarCompiler(
            job.facts.info(), max_threads=1, cache_limit_bytes=_CACHE_BYTES
        )
    try:
        parsed = _parse(xgrammar.Grammar, job)
    except Exception as error:
        return INVALID + _first_line(error).encode()
    try:
        return COMPILED + str(compilers[job.vocabulary].compile_grammar(parsed).serialize_json()).encode()
    except Exception as error:
        return FAILED + _first_line(error).encode()


def _parse(grammar: Any, job: GrammarJob) -> Any:
    if job.kind == "regex":
        return grammar.from_regex(job.text)
    if job.kind == "grammar":
        return grammar.from_ebnf(job.text)
    # One fixed layout: with free white space a sampled output may consist of nothing else.
    if job.kind == "json_object":
        return grammar.from_json_schema('{"type": "object"}', any_whitespace=False, strict_mode=False)
    return grammar.from_json_schema(job.text, any_whitespace=False)


def _first_line(error: BaseException) -> str:
    """xgrammar's message without the time and the place in its sources."""
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0].split(": ", 1)[-1] if text[0].startswith("[") else text[0]


def _limit_memory() -> None:
    """A grammar that grows without end becomes an error here, not a shortage for the engine."""
    with suppress(OSError, ValueError):
        with open("/proc/self/statm", encoding="ascii") as file:
            held = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = held + _EXTRA_MEMORY_BYTES
        if hard == resource.RLIM_INFINITY or wanted < hard:
            resource.setrlimit(resource.RLIMIT_AS, (wanted, wanted))


def main() -> None:
    """Serve on the connection whose descriptor is the first argument."""
    connection = Connection(int(sys.argv[1]))
    # The engine's loop shares these processors and goes first.
    os.nice(_NICENESS)
    import xgrammar  # noqa: F401

    _limit_memory()
    with suppress(BrokenPipeError):
        serve(connection, float(sys.argv[2]))


if __name__ == "__main__":
    main()
