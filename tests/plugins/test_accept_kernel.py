"""The accept kernel on a GPU: every decision against float64 probabilities, and the distribution it samples."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from trtllm_dflash.ops import cuda_select
from trtllm_dflash.ops.plugin_library import find_library
from trtllm_dflash.runtime.random_streams import ACCEPT_WORD, RESIDUAL_WORD, WALK_WORD, uniforms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(find_library() is None, reason="the plugin library is not built"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Masses are float32 sums of exp2 values: their relative error, with room.
NOISE = 1e-4


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def _probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Filtered distribution of rows ``[n, V]`` in float64, in the documented order."""
    scores, order = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
    scores = scores / temperature
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    if top_k > 0:
        scores = scores.masked_fill(ranks >= top_k, float("-inf"))
    p = torch.softmax(scores, dim=-1)
    kept = ((p.cumsum(-1) - p) < top_p) | (top_p >= 1)
    kept &= p >= min_p * p[..., :1]
    kept |= ranks == 0
    p = p * kept
    return torch.zeros_like(p).scatter_(-1, order, p / p.sum(-1, keepdim=True))


def _random_case(choose: random.Random, generator: torch.Generator, large: bool) -> dict[str, Tensor]:
    batch, block_size = choose.choice([1, 2, 4]), choose.choice([1, 2, 5, 8, 16])
    vocabulary = (
        choose.choice([151936, 151669, 300000]) if large else choose.choice([2, 17, 33, 400, 3000, 8193, 20000])
    )
    count = min(choose.choice([1, 4, 16, 32]), vocabulary)
    dtype = choose.choice(DTYPES)
    spread = choose.choice([0.2, 1.0, 3.0, 6.0])
    logits = torch.randn(batch, block_size, vocabulary, generator=generator, device="cuda") * spread
    if choose.random() < 0.3:
        logits = logits.round()
    drafts = block_size - 1
    order = torch.randint(vocabulary, (batch, drafts, count), generator=generator, device="cuda")
    if drafts:
        order = logits[:, :-1].topk(count).indices if choose.random() < 0.8 else order
    # Distinct candidates, some likely and some not.
    candidates = order + 0
    q = torch.softmax(torch.randn(batch, drafts, count, generator=generator, device="cuda") * 2, dim=-1)
    picks = torch.randint(count, (batch, drafts, 1), generator=generator, device="cuda")
    if choose.random() < 0.6:
        # Drafts the target likes, so that blocks get long.
        logits[:, :-1].scatter_add_(
            -1, candidates.gather(-1, picks), torch.full_like(picks, 4, dtype=torch.float32) * spread
        )
    return {
        "logits": logits.to(dtype),
        "draft_tokens": candidates.gather(-1, picks).squeeze(-1),
        "candidate_ids": candidates,
        "q_rows": q,
        "temperatures": torch.tensor([choose.choice([0.0, 0.3, 1.0, 1.5]) for _ in range(batch)], device="cuda"),
        "seeds": torch.randint(-(2**62), 2**62, (batch,), generator=generator, device="cuda"),
        "first_positions": torch.randint(1, 2**33, (batch,), generator=generator, device="cuda"),
        "block_lengths": torch.tensor(
            [choose.choice([block_size, block_size, choose.randint(0, block_size)]) for _ in range(batch)],
            device="cuda",
        ),
        "top_k": torch.tensor(
            [choose.choice([0, 0, 1, 5, 50, 700, vocabulary + 5]) for _ in range(batch)], device="cuda"
        ),
        "top_p": torch.tensor([choose.choice([1.0, 1.0, 0.1, 0.6, 0.95, 0.999]) for _ in range(batch)], device="cuda"),
        "min_p": torch.tensor([choose.choice([0.0, 0.0, 0.01, 0.2]) for _ in range(batch)], device="cuda"),
    }


def _judge(case: dict[str, Tensor], result: cuda_select.AcceptResult, request: int, where: str) -> bool:
    """Check one request; False when a decision hangs on rounding and the rest cannot be judged."""
    block = int(case["block_lengths"][request])
    block_size = case["logits"].shape[1]
    tokens = result.tokens[request].tolist()
    accepted, committed = int(result.accepted[request]), int(result.committed[request])
    assert not bool(result.faulty[request]), where
    if block == 0:
        assert (tokens, accepted, committed) == ([-1] * block_size, 0, 0), where
        return True
    assert committed == accepted + 1 <= block, where
    assert tokens[committed:] == [-1] * (block_size - committed), where
    drafts = case["draft_tokens"][request].tolist()
    assert tokens[:accepted] == drafts[:accepted], where
    logits = case["logits"][request, :block].float()
    temperature = float(case["temperatures"][request])
    if temperature <= 0:
        best = logits.double().argmax(-1)
        first = [int((row == row.max()).nonzero()[0]) for row in logits] if block else best.tolist()
        matches = [draft == token for draft, token in zip(drafts, first[: block - 1], strict=False)]
        assert accepted == (matches.index(False) if False in matches else block - 1), where
        assert tokens[accepted] == first[accepted], where
        return True
    filters = (int(case["top_k"][request]), float(case["top_p"][request]), float(case["min_p"][request]))
    p = _probabilities(logits, temperature, *filters)
    wider = _probabilities(logits, temperature, filters[0], filters[1] + 2e-5, filters[2] * (1 - 2e-5))
    narrower = _probabilities(
        logits, temperature, filters[0], filters[1] - 2e-5 * (filters[1] < 1), filters[2] * (1 + 2e-5)
    )
    if float((wider - narrower).abs().sum(-1).max()) > NOISE:
        return False
    position = case["first_positions"][request] + torch.arange(block, device="cuda")
    draws = uniforms(case["seeds"][request : request + 1], position[None])[0].double()
    for j in range(min(accepted + 1, block - 1)):
        share = float((case["q_rows"][request, j].double() * (case["candidate_ids"][request, j] == drafts[j])).sum())
        left, right = float(draws[j, ACCEPT_WORD]) * share, float(p[j, drafts[j]])
        if abs(left - right) <= NOISE * max(right, 1e-3):
            return False
        assert (left < right) == (j < accepted), f"{where}: draft {j}, u q = {left}, p = {right}"
    weights = p[accepted]
    if accepted < block - 1:
        weights = weights.scatter_add(
            0, case["candidate_ids"][request, accepted], -case["q_rows"][request, accepted].double()
        )
        weights = weights.clamp_min(0)
        if float(weights.sum()) < 1e-3:
            return False
    running = weights.cumsum(-1) / weights.sum()
    token = tokens[accepted]
    assert 0 <= token < logits.shape[-1], where
    # float32 differences p - q carry noise of the largest p relative to the residual's own mass.
    slack = NOISE / float(weights.sum()) * 0.2 + 2e-5
    draw = float(draws[accepted, RESIDUAL_WORD])
    below = float(running[token - 1]) if token else 0.0
    assert below - slack <= draw <= float(running[token]) + slack, f"{where}: drew {token} at {draw}"
    assert float(wider[accepted, token]) > 0, f"{where}: {token} is outside the filters"
    return True


@pytest.mark.parametrize(("seed", "cases", "large"), [(21, 260, False), (22, 24, True)])
def test_decisions(seed: int, cases: int, large: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    choose = random.Random(seed)
    judged = requests = 0
    for number in range(cases):
        case = _random_case(choose, generator, large)
        result = cuda_select.accept(**case)
        for request in range(case["logits"].shape[0]):
            shape = tuple(case["logits"].shape)
            facts = {
                name: case[name][request].item()
                for name in ("temperatures", "top_k", "top_p", "min_p", "block_lengths")
            }
            requests += 1
            judged += _judge(
                case, result, request, f"case {number} request {request} {shape} {case['logits'].dtype} {facts}"
            )
    assert judged > 0.8 * requests, f"only {judged} of {requests} could be judged"


def test_rows_that_a_grammar_masked() -> None:
    """Nearly everything is -infinity: few, one or hundreds of tokens per row are left, in clumps or anywhere."""
    generator = torch.Generator("cuda").manual_seed(23)
    choose = random.Random(23)
    judged = requests = 0
    for number in range(60):
        case = _random_case(choose, generator, number % 6 == 0)
        logits = case["logits"]
        vocabulary = logits.shape[-1]
        left = min(choose.choice([1, 3, 40, 1500]), vocabulary)
        first = choose.randrange(vocabulary - left + 1) if choose.random() < 0.5 else None
        allowed = torch.zeros(logits.shape, dtype=torch.bool, device="cuda")
        if first is None:
            allowed.scatter_(
                -1, torch.randint(vocabulary, (*logits.shape[:2], left), generator=generator, device="cuda"), True
            )
        else:
            allowed[..., first : first + left] = True
        case["logits"] = logits.masked_fill(~allowed, float("-inf"))
        result = cuda_select.accept(**case)
        for request in range(logits.shape[0]):
            requests += 1
            judged += _judge(
                case, result, request, f"case {number} request {request} {tuple(logits.shape)} {left} left"
            )
    assert judged > 0.6 * requests, f"only {judged} of {requests} could be judged"


def test_a_row_without_any_possible_token_gives_its_first() -> None:
    logits = torch.full((2, 2, 20000), float("-inf"), device="cuda")
    result = cuda_select.accept(
        logits,
        torch.full((2, 1), 7, device="cuda"),
        torch.full((2, 1, 1), 7, device="cuda"),
        torch.ones(2, 1, 1, device="cuda"),
        torch.tensor([0.0, 1.0], device="cuda"),
        torch.arange(2, device="cuda"),
        torch.ones(2, dtype=torch.int64, device="cuda"),
    )
    assert result.tokens.tolist() == [[0, -1]] * 2
    assert result.faulty.tolist() == [False, False]


def test_padding_columns_have_no_probability() -> None:
    logits = torch.randn(3, 4, 1000, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    logits[..., 900:] = 50.0
    result = cuda_select.accept(
        logits,
        torch.full((3, 3), 950, device="cuda"),
        torch.full((3, 3, 1), 950, device="cuda"),
        torch.ones(3, 3, 1, device="cuda"),
        torch.tensor([0.0, 1.0, 1.0], device="cuda"),
        torch.arange(3, device="cuda"),
        torch.ones(3, dtype=torch.int64, device="cuda"),
        top_p=torch.tensor([1.0, 1.0, 0.9], device="cuda"),
        valid_columns=900,
    )
    assert result.accepted.tolist() == [0, 0, 0]
    assert bool((result.tokens[:, 0] < 900).all())


@pytest.mark.parametrize("top_k", [0, 1])
def test_an_empty_residual_falls_back_to_the_target(top_k: int) -> None:
    logits = torch.full((2, 2, 30000), float("-inf"), device="cuda")
    logits[:, :, 29001] = 1.0
    result = cuda_select.accept(
        logits,
        torch.full((2, 1), 5, device="cuda"),
        torch.tensor([[[29001, 5]]] * 2, device="cuda"),
        torch.tensor([[[1.0, 0.0]]] * 2, device="cuda"),
        torch.ones(2, device="cuda"),
        torch.arange(2, device="cuda"),
        torch.ones(2, dtype=torch.int64, device="cuda"),
        top_k=torch.full((2,), top_k, device="cuda"),
    )
    assert result.tokens.tolist() == [[29001, -1]] * 2


def test_nan_marks_the_request_and_only_it() -> None:
    logits = torch.randn(3, 2, 9000, device="cuda", generator=torch.Generator("cuda").manual_seed(4))
    logits[1, 1, 8500] = float("nan")
    for temperature in (0.0, 1.0):
        result = cuda_select.accept(
            logits,
            logits[:, :1].nan_to_num(-9).argmax(-1),
            logits[:, :1].nan_to_num(-9).argmax(-1, keepdim=True),
            torch.ones(3, 1, 1, device="cuda"),
            torch.full((3,), temperature, device="cuda"),
            torch.arange(3, device="cuda"),
            torch.ones(3, dtype=torch.int64, device="cuda"),
        )
        assert result.faulty.tolist() == [False, True, False]


def test_a_request_does_not_depend_on_its_batch() -> None:
    choose, generator = random.Random(5), torch.Generator("cuda").manual_seed(5)
    for _ in range(20):
        case = _random_case(choose, generator, False)
        together = cuda_select.accept(**case)
        for request in range(case["logits"].shape[0]):
            alone = cuda_select.accept(
                **{name: tensor[request : request + 1].contiguous() for name, tensor in case.items()}
            )
            assert torch.equal(alone.tokens[0], together.tokens[request])


CHI_SQUARE_CASES = {
    "plain": (60, 1.0, 0, 1.0, 0.0),
    "hot": (60, 1.6, 0, 1.0, 0.0),
    "top-k then top-p": (60, 1.0, 3, 0.6, 0.0),
    "min-p": (60, 0.8, 0, 1.0, 0.1),
    "counted top-p": (6000, 1.0, 0, 0.9, 0.0),
    "counted top-k": (6000, 1.0, 3000, 0.95, 0.0),
}


@pytest.mark.parametrize("name", CHI_SQUARE_CASES)
def test_emitted_tokens_have_the_targets_distribution(name: str) -> None:
    """Drafts drawn from q, verified against p: each emitted token must be distributed as p of its row."""
    vocabulary, temperature, top_k, top_p, min_p = CHI_SQUARE_CASES[name]
    generator = torch.Generator("cuda").manual_seed(31)
    spread = 1.5 if vocabulary < 1000 else 0.7
    rows = torch.randn(3, vocabulary, generator=generator, device="cuda") * spread
    p = _probabilities(rows, temperature, top_k, top_p, min_p)
    count = 16
    ids = rows[:2].topk(count).indices
    q = torch.softmax(
        torch.gather(rows[:2], 1, ids) * 0.7 + torch.randn(2, count, generator=generator, device="cuda"), -1
    )
    batch = 20000 if vocabulary < 1000 else 2000
    rounds = 10 if vocabulary < 1000 else 40
    histograms = torch.zeros(3, vocabulary, dtype=torch.float64, device="cuda")
    for step in range(rounds):
        seeds = torch.arange(batch, device="cuda") + step * batch
        first = torch.full((batch,), 77, device="cuda")
        draws = uniforms(seeds, first[:, None] + torch.arange(2, device="cuda"))[..., WALK_WORD]
        picks = (q.cumsum(-1)[None] <= draws.unsqueeze(-1)).sum(-1).clamp_max(count - 1)
        drafts = ids.expand(batch, -1, -1).gather(-1, picks.unsqueeze(-1)).squeeze(-1)
        result = cuda_select.accept(
            rows.expand(batch, -1, -1),
            drafts,
            ids.expand(batch, -1, -1).contiguous(),
            q.expand(batch, -1, -1).contiguous(),
            torch.full((batch,), temperature, device="cuda"),
            seeds,
            first,
            top_k=torch.full((batch,), top_k, device="cuda"),
            top_p=torch.full((batch,), top_p, device="cuda"),
            min_p=torch.full((batch,), min_p, device="cuda"),
        )
        for row in range(3):
            emitted = result.tokens[:, row]
            histograms[row] += torch.bincount(emitted[emitted >= 0], minlength=vocabulary)
    for row in range(3):
        total = float(histograms[row].sum())
        if row and total < 500:
            continue  # flat rows accept few drafts
        assert total > 500
        assert float(histograms[row][p[row] == 0].sum()) == 0, f"{name}: row {row} emitted a filtered token"
        # Bins of neighbouring ids with an expectation of at least 8.
        bins = max(2, min(64, int(total / 40)))
        edges = (p[row].cumsum(-1) * bins).ceil().clamp(1, bins).long() - 1
        expected = torch.zeros(bins, dtype=torch.float64, device="cuda").scatter_add_(0, edges, p[row] * total)
        observed = torch.zeros_like(expected).scatter_add_(0, edges, histograms[row])
        used = expected >= 8
        chi_square = float(((observed - expected) ** 2 / expected.clamp_min(1e-9))[used].sum())
        freedom = int(used.sum()) - 1
        # Mean + 6 standard deviations of a chi-square variable: beyond its 1e-6 quantile for these freedoms.
        assert chi_square < freedom + 6 * (2 * freedom) ** 0.5 + 6, (
            f"{name}: row {row}, chi-square {chi_square}, {freedom}"
        )
