"""Structured output: which tokens a grammar allows, for every row of a block.

Row j of a block predicts the token after drafts 1..j, so the matcher walks the drafts, giving one mask per row, and is
rolled back; it moves for good only by tokens that were emitted. Rows behind a draft that the grammar forbids are never
reached, because that draft is never accepted, and stay open. The grammar's end is a stop id: where it is complete, stop
ids are allowed, and where nothing can follow, nothing else is.

Grammars are xgrammar's (https://github.com/mlc-ai/xgrammar, arXiv 2411.15100): it parses, compiles and matches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trtllm_dflash.config.structured_output import StructuredOutput
from trtllm_dflash.errors import EngineError, RequestError

_FIELD = "structured_output"
_CACHE_BYTES = 256 << 20
_ROW_BITS = 32
_FIRST_PRINTABLE = 0x20


class GrammarCompiler:
    """Compiles grammars for one tokenizer on a worker thread, and remembers them.

    Args:
        tokenizer: the target's. vocab_size: V, the width of masks.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compilers: dict[bool, Any] = {}
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    def start(self, wanted: StructuredOutput, stop_ids: Sequence[int], on_ready: Callable[[], None]) -> GrammarRun:
        """Check a grammar now and compile it in the background.

        Args:
            stop_ids: what ends the request's output. on_ready: called, on any thread, when the run can be used.

        Raises:
            RequestError: it is not a grammar, xgrammar is not installed, or nothing could end the output.
        """
        if not stop_ids:
            raise RequestError(
                "ignore_eos", True, "false with structured_output, or stop_token_ids: the form's end is a stop token"
            )
        parsed = _parse(wanted)
        try:
            future = self._worker.submit(self._compile, parsed, wanted.kind.startswith("json"))
        except RuntimeError as error:
            raise EngineError("the engine is closed") from error
        future.add_done_callback(lambda _: on_ready())
        return GrammarRun(future, stop_ids)

    def close(self) -> None:
        """Compile nothing more."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _compile(self, parsed: Any, is_json: bool) -> Any:
        if is_json not in self._compilers:
            facts = _tokenizer_facts(self._tokenizer, self._vocab_size, is_json=is_json)
            self._compilers[is_json] = _library().GrammarCompiler(facts, max_threads=1, cache_limit_bytes=_CACHE_BYTES)
        return self._compilers[is_json].compile_grammar(parsed)


class GrammarRun:
    """The grammar of one request, and where in it the output is. Used by the engine's thread only."""

    def __init__(self, compiled: Future[Any], stop_ids: Sequence[int]) -> None:
        self._compiled = compiled
        self._stop_ids = list(stop_ids)
        self._matcher: Any = None

    @property
    def is_ready(self) -> bool:
        """Whether it is compiled."""
        return self._compiled.done() and self.failure is None

    @property
    def failure(self) -> str | None:
        """Why it could not be compiled."""
        if not self._compiled.done():
            return None
        if self._compiled.cancelled():
            return f"{_FIELD}: the engine was closed before the grammar was compiled"
        error = self._compiled.exception()
        return None if error is None else f"{_FIELD}: the grammar could not be compiled ({_first_line(error)})"

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


def _parse(wanted: StructuredOutput) -> Any:
    grammar = _library().Grammar
    try:
        if wanted.kind == "regex":
            return grammar.from_regex(wanted.text)
        if wanted.kind == "grammar":
            return grammar.from_ebnf(wanted.text)
        # One fixed layout: with free white space a sampled output may consist of nothing else.
        if wanted.kind == "json_object":
            return grammar.from_json_schema('{"type": "object"}', any_whitespace=False, strict_mode=False)
        return grammar.from_json_schema(wanted.text, any_whitespace=False)
    except RuntimeError as error:
        shown = wanted.text if len(wanted.text) <= 80 else wanted.text[:77] + "..."
        raise RequestError(_FIELD, {wanted.kind: shown}, f"a valid {wanted.kind}: {_first_line(error)}") from error


def _tokenizer_facts(tokenizer: PreTrainedTokenizerBase, vocab_size: int, *, is_json: bool) -> Any:
    """xgrammar's view of the vocabulary, in which tokens without text can be in no grammar.

    These are the special tokens, which leave nothing in the output, whatever they are called; and for JSON, of one line
    here, all that hold a control character: xgrammar (0.2) lets strings of a bounded length contain them.
    """
    library = _library()
    found = library.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
    special = {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}
    texts = [
        b"" if index in special or (is_json and any(byte < _FIRST_PRINTABLE for byte in text)) else text
        for index, text in enumerate(found.decoded_vocab)
    ]
    return library.TokenizerInfo(
        texts, library.VocabType.RAW, vocab_size=vocab_size, add_prefix_space=found.add_prefix_space
    )


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


def _first_line(error: BaseException) -> str:
    """xgrammar's message without the time and the place in its sources."""
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0].split(": ", 1)[-1] if text[0].startswith("[") else text[0]
