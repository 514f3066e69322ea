"""Processes that prepare grammars, started when first needed and killed when a grammar takes too long."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import trtllm_dflash
from trtllm_dflash.config.structured_output import StructuredOutput
from trtllm_dflash.errors import EngineError, RequestError
from trtllm_dflash.runtime.grammar_worker import COMPILED, INVALID, READY, GrammarJob, TokenizerFacts

START_TIMEOUT_S = 120.0
MAX_COMPILED_BYTES = 64 << 20
_FIELD = "structured_output"
_MODULE = "trtllm_dflash.runtime.grammar_worker"


class GrammarProcesses:
    """As many processes as grammars are prepared at once, each kept for the next grammar.

    Args:
        timeout_s: seconds for one grammar; starting a process does not count.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._all: set[_GrammarProcess] = set()
        # The last one used comes first, so that a quiet server keeps using the same one.
        self._idle: list[_GrammarProcess] = []
        self._closed = False

    def prepare(self, wanted: StructuredOutput, vocabulary: str, facts: TokenizerFacts) -> bytes:
        """Parse and compile a grammar; blocks the calling thread, from any thread.

        Args:
            vocabulary: name of the facts; equal names must mean equal facts.

        Returns:
            xgrammar's serialised ``CompiledGrammar`` (JSON, UTF-8).

        Raises:
            RequestError: it is no grammar, does not compile, took too long, or ended the process.
            EngineError: no process could be started, or this object is closed.
        """
        process = self._take()
        keep = False
        try:
            answer = process.ask(wanted, vocabulary, facts, self._timeout_s)
            keep = True
        except TimeoutError as error:
            raise _too_long(wanted, self._timeout_s) from error
        except (EOFError, OSError) as error:
            if self._closed:
                raise EngineError("the engine is closed") from error
            raise RequestError(
                _FIELD, _shown(wanted), "a form that can be prepared: this one ended the process that did it"
            ) from error
        finally:
            self._give_back(process, keep=keep)
        kind, content = answer[:1], answer[1:]
        if kind != COMPILED:
            reason = content.decode("utf-8", errors="replace")
            allowed = f"a valid {wanted.kind}: {reason}" if kind == INVALID else f"one that can be compiled: {reason}"
            raise RequestError(_FIELD, _shown(wanted), allowed)
        if len(content) > MAX_COMPILED_BYTES:
            # The engine's process reads it while it serves others.
            raise RequestError(
                _FIELD,
                _shown(wanted),
                f"a form of at most {MAX_COMPILED_BYTES >> 20} MiB when compiled, not {len(content) >> 20} MiB",
            )
        return content

    def close(self) -> None:
        """End all processes, busy ones too: who waits for one gets an error."""
        with self._lock:
            self._closed = True
            processes = list(self._all)
            self._idle.clear()
        for process in processes:
            process.kill()

    def _take(self) -> _GrammarProcess:
        while True:
            with self._lock:
                if self._closed:
                    raise EngineError("the engine is closed")
                if not self._idle:
                    process = _GrammarProcess(self._timeout_s)
                    self._all.add(process)
                    break
                process = self._idle.pop()
            if process.is_alive:
                return process
            self._give_back(process, keep=False)
        try:
            process.wait_until_started()
        except BaseException:
            self._give_back(process, keep=False)
            raise
        return process

    def _give_back(self, process: _GrammarProcess, *, keep: bool) -> None:
        with self._lock:
            if keep and not self._closed:
                self._idle.append(process)
                return
            self._all.discard(process)
        process.end()


class _GrammarProcess:
    """One process. Used by one thread at a time; ``kill`` by any."""

    def __init__(self, timeout_s: float) -> None:
        self._connection, theirs = Pipe()
        self._known: set[str] = set()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno()), str(timeout_s)],
                env=_environment(os.environ),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Ctrl-C is the parent's; it closes the connection when it ends.
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_started(self) -> None:
        try:
            answer = _receive(self._connection, START_TIMEOUT_S)
        except (EOFError, OSError) as error:
            raise EngineError(
                f"the process that prepares structured output did not start (within {START_TIMEOUT_S:g} s)",
                hint="its complaint stands in this process's stderr; python -c 'import xgrammar' must work",
            ) from error
        if answer != READY:
            raise EngineError("the process that prepares structured output said something else than that it started")

    def ask(self, wanted: StructuredOutput, vocabulary: str, facts: TokenizerFacts, timeout_s: float) -> bytes:
        new = None if vocabulary in self._known else facts
        self._connection.send(GrammarJob(wanted.kind, wanted.text, vocabulary, new))
        self._known.add(vocabulary)
        return _receive(self._connection, timeout_s)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()


def _receive(connection: Connection, timeout_s: float) -> bytes:
    """One answer. ``TimeoutError``: not in time; it is an ``OSError``, as a lost connection is."""
    if not connection.poll(timeout_s):
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return connection.recv_bytes()


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """This process's, from which the same package is found, and without the GPUs: nothing there needs them."""
    search = [str(Path(trtllm_dflash.__file__).parents[1]), *filter(None, ours.get("PYTHONPATH", "").split(os.pathsep))]
    absolute = dict.fromkeys(os.path.abspath(entry) for entry in search)
    one_thread = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**ours, **one_thread, "PYTHONPATH": os.pathsep.join(absolute)}


def _shown(wanted: StructuredOutput) -> dict[str, str]:
    return {wanted.kind: wanted.text if len(wanted.text) <= 80 else wanted.text[:77] + "..."}


def _too_long(wanted: StructuredOutput, timeout_s: float) -> RequestError:
    return RequestError(
        _FIELD,
        _shown(wanted),
        f"a simpler form: structured_output took longer than {timeout_s:g} s to prepare",
        hint="use smaller counts of repetition, fewer alternatives, or shorter patterns",
    )
