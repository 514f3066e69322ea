"""Per-slot state of running requests: device tensors indexed by slot.

The host edits a slot when a request starts or ends and otherwise only reads results. The cycle gathers the rows of the
slots it runs and publishes what changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.ops import cuda_cycle

MAX_STOP_IDS = 64
MAX_BIAS_IDS = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 16

# Matches no token id and is not the wildcard.
_NO_TOKEN = -2
_ANY_TOKEN = -1
# Beyond every useful value, and times a logit still a float32.
_LARGE = 1e30
# Rows of the scalar matrices: anchor, context length, remaining, generated, seed, top-k, min_tokens; and temperature,
# top-p, min-p and three penalties.
_INT_ROWS, _FLOAT_ROWS = 7, 6


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

    def on_kernels(self) -> SamplingMode:
        """The mode whose graph serves this one: the acceptance kernel looks at each request's own temperature and
        filters, so greedy, sampled and filtered requests share a graph."""
        return replace(self, sampled=True, filtered=True, top_k_bound=None)

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
        block_lengths: rows of the block that exist, given the block size that was gathered for.
        ints: ``[7, B]``, the matrix that the integers above are rows of.
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
    block_lengths: Tensor
    ints: Tensor


class SlotState:
    """Device tensors of every slot, and of one idle slot (the last) that pads a batch: it emits and writes nothing.

    Scalars of all slots lie in two matrices, one row per quantity: a batch gathers them in two launches, and each
    gathered row is contiguous.

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
        rows = slots + 1

        def ints(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int64, device=device)

        self.device = device
        self.scratch_page = scratch_page
        self.idle_slot = slots
        self._ints = ints(_INT_ROWS, rows)
        (
            self.anchors,
            self.context_lengths,
            self.remaining,
            self.generated,
            self.seeds,
            self.top_k,
            self.min_tokens,
        ) = self._ints
        self._floats = torch.zeros(_FLOAT_ROWS, rows, dtype=torch.float32, device=device)
        self.temperatures, self.top_p, self.min_p, self.repetition, self.presence, self.frequency = self._floats
        self.top_p.fill_(1.0)
        self.repetition.fill_(1.0)
        # An idle block attends to nothing of its own, and a softmax over no key at all is NaN.
        self.context_lengths[slots] = 1
        self._biased: set[int] = set()
        self._banned: set[int] = set()
        self.page_table = ints(rows, pages_per_request, fill=scratch_page)
        self.stop_ids = ints(rows, MAX_STOP_IDS, fill=-1)
        self.bias_ids = ints(rows, MAX_BIAS_IDS)
        self.bias_values = torch.zeros(rows, MAX_BIAS_IDS, dtype=torch.float32, device=device)
        self.bad_prefixes = ints(rows, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS - 1, fill=_NO_TOKEN)
        self.bad_last = ints(rows, MAX_BAD_WORDS)
        self.history = ints(rows, history_length)
        self.output_counts = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)
        self.prompt_seen = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device)

    @classmethod
    def of_limits(cls, limits: BuildLimits, *, vocab_size: int, scratch_page: int, device: torch.device) -> SlotState:
        """The state of an engine with these limits; on device ``meta`` it takes nothing and only knows its size."""
        return cls(
            slots=limits.max_batch_size,
            history_length=limits.max_seq_len + limits.block_size,
            pages_per_request=-(-limits.max_seq_len // limits.page_tokens),
            scratch_page=scratch_page,
            vocab_size=vocab_size,
            device=device,
        )

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor) and value._base is None)

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
        """Fill ``slot`` for a request; nothing of the previous one that it will read remains.

        ``seed`` is any 64-bit pattern. ``output`` is what a request that goes on after a preemption had emitted: its
        next cycle starts from there. Nothing here waits for the device.
        """
        mode = SamplingMode.of(params)
        vocab_size = self.output_counts.shape[1]
        sequence = [*prompt, *output]
        ints = [
            sequence[-1],
            # The last prompt token plays the anchor of the first (draftless) acceptance.
            len(sequence) - 1,
            max_output_tokens - len(output),
            len(output),
            seed - (1 << 64) if seed >= 1 << 63 else seed,
            min(params.top_k, vocab_size),
            min(params.min_tokens, max_output_tokens),
        ]
        floats = [
            0.0 if params.is_greedy else min(params.temperature, _LARGE),
            params.top_p,
            params.min_p,
            min(max(params.repetition_penalty, 1 / _LARGE), _LARGE),
            params.presence_penalty,
            params.frequency_penalty,
        ]
        # One upload for three tensors: with short requests this is a good part of the host's time.
        uploaded = upload(
            [*ints, *stop_ids, *[-1] * (MAX_STOP_IDS - len(stop_ids)), *self._page_row(pages)], torch.int64, self.device
        )
        self._ints[:, slot] = uploaded[:_INT_ROWS]
        self.stop_ids[slot] = uploaded[_INT_ROWS : _INT_ROWS + MAX_STOP_IDS]
        self.page_table[slot] = uploaded[_INT_ROWS + MAX_STOP_IDS :]
        self._floats[:, slot] = upload(floats, torch.float32, self.device)
        self._start_bias(slot, params)
        self._start_bad_words(slot, bad_words)
        # Only these read what came before; a neutral penalty gives the same logits whatever the counts say.
        if mode.bad_words or mode.penalties:
            ids = upload(sequence, torch.int64, self.device)
            self.history[slot, : len(sequence)] = ids
            self.output_counts[slot].zero_()
            emitted = ids[len(prompt) :]
            self.output_counts[slot].scatter_add_(0, emitted, torch.ones_like(emitted, dtype=torch.int32))
            self.prompt_seen[slot].zero_()
            self.prompt_seen[slot].index_fill_(0, ids[: len(prompt)], True)

    def _page_row(self, pages: Sequence[int]) -> list[int]:
        return [*pages, *[self.scratch_page] * (self.page_table.shape[1] - len(pages))]

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Give ``slot`` these pages, in order of positions; nothing waits for the device."""
        self.page_table[slot] = upload(self._page_row(pages), torch.int64, self.device)

    def add_pages(self, added: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Give slots more pages, those of all in one launch; nothing waits for the device.

        Args:
            added: (slot, number of pages it had, the new ones) of each.
        """
        columns = self.page_table.shape[1]
        places = [slot * columns + held + i for slot, held, pages in added for i in range(len(pages))]
        if not places:
            return
        new = [page for _, _, pages in added for page in pages]
        indices, values = upload([places, new], torch.int64, self.device)
        self.page_table.view(-1).index_copy_(0, indices, values)

    def gather(self, slots: Tensor, page_columns: int, block_size: int, *, kernels: bool = False) -> SlotRows:
        """Rows of ``slots [B]``; the page table is cut to ``page_columns``, a host-known bound.

        A block never reaches beyond the tokens a request may still emit; a request that has ended has a block of no
        rows: it writes, attends to and emits nothing. ``kernels`` uses the plugin library's for it.
        """
        table = self.page_table[:, :page_columns]
        if kernels:
            gathered = cuda_cycle.gather_state(slots, self._ints, self._floats, table, self.stop_ids, block_size)
            ints, floats, lengths = gathered.ints, gathered.floats, gathered.block_lengths
            pages, stop_ids = gathered.pages, gathered.stop_ids
        else:
            ints, floats = self._ints.index_select(1, slots), self._floats.index_select(1, slots)
            remaining = ints[2]
            lengths = (remaining + (remaining > 0)).clamp_max(block_size)
            pages, stop_ids = table.index_select(0, slots), self.stop_ids.index_select(0, slots)
        return SlotRows(
            slots=slots,
            anchors=ints[0],
            context_lengths=ints[1],
            remaining=ints[2],
            generated=ints[3],
            page_table=pages,
            seeds=ints[4],
            temperatures=floats[0],
            top_k=ints[5],
            top_p=floats[1],
            min_p=floats[2],
            stop_ids=stop_ids,
            block_lengths=lengths,
            ints=ints,
        )

    def advance(self, rows: SlotRows, tokens: Tensor, produced: Tensor, status: Tensor) -> None:
        """Move the slots of ``rows`` forward by a cycle, on the plugin library's kernel (``runtime.cycle.publish``)."""
        cuda_cycle.publish_state(self._ints, rows.slots, rows.ints, tokens, produced, status)

    def set_progress(self, slots: Tensor, progress: Tensor) -> None:
        """Write ``progress [4, B]``: anchors, context lengths, remaining and generated tokens of ``slots [B]``."""
        self._ints[:4].index_copy_(1, slots, progress)

    def _start_bias(self, slot: int, params: SamplingParams) -> None:
        """Bias of the new request, or none where the previous one left some."""
        if not params.logit_bias and slot not in self._biased:
            return
        count = len(params.logit_bias)
        ids = [*params.logit_bias, *[0] * (MAX_BIAS_IDS - count)]
        values = [float("-inf") if bias <= -100 else bias for bias in params.logit_bias.values()]
        self.bias_ids[slot] = upload(ids, torch.int64, self.device)
        self.bias_values[slot] = upload([*values, *[0.0] * (MAX_BIAS_IDS - count)], torch.float32, self.device)
        (self._biased.add if count else self._biased.discard)(slot)

    def _start_bad_words(self, slot: int, bad_words: Sequence[Sequence[int]]) -> None:
        """Bad words of the new request, or none where the previous one left some."""
        if not bad_words and slot not in self._banned:
            return
        width = self.bad_prefixes.shape[-1]
        # An empty entry has a prefix that matches nothing; a shorter word's prefix starts with wildcards.
        prefixes = [[_ANY_TOKEN] * (width - len(word) + 1) + list(word[:-1]) for word in bad_words]
        prefixes += [[_NO_TOKEN] * width] * (MAX_BAD_WORDS - len(prefixes))
        last = [*(word[-1] for word in bad_words), *[0] * (MAX_BAD_WORDS - len(bad_words))]
        self.bad_prefixes[slot] = upload(prefixes, torch.int64, self.device)
        self.bad_last[slot] = upload(last, torch.int64, self.device)
        (self._banned.add if bad_words else self._banned.discard)(slot)


def upload(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """``values`` as a tensor on ``device``; on a GPU through pinned memory, so that the host does not wait for it."""
    on_host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)
