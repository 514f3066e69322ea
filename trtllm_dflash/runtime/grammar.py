"""Structured output: which tokens a grammar allows, for every row of a block.

Row j of a block predicts the token after drafts 1..j, so the matcher walks the drafts, giving one mask per row, and is
rolled back; it moves for good only by tokens that were emitted. Rows behind a draft that the grammar forbids are never
reached, because that draft is never accepted, and stay open. The grammar's end is a stop id: where it is complete, stop
ids are allowed, and where nothing can follow, nothing else is.

Grammars are xgrammar's (https://github.com/mlc-ai/xgrammar, arXiv 2411.15100): it parses, compiles and matches.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trtllm_dflash.config.structured_output import StructuredOutput
from trtllm_dflash.errors import EngineError, RequestError
from trtllm_dflash.runtime.grammar_process import GrammarProcesses
from trtllm_dflash.runtime.grammar_worker import TokenizerFacts
from trtllm_dflash.runtime.outputs import ErrorKind

_FIELD = "structured_output"
PREPARE_TIMEOUT_S = 10.0
PREPARE_WORKERS = 4
_CACHE_BYTES = 256 << 20
_CACHE_ENTRIES = 1024
_ROW_BITS = 32
_FIRST_PRINTABLE = 0x20


class GrammarCompiler:
    """Prepares grammars for one tokenizer in processes of its own, and remembers them.

    A caller's thread never parses or compiles: xgrammar cannot be interrupted, and some short texts keep it busy for
    minutes.

    Args:
        tokenizer: the target's. vocab_size: V, the width of masks. timeout_s: seconds for one grammar.
        workers: grammars that are prepared at once, so that a slow one holds up few others.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        *,
        timeout_s: float = PREPARE_TIMEOUT_S,
        workers: int = PREPARE_WORKERS,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._processes = GrammarProcesses(timeout_s)
        self._workers = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="grammar")
        # Guards what follows. Facts are made under their own lock, which may take a second.
        self._lock = threading.Lock()
        self._remembered: OrderedDict[StructuredOutput, Future[Any]] = OrderedDict()
        self._remembered_bytes = 0
        self._facts_lock = threading.Lock()
        self._facts: dict[bool, tuple[TokenizerFacts, Any]] = {}

    def start(self, wanted: StructuredOutput, stop_ids: Sequence[int], on_ready: Callable[[], None]) -> GrammarRun:
        """Prepare a grammar in the background; returns at once.

        Args:
            stop_ids: what ends the request's output. on_ready: called, on any thread, when the run can be used or has
            failed. Whether the text is a grammar is known only then.

        Raises:
            RequestError: xgrammar is not installed, or nothing could end the output. EngineError: this is closed.
        """
        if not stop_ids:
            raise RequestError(
                "ignore_eos", True, "false with structured_output, or stop_token_ids: the form's end is a stop token"
            )
        _library()
        try:
            future = self._future(wanted)
        except RuntimeError as error:
            raise EngineError("the engine is closed") from error
        future.add_done_callback(lambda _: on_ready())
        return GrammarRun(future, stop_ids)

    def close(self) -> None:
        """Prepare nothing more; what is being prepared fails."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._processes.close()

    def _future(self, wanted: StructuredOutput) -> Future[Any]:
        """The remembered or running preparation of this grammar, else a new one."""
        with self._lock:
            future = self._remembered.get(wanted)
            if future is not None:
                self._remembered.move_to_end(wanted)
                return future
            future = self._remembered[wanted] = self._workers.submit(self._compile, wanted)
        future.add_done_callback(lambda done: self._keep(wanted, done))
        return future

    def _keep(self, wanted: StructuredOutput, done: Future[Any]) -> None:
        """Remember what succeeded, as far as there is room; a failure may have been the machine's, so forget it."""
        with self._lock:
            if done.cancelled() or done.exception() is not None:
                self._remembered.pop(wanted, None)
                return
            self._remembered_bytes += _size(done)
            for oldest in list(self._remembered):
                if self._remembered_bytes <= _CACHE_BYTES and len(self._remembered) <= _CACHE_ENTRIES:
                    break
                if oldest != wanted and (found := self._remembered[oldest]).done():
                    self._remembered_bytes -= _size(found)
                    del self._remembered[oldest]

    def _compile(self, wanted: StructuredOutput) -> Any:
        is_json = wanted.kind.startswith("json")
        with self._facts_lock:
            if is_json not in self._facts:
                facts = _tokenizer_facts(self._tokenizer, self._vocab_size, is_json=is_json)
                self._facts[is_json] = (facts, facts.info())
            facts, info = self._facts[is_json]
        serialised = self._processes.prepare(wanted, "json" if is_json else "text", facts)
        return _library().CompiledGrammar.deserialize_json(serialised.decode(), info)


class GrammarRun:
    """The grammar of one request, and where in it the output is. Used by the engine's thread only, but for ``wait``."""

    def __init__(self, compiled: Future[Any], stop_ids: Sequence[int]) -> None:
        self._compiled = compiled
        self._stop_ids = list(stop_ids)
        self._matcher: Any = None

    def wait(self) -> None:
        """Block until it is prepared.

        Raises:
            RequestError: it is no grammar, does not compile or took too long. EngineError: it could not be prepared.
        """
        try:
            self._compiled.result()
        except CancelledError as error:
            raise EngineError("the engine is closed") from error

    @property
    def is_ready(self) -> bool:
        """Whether it is compiled."""
        return self._compiled.done() and self.failure is None

    @property
    def failure(self) -> str | None:
        """Why it could not be prepared."""
        if not self._compiled.done():
            return None
        if self._compiled.cancelled():
            return f"{_FIELD}: the engine was closed before the grammar was compiled"
        error = self._compiled.exception()
        if error is None:
            return None
        return error.message if isinstance(error, RequestError) else f"{_FIELD}: it could not be prepared ({error})"

    @property
    def failure_kind(self) -> ErrorKind:
        """Whose failure it is: the request's, or the engine's."""
        is_request = not self._compiled.cancelled() and isinstance(self._compiled.exception(), RequestError)
        return "request" if is_request else "engine"

    def advance(self, tokens: Sequence[int]) -> bool:
        """Move by emitted tokens. False when one of them is not in the grammar: nothing can complete it any more."""
        matcher = self._started()
        return all(matcher.accept_token(token) for token in tokens)

    def fill(self, drafts: Sequence[int], rows: Tensor) -> None:
        """Write the masks of one request.

        Args:
            drafts: proposals of the block, ``[S-1]``. rows: ``[S, ceil(V/32)]`` int32 on the CPU, bit t of a row
            says whether token t is allowed.
        """
        matcher = self._started()
        rows.fill_(-1)
        walked = 0
        for row in range(rows.shape[0]):
            matcher.fill_next_token_bitmask(rows, row)
            if not rows[row].any():
                # A dead end. The stop token ends the request, and `advance` finds that it completes nothing.
                _allow(rows[row], self._stop_ids)
            # Asked of the mask first: the library writes a line to stderr for every token that it refuses.
            if row == len(drafts) or not _is_allowed(rows[row], drafts[row]) or not matcher.accept_token(drafts[row]):
                break
            walked += 1
            if matcher.is_terminated():
                break
        if walked:
            matcher.rollback(walked)

    def _started(self) -> Any:
        if self._matcher is None:
            self._matcher = _library().GrammarMatcher(self._compiled.result(), override_stop_tokens=self._stop_ids)
        return self._matcher


def allowed_tokens(runs: Sequence[GrammarRun | None], drafts: Tensor, vocab_size: int) -> Tensor:
    """Masks of a batch; reads the drafts on the host.

    Args:
        runs: the grammar of each request, or None. drafts: ``[B, S-1]`` int64 (``[B, 0]`` for the first token).

    Returns:
        ``[B, S, V]`` bool on the drafts' device, all true for requests without a grammar.
    """
    batch, rows = drafts.shape[0], drafts.shape[1] + 1
    words = -(-vocab_size // _ROW_BITS)
    bits = torch.full((batch, rows, words), -1, dtype=torch.int32)
    for run, row_bits, proposed in zip(runs, bits, drafts.tolist(), strict=True):
        if run is not None:
            run.fill(proposed, row_bits)
    # Bytes, not words, so that the wide intermediate has one byte per token.
    packed = bits.view(torch.uint8).to(drafts.device)
    places = torch.arange(8, dtype=torch.uint8, device=drafts.device)
    wide = (packed.unsqueeze(-1) >> places) & 1
    return wide.view(batch, rows, words * _ROW_BITS)[..., :vocab_size].bool()


def _tokenizer_facts(tokenizer: PreTrainedTokenizerBase, vocab_size: int, *, is_json: bool) -> TokenizerFacts:
    """xgrammar's view of the vocabulary, in which tokens without text can be in no grammar.

    These are the special tokens, which leave nothing in the output, whatever they are called; and for JSON, of one line
    here, all that hold a control character: xgrammar (0.2) lets strings of a bounded length contain them.
    """
    found = _library().TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
    special = {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}
    texts = [
        b"" if index in special or (is_json and any(byte < _FIRST_PRINTABLE for byte in text)) else text
        for index, text in enumerate(found.decoded_vocab)
    ]
    return TokenizerFacts(texts, vocab_size, bool(found.add_prefix_space))


def _is_allowed(row: Tensor, token: int) -> bool:
    return bool((int(row[token // _ROW_BITS]) >> (token % _ROW_BITS)) & 1)


def _allow(row: Tensor, tokens: Sequence[int]) -> None:
    words = row.numpy().view(np.uint32)
    for token in tokens:
        words[token // _ROW_BITS] |= np.uint32(1 << (token % _ROW_BITS))


def _library() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise RequestError(
            _FIELD,
            "a form for the output",
            "None: xgrammar is not installed on this server",
            hint="pip install 'trtllm-dflash[structured]'",
        ) from error
    return xgrammar


def _size(done: Future[Any]) -> int:
    return int(done.result().memory_size_bytes)
