"""Per-slot state of running requests: device tensors indexed by slot.

The host edits a slot when a request starts or ends and otherwise only reads results. The cycle gathers the rows of the
slots it runs and publishes what changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_dflash.config.sampling import SamplingParams

MAX_STOP_IDS = 64
MAX_BIAS_IDS = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 16

# Matches no token id and is not the wildcard.
_NO_TOKEN = -2
_ANY_TOKEN = -1
# Beyond every useful value, and times a logit still a float32.
_LARGE = 1e30


@dataclass(frozen=True)
class SamplingMode:
    """Which parts of sampling a pass needs: the union over its requests, known to the host.

    Each combination is its own captured graph on a GPU; parts that are off cost nothing. ``top_k_bound`` is the
    largest top-k of the requests, or None when one of them samples without top-k: only with a bound can filtering
    look at a few tokens instead of sorting the vocabulary.
    """

    sampled: bool = False
    filtered: bool = False
    top_k_bound: int | None = None
    penalties: bool = False
    bias: bool = False
    bad_words: bool = False
    min_tokens: bool = False
    logprobs: int | None = None
    grammar: bool = False

    def __or__(self, other: SamplingMode) -> SamplingMode:
        wanted = [n for n in (self.logprobs, other.logprobs) if n is not None]
        return SamplingMode(
            self.sampled or other.sampled,
            self.filtered or other.filtered,
            _joint_bound(self, other),
            self.penalties or other.penalties,
            self.bias or other.bias,
            self.bad_words or other.bad_words,
            self.min_tokens or other.min_tokens,
            max(wanted) if wanted else None,
            self.grammar or other.grammar,
        )

    @staticmethod
    def of(params: SamplingParams) -> SamplingMode:
        """The parts one request needs."""
        sampled = not params.is_greedy
        return SamplingMode(
            sampled=sampled,
            filtered=sampled and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0),
            top_k_bound=params.top_k if sampled and params.top_k > 0 else None,
            penalties=(params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0),
            bias=bool(params.logit_bias),
            bad_words=bool(params.bad_words),
            min_tokens=params.min_tokens > 0,
            logprobs=params.logprobs,
            grammar=params.structured_output is not None,
        )


def _joint_bound(one: SamplingMode, other: SamplingMode) -> int | None:
    bounds = [mode.top_k_bound for mode in (one, other) if mode.sampled]
    known = [bound for bound in bounds if bound is not None]
    return max(known) if known and len(known) == len(bounds) else None


@dataclass(frozen=True)
class SlotRows:
    """The state of B running slots, gathered for one pass. Shapes ``[B]`` unless said otherwise.

    Attributes:
        slots: the slot of each row. anchors: last emitted token. context_lengths: L.
        remaining: output tokens still allowed; generated: output tokens so far.
        page_table: ``[B, P]``. seeds: int64. temperatures, top_p, min_p: float32. top_k: int64, 0 = off.
        stop_ids: ``[B, MAX_STOP_IDS]``, -1 = none.
    """

    slots: Tensor
    anchors: Tensor
    context_lengths: Tensor
    remaining: Tensor
    generated: Tensor
    page_table: Tensor
    seeds: Tensor
    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    stop_ids: Tensor


class SlotState:
    """Device tensors of every slot.

    Args:
        slots: number of slots. history_length: longest sequence plus one block, which may reach past it.
        pages_per_request: columns of the page table. scratch_page: page id that fills unused columns. vocab_size: V.
    """

    def __init__(
        self,
        slots: int,
        history_length: int,
        pages_per_request: int,
        scratch_page: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        def ints(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int64, device=device)

        def floats(fill: float) -> Tensor:
            return torch.full((slots,), fill, dtype=torch.float32, device=device)

        self.device = device
        self.scratch_page = scratch_page
        self.anchors = ints(slots)
        self.context_lengths = ints(slots)
        self.remaining = ints(slots)
        self.generated = ints(slots)
        self.page_table = ints(slots, pages_per_request, fill=scratch_page)
        self.seeds = ints(slots)
        self.temperatures = floats(0.0)
        self.top_k = ints(slots)
        self.top_p = floats(1.0)
        self.min_p = floats(0.0)
        self.repetition = floats(1.0)
        self.presence = floats(0.0)
        self.frequency = floats(0.0)
        self.min_tokens = ints(slots)
        self.stop_ids = ints(slots, MAX_STOP_IDS, fill=-1)
        self.bias_ids = ints(slots, MAX_BIAS_IDS)
        self.bias_values = torch.zeros(slots, MAX_BIAS_IDS, dtype=torch.float32, device=device)
        self.bad_prefixes = ints(slots, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS - 1, fill=_NO_TOKEN)
        self.bad_last = ints(slots, MAX_BAD_WORDS)
        self.history = ints(slots, history_length)
        self.output_counts = torch.zeros(slots, vocab_size, dtype=torch.int32, device=device)
        self.prompt_seen = torch.zeros(slots, vocab_size, dtype=torch.bool, device=device)

    def start(
        self,
        slot: int,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        max_output_tokens: int,
        stop_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]],
        pages: Sequence[int],
        output: Sequence[int] = (),
    ) -> None:
        """Fill ``slot`` for a request; nothing of the previous one remains. ``seed`` is any 64-bit pattern.

        ``output`` is what a request that goes on after a preemption had emitted: its next cycle starts from there.
        """
        device = self.device
        sequence = [*prompt, *output]
        self.anchors[slot] = sequence[-1]
        # The last prompt token plays the anchor of the first (draftless) acceptance.
        self.context_lengths[slot] = len(sequence) - 1
        self.remaining[slot] = max_output_tokens - len(output)
        self.generated[slot] = len(output)
        self.page_table[slot].fill_(self.scratch_page)
        self.set_pages(slot, pages)
        self.seeds[slot] = seed - (1 << 64) if seed >= 1 << 63 else seed
        self.temperatures[slot] = 0.0 if params.is_greedy else min(params.temperature, _LARGE)
        self.top_k[slot] = min(params.top_k, self.output_counts.shape[1])
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.repetition[slot] = min(max(params.repetition_penalty, 1 / _LARGE), _LARGE)
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.min_tokens[slot] = min(params.min_tokens, max_output_tokens)
        self.stop_ids[slot].fill_(-1)
        self.stop_ids[slot, : len(stop_ids)] = torch.tensor(list(stop_ids), dtype=torch.int64, device=device)
        self._start_bias(slot, params)
        self._start_bad_words(slot, bad_words)
        ids = torch.tensor(sequence, dtype=torch.int64, device=device)
        self.history[slot, : len(sequence)] = ids
        self.output_counts[slot].zero_()
        if output:
            counted = torch.bincount(ids[len(prompt) :], minlength=self.output_counts.shape[1])
            self.output_counts[slot] = counted.to(self.output_counts.dtype)
        self.prompt_seen[slot].zero_()
        self.prompt_seen[slot, ids[: len(prompt)]] = True

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """The pages of a request that starts or has grown, from its first position on."""
        self.page_table[slot, : len(pages)] = torch.tensor(list(pages), dtype=torch.int64, device=self.device)

    def gather(self, slots: Tensor, page_columns: int) -> SlotRows:
        """Rows of ``slots [B]``; the page table is cut to ``page_columns``, a host-known bound."""
        return SlotRows(
            slots=slots,
            anchors=self.anchors[slots],
            context_lengths=self.context_lengths[slots],
            remaining=self.remaining[slots],
            generated=self.generated[slots],
            page_table=self.page_table[slots, :page_columns],
            seeds=self.seeds[slots],
            temperatures=self.temperatures[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            min_p=self.min_p[slots],
            stop_ids=self.stop_ids[slots],
        )

    def _start_bias(self, slot: int, params: SamplingParams) -> None:
        self.bias_ids[slot].zero_()
        self.bias_values[slot].zero_()
        for column, (token, bias) in enumerate(params.logit_bias.items()):
            self.bias_ids[slot, column] = token
            self.bias_values[slot, column] = float("-inf") if bias <= -100 else bias

    def _start_bad_words(self, slot: int, bad_words: Sequence[Sequence[int]]) -> None:
        # An empty entry has a prefix that matches nothing; a shorter word's prefix starts with wildcards.
        self.bad_prefixes[slot].fill_(_NO_TOKEN)
        self.bad_last[slot].zero_()
        width = self.bad_prefixes.shape[-1]
        for row, word in enumerate(bad_words):
            prefix = [_ANY_TOKEN] * (width - len(word) + 1) + list(word[:-1])
            self.bad_prefixes[slot, row] = torch.tensor(prefix, dtype=torch.int64, device=self.device)
            self.bad_last[slot, row] = word[-1]
