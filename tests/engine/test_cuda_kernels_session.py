"""The torch backend on the plugin kernels: networks, graphs and overlap against the torch definitions."""

from __future__ import annotations

import random
from dataclasses import replace
from types import MethodType

import pytest
import torch
from gpu_pair import LIMITS, gpu_session, tokenizer_directory

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.engine.session import DraftInputs, DraftOutputs, TargetInputs, TargetOutputs
from trtllm_dflash.engine.torch_session import TorchSession
from trtllm_dflash.ops.plugin_library import find_library
from trtllm_dflash.ops.torch_dense import Fp8Matrix, fp8_linear, quantize_rows
from trtllm_dflash.runtime.cycle_runner import EngineOptions
from trtllm_dflash.runtime.llm import LLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(find_library() is None, reason="needs the compiled plugin library"),
]

# bfloat16 has 8 bits of significand; errors of a few layers add up to a few of its last places.
TOLERANCE = 6e-2
KINDS = ("llama-v1", "llama-v2", "qwen3-v2")


def _passes(session: TorchSession) -> tuple[list[torch.Tensor], DraftOutputs]:
    """Prefill of two prompts, injection, a draft and a verification: every output that is a number, and the draft."""
    device = session.device
    session.allocate_caches(8)
    lengths = (37, 90)
    total = sum(lengths)
    draw = torch.Generator(device="cpu").manual_seed(0)
    ids = torch.randint(3, 500, (total,), generator=draw).to(device)
    pages = torch.tensor([[0, 1, 2, 8], [3, 4, 5, 6]], device=device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    owner = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths)).to(device)
    size = session.limits.page_tokens
    slots = pages[owner, positions // size] * size + positions % size
    starts = torch.tensor([0, 37, 127], device=device)
    zero = torch.zeros(2, dtype=torch.int64, device=device)
    last = starts[1:] - 1
    prefill = session.target(TargetInputs(ids, positions, slots, pages, zero, starts, last, max(lengths)))
    session.inject(prefill.features, positions, slots)
    contexts = torch.tensor(lengths, device=device)
    anchors = torch.tensor([7, 11], device=device)
    full = torch.tensor([8, 5], device=device)
    draft = session.draft(
        DraftInputs(anchors, contexts, full, pages, torch.ones(2, device=device), torch.zeros(2, 7, device=device)), 8
    )
    offsets = torch.arange(8, device=device)
    block = (contexts[:, None] + offsets).reshape(-1)
    block_slots = pages[torch.arange(2, device=device).repeat_interleave(8), block // size] * size + block % size
    verify = session.target(
        TargetInputs(
            torch.cat((anchors[:, None], torch.full((2, 7), 33, device=device)), 1).reshape(-1),
            block,
            torch.where((offsets < full[:, None]).reshape(-1), block_slots, -1),
            pages,
            contexts,
            torch.tensor([0, 8, 16], device=device),
            None,
            8,
            8,
        )
    )
    # The rows beyond a request's block have no meaning.
    rows = torch.tensor([*range(8), *range(8, 13)], device=device)
    caches = [part[:7] for cache in (*session.target_caches, *session.drafter_caches) for part in (cache.k, cache.v)]
    return [prefill.logits, prefill.features, verify.logits[rows], verify.features[rows], *caches], draft


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_networks_on_kernels_equal_the_torch_definitions(kind: str, dtype: str) -> None:
    on_kernels = gpu_session(kind, dtype, kernels="plugins")
    assert on_kernels.uses_kernels
    plain = gpu_session(kind, dtype, kernels="torch")
    (ours, our_draft), (expected, draft) = _passes(on_kernels), _passes(plain)
    for one, other in zip(ours, expected, strict=True):
        scale = other.float().abs().max().clamp_min(1e-3)
        assert ((one.float() - other.float()).abs().max() / scale).item() < TOLERANCE
    # The first position has the same predecessor in both: the same candidates, up to near ties, and the same q.
    for request in range(2):
        mine, theirs = (
            dict(zip(d.candidates[request, 0].tolist(), d.q_rows[request, 0].tolist(), strict=True))
            for d in (our_draft, draft)
        )
        common = mine.keys() & theirs.keys()
        assert len(common) >= len(theirs) - 2
        assert all(abs(mine[token] - theirs[token]) < TOLERANCE for token in common)


def _lag(session: TorchSession) -> None:
    """Every pass of the target starts late, so that the host is far ahead with what it wrote for the passes after."""
    real = session.target

    def target(self: object, inputs: TargetInputs) -> TargetOutputs:
        torch.cuda._sleep(2_000_000)
        return real(inputs)

    session.target = MethodType(target, session)  # type: ignore[method-assign]


def _tokens(kind: str, params: list[SamplingParams], **arguments: object) -> list[tuple[int, ...]]:
    draw = random.Random(1)
    prompts = [[draw.randrange(3, 500) for _ in range(draw.randrange(1, 120))] for _ in params]
    session = gpu_session(kind, "bfloat16", kernels="plugins")
    if arguments.pop("lagging", False):
        _lag(session)
    speculation = arguments.pop("speculation", "on")
    options = EngineOptions(**arguments)  # type: ignore[arg-type]
    with LLM.of_session(
        session,
        tokenizer_directory(),
        speculation=speculation,  # type: ignore[arg-type]
        kv_cache_tokens=256 * 24,
        options=options,
    ) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.stats().pages_used == 0
        assert all(output.finish_reason in ("stop", "length") for output in outputs)
    return [output.token_ids for output in outputs]


GREEDY = SamplingParams(temperature=0.0, max_tokens=50)
SAMPLED = SamplingParams(temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, seed=9, max_tokens=50)
EVERYTHING = replace(
    SAMPLED,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={20: 1.5},
    bad_words=("a",),
    min_tokens=5,
)


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_and_overlap_change_no_token(kind: str) -> None:
    """The same kernels on the same shapes: equal to the last bit, whatever launches them and when."""
    params = [GREEDY, SAMPLED, replace(GREEDY, max_tokens=3), EVERYTHING] * 4
    eager = _tokens(kind, params, graphs=False, overlap=False)
    assert _tokens(kind, params, graphs=False, overlap=True) == eager
    # Graphs pad the batch, and a matrix product of another size may round differently: one bucket holds 16 exactly.
    assert _tokens(kind, params[:1], graphs=True, overlap=True) == _tokens(kind, params[:1], graphs=False)
    assert _tokens(kind, params[1:2], graphs=True, overlap=True) == _tokens(kind, params[1:2], graphs=False)
    assert _tokens(kind, params[3:4], graphs=True, overlap=True) == _tokens(kind, params[3:4], graphs=False)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_device_that_lags_behind_the_host_changes_no_token(graphs: bool) -> None:
    """Slots, pages and batches of later passes are written by the host while earlier passes wait."""
    for params in ([GREEDY], [EVERYTHING]):
        expected = _tokens("llama-v2", params, graphs=False, overlap=False)
        assert _tokens("llama-v2", params, graphs=graphs, overlap=True, lagging=True) == expected


def test_adaptive_blocks_end_where_fixed_ones_do() -> None:
    params = [replace(GREEDY, max_tokens=30, ignore_eos=True)] * 9
    tokens = _tokens("llama-v2", params, adaptive=True, speculation="auto")
    assert [len(one) for one in tokens] == [30] * 9


def test_more_requests_than_slots_through_graphs() -> None:
    params = [replace(GREEDY, max_tokens=4 + n % 23, ignore_eos=True) for n in range(60)]
    tokens = _tokens("qwen3-v2", params, graphs=True, overlap=True)
    assert [len(one) for one in tokens] == [4 + n % 23 for n in range(60)]


def test_fp8_weights_and_cache_stay_close() -> None:
    plain = gpu_session("llama-v2", "bfloat16", kernels="plugins")
    rounded = gpu_session(
        "llama-v2", "bfloat16", kernels="plugins", quantization="fp8", target_cache_dtype=torch.float8_e4m3fn
    )
    assert rounded.cache_bytes_per_page() < plain.cache_bytes_per_page()
    assert rounded.weight_bytes() < plain.weight_bytes()
    (logits, *_), _ = _passes(rounded)
    (exact, *_), _ = _passes(plain)
    # Random weights stored with 3 bits of fraction: a few per cent of each product, and the same picture.
    error = (logits.float() - exact.float()).norm() / exact.float().norm()
    assert torch.isfinite(logits).all()
    assert error.item() < 0.5


def test_fp8_product_equals_its_definition() -> None:
    draw = torch.Generator(device="cuda").manual_seed(0)
    for rows in (1, 3, 16, 130):
        x = torch.randn(rows, 256, device="cuda", generator=draw).bfloat16()
        values, scales = quantize_rows(torch.randn(512, 256, device="cuda", generator=draw).bfloat16())
        matrix = Fp8Matrix(values, scales.t().contiguous())
        on_gpu = fp8_linear(x, matrix, None)
        on_cpu = fp8_linear(x.cpu(), Fp8Matrix(values.cpu(), matrix.scales.cpu()), None)
        assert ((on_gpu.cpu().float() - on_cpu.float()).abs().max() / on_cpu.float().abs().max()).item() < 2e-2


def test_limits_are_what_the_pair_was_made_for() -> None:
    assert LIMITS.page_tokens % 16 == 0
