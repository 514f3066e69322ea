"""After every cycle the drafter cache holds exactly what a from-scratch injection of the committed prefix gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from tiny_pair import ACTIVE
from torch import Tensor
from transformers import PreTrainedModel

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.engine.directory import load_session
from trtllm_dflash.engine.torch_session import TorchSession
from trtllm_dflash.runtime.cycle import draft_verify_cycle, flat_slots, prepare
from trtllm_dflash.runtime.prefill import PrefillRunner, plan_chunks
from trtllm_dflash.runtime.request import Request, RequestSpec
from trtllm_dflash.runtime.slots import SamplingMode, SlotState
from trtllm_dflash.runtime.text import TextStream

CYCLES = 8


def _features(model: PreTrainedModel, ids: Sequence[int], layers: Sequence[int]) -> Tensor:
    """Outputs of decoder layers, by hooks: transformers' hidden_states has the last one after the final norm."""
    captured: dict[int, Tensor] = {}
    handles = [
        model.model.layers[layer].register_forward_hook(
            lambda _module, _args, output, layer=layer: captured.update(
                {layer: output[0] if isinstance(output, tuple) else output}
            )
        )
        for layer in layers
    ]
    try:
        with torch.inference_mode():
            model(torch.tensor([list(ids)]))
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat([captured[layer].reshape(len(ids), -1) for layer in layers], dim=-1)


class _Loop:
    """Two requests driven by hand over one session, with page tables out of order."""

    def __init__(
        self, session: TorchSession, prompts: Sequence[Sequence[int]], params: SamplingParams, tokenizer: object
    ):
        self.session = session
        limits = session.limits
        session.allocate_caches(16)
        self.state = SlotState(
            2,
            limits.max_seq_len + limits.block_size,
            limits.max_seq_len // limits.page_tokens,
            16,
            session.target_config.vocab_size,
            session.device,
        )
        self.pages = ([5, 0, 9, 3], [2, 14, 7, 11])
        self.sequences = [list(prompt) for prompt in prompts]
        self.mode = SamplingMode.of(params)
        self.requests = []
        for slot, prompt in enumerate(prompts):
            spec = RequestSpec(str(slot), tuple(prompt), params, self.mode, 60, (), (), 11 + slot)
            text = TextStream(tokenizer.backend_tokenizer, (), include_stop=False)  # type: ignore[attr-defined]
            request = Request(spec, text, lambda chunk: None, limits.block_size, slot=slot)
            self.requests.append(request)
            self.state.start(
                slot,
                prompt,
                params,
                seed=11 + slot,
                max_output_tokens=60,
                stop_ids=(),
                bad_words=(),
                pages=self.pages[slot],
            )

    def prefill(self, budget: int) -> None:
        while waiting := [r for r in self.requests if r.prefilled < len(r.spec.prompt)]:
            completed, result = PrefillRunner(self.session, self.state).run(plan_chunks(waiting, budget))
            for row, request in enumerate(completed):
                assert result is not None
                self.sequences[int(request.spec.request_id)].append(int(result.tokens[row, 0]))

    def cycle(self) -> list[int]:
        slots = torch.tensor([0, 1])
        result = draft_verify_cycle(self.session, self.state, slots, self.session.limits.block_size, 4, self.mode)
        for row, sequence in enumerate(self.sequences):
            sequence.extend(result.tokens[row, : int(result.produced[row])].tolist())
        return result.accepted.tolist()

    def cached(self, slot: int) -> list[Tensor]:
        """A copy of K and V of every drafter layer, by position."""
        pages = torch.tensor(self.pages[slot])
        return [tensor[pages].flatten(0, 1) for layer in self.session.drafter_caches for tensor in (layer.k, layer.v)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["llama-v2", "qwen3-v1"])
def test_cache_equals_injection_from_scratch(
    tiny_engines: Callable, tiny_pairs: Callable, tiny_tokenizer: object, name: str, temperature: float
) -> None:
    engines = tiny_engines(name)
    session, fresh = load_session(engines, device="cpu"), load_session(engines, device="cpu")
    assert isinstance(session, TorchSession)
    assert isinstance(fresh, TorchSession)
    assert session.drafter_config is not None
    layers = session.drafter_config.target_layer_ids
    prompts = [[ACTIVE[n % 16] for n in range(41)], [ACTIVE[n % 7] for n in range(5)]]
    params = SamplingParams(temperature=temperature, ignore_eos=True)
    loop = _Loop(session, prompts, params, tiny_tokenizer)
    loop.prefill(budget=7)
    accepted: list[int] = []
    for _ in range(CYCLES):
        before = [loop.cached(slot) for slot in range(2)]
        accepted += loop.cycle()
        for slot, sequence in enumerate(loop.sequences):
            # The newest token is the anchor: emitted, not yet computed, not injected.
            committed = sequence[:-1]
            assert int(loop.state.context_lengths[slot]) == len(committed)
            fresh.allocate_caches(4)
            positions = torch.arange(len(committed))
            fresh.inject(_features(tiny_pairs(name).model, committed, layers), positions, positions)
            expected = [
                tensor.flatten(0, 1)[: len(committed)]
                for layer in fresh.drafter_caches
                for tensor in (layer.k, layer.v)
            ]
            for found, wanted, old in zip(loop.cached(slot), expected, before[slot], strict=True):
                torch.testing.assert_close(found[: len(committed)], wanted, atol=2e-5, rtol=1e-5)
                # Rejected rows and the new anchor are not even written.
                assert torch.equal(found[len(committed) :], old[len(committed) :])
    assert 0 < sum(accepted) < len(accepted) * (session.limits.block_size - 1)


def test_padding_of_short_blocks_changes_no_committed_position(tiny_engines: Callable, tiny_tokenizer: object) -> None:
    """A block that is cut by the limit writes neither beyond its request's extent nor into another's pages."""
    session = load_session(tiny_engines("llama-v2"), device="cpu")
    assert isinstance(session, TorchSession)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    loop = _Loop(session, [[ACTIVE[1]] * 30, [ACTIVE[2]] * 30], params, tiny_tokenizer)
    loop.prefill(budget=64)
    loop.state.remaining[0] = 2
    before = [
        tensor.clone() for layer in (*session.target_caches, *session.drafter_caches) for tensor in (layer.k, layer.v)
    ]
    rows = prepare(session, loop.state, torch.tensor([0]), session.limits.block_size, 4)
    assert rows.block_lengths.tolist() == [3]
    draft_verify_cycle(session, loop.state, torch.tensor([0]), session.limits.block_size, 4, loop.mode)
    after = [tensor for layer in (*session.target_caches, *session.drafter_caches) for tensor in (layer.k, layer.v)]
    # Positions 30 .. 32 of slot 0: the last two rows of its first page and the first of its second.
    allowed = {5 * 32 + 30, 5 * 32 + 31, 0 * 32 + 0}
    for old, new in zip(before, after, strict=True):
        rows = (old[:-1] != new[:-1]).flatten(0, 1).flatten(1).any(-1).nonzero().flatten().tolist()
        assert set(rows) <= allowed


def test_cache_rows_beyond_32_bits(tiny_engines: Callable) -> None:
    """A pool may have more rows than an int32 counts."""
    session = load_session(tiny_engines("llama-v2"), device="cpu")
    assert session.limits.page_tokens == 32
    pages = torch.tensor([[5, 2**27], [2**31, 2**33 - 1]])
    positions = torch.tensor([[31, 33, 34], [1, 63, 64]])
    exists = torch.tensor([[True, True, True], [True, True, False]])
    expected = [[5 * 32 + 31, 2**32 + 1, 2**32 + 2], [2**36 + 1, 2**38 - 1, -1]]
    assert flat_slots(session, pages, positions, exists).tolist() == expected
