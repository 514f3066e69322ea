"""A model of what was not measured: other acceptance lengths, block sizes, GPU counts and GPUs.

Its words: B requests run, each with N output tokens, of which the first comes from a prefill of P seconds; acceptance
length a, so c = (N - 1) / a cycles; a cycle of B requests takes t(B) seconds. While every user gets one request
through, the engine does B prefills and c cycles for all of them together:

    T(B) = c * t(B) + P * ((1 - s) * B + s * E(B))      seconds per request of one user
    E(B) = c * (1 - exp(-B / c))                        prefill passes: cycles after which anybody waits
    tok/s = B * N / T(B)             tok/s per user = (N - 1) / (T(B) - W(B)), W the time to the first token

Requests that end in one cycle are prefilled in one pass (B / c of them end in a cycle on average, Poisson). s is the
share of P that a pass costs, however many prompts are in it: launches and weights; the rest is every prompt's own. It
is as small as the measured points allow: none of them may say that its cycle is shorter than that of the fewest users.
P is the time to the first token at the smallest measured concurrency. t(B) comes from a cycle table, or backwards from
measured points (T = B * N / tok/s), and is interpolated linearly in B. A prediction is an estimate: its error on
measured points that it was not given is computed by :func:`held_out_errors` and printed beside it.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtllm_dflash.bench.measurement import kept_shares
from trtllm_dflash.errors import ConfigError


@dataclass(frozen=True)
class Line:
    """Values at ascending places, linear in between and with the outermost slopes beyond; never below 0."""

    places: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, place: float) -> float:
        """The value at ``place``."""
        if len(self.places) == 1:
            return self.values[0]
        right = min(max(bisect.bisect_left(self.places, place), 1), len(self.places) - 1)
        x0, x1 = self.places[right - 1], self.places[right]
        y0, y1 = self.values[right - 1], self.values[right]
        return max(0.0, y0 + (y1 - y0) * (place - x0) / (x1 - x0))


@dataclass(frozen=True)
class EngineModel:
    """What the model knows of one configuration.

    Attributes:
        cycle_s: t(B). prefill_s: P. pass_share: s, of P. first_token_s: W(B).
        output_tokens: N. acceptance_length: a, 1 for plain decoding. histogram: cycles by drafts kept, or None.
        block_size: S that ``cycle_s`` is of. max_batch: requests that run at a time; more wait.
        gpus: GPUs of one engine. layers: of the target, for the cost of communication.
    """

    cycle_s: Line
    prefill_s: float
    first_token_s: Line
    output_tokens: float
    acceptance_length: float
    histogram: tuple[int, ...] | None
    block_size: int
    max_batch: int
    gpus: int
    layers: int | None = None
    pass_share: float = 0.0

    def predict(self, concurrency: int) -> dict[str, float]:
        """tok_s, tok_s_user, tok_s_gpu at ``concurrency``, with the acceptance length they are of."""
        running = min(concurrency, self.max_batch)
        cycles = (self.output_tokens - 1) / self.acceptance_length
        prefills = _prefills(running, cycles, self.pass_share)
        request_s = cycles * self.cycle_s.at(running) + prefills * self.prefill_s
        decode_s = max(request_s - self.first_token_s.at(running), cycles * self.cycle_s.at(running))
        tok_s = running * self.output_tokens / request_s
        return {
            "concurrency": concurrency,
            "tok_s": tok_s,
            "tok_s_user": (self.output_tokens - 1) / decode_s,
            "tok_s_gpu": tok_s / self.gpus,
            "acceptance_length": self.acceptance_length,
        }


def model_of(document: Mapping[str, Any], label: str, *, without: Sequence[int] = ()) -> EngineModel:
    """The model of configuration ``label`` from its measured points.

    Args:
        document: results of a sweep. without: concurrencies that are held out.

    Raises:
        ConfigError: no such configuration, or too few points.
    """
    facts = next((c["facts"] for c in document["configurations"] if c["label"] == label), None)
    if facts is None:
        known = ", ".join(c["label"] for c in document["configurations"])
        raise ConfigError(f"no configuration {label!r} among the measured: {known}")
    max_batch = int(facts.get("max_batch_size") or 1 << 30)
    points = [
        point
        for point in document["points"]
        if point["config"] == label and point["concurrency"] not in without and point["concurrency"] <= max_batch
    ]
    usable = [p for p in points if p["completion_tokens"] and p["completion_tokens"] > 1 and p["ttft_ms"]]
    if not usable:
        raise ConfigError(f"{label}: no measured point to predict from", hint="measure at least concurrency 1")
    usable.sort(key=lambda point: point["concurrency"])
    prefill_s = usable[0]["ttft_ms"]["mean"]["mean"] / 1e3 / usable[0]["concurrency"]
    share = _pass_share(usable, prefill_s)
    histogram = _summed([point["acceptance"]["histogram"] for point in usable if point["acceptance"]])
    length = _pooled_length(usable)
    return EngineModel(
        cycle_s=Line(
            tuple(float(point["concurrency"]) for point in usable),
            tuple(_cycle_seconds(point, prefill_s, share) for point in usable),
        ),
        prefill_s=prefill_s,
        first_token_s=Line(
            tuple(float(point["concurrency"]) for point in usable),
            tuple(point["ttft_ms"]["mean"]["mean"] / 1e3 for point in usable),
        ),
        output_tokens=statistics.fmean(point["completion_tokens"] for point in usable),
        acceptance_length=length,
        histogram=histogram,
        block_size=int(facts.get("block_size") or 1),
        max_batch=max_batch,
        gpus=int(usable[0]["gpus"]),
        layers=facts.get("target_layers"),
        pass_share=share,
    )


def held_out_errors(document: Mapping[str, Any], label: str) -> list[dict[str, float]]:
    """Errors at every inner measured concurrency of ``label`` when the model is not given it.

    Returns:
        for each: concurrency, and the relative errors of tok_s_gpu and tok_s_user (signed: predicted / measured - 1).
    """
    points = sorted((p for p in document["points"] if p["config"] == label), key=lambda point: point["concurrency"])
    errors = []
    for point in points[1:-1]:
        predicted = model_of(document, label, without=[point["concurrency"]]).predict(point["concurrency"])
        errors.append(
            {
                "concurrency": point["concurrency"],
                "tok_s_gpu": predicted["tok_s_gpu"] / point["tok_s_gpu"]["mean"] - 1,
                "tok_s_user": predicted["tok_s_user"] / point["tok_s_user"]["mean"] - 1,
            }
        )
    return errors


def median_error(errors: Sequence[Mapping[str, float]]) -> float | None:
    """Median of the absolute errors, of both rates; None without any."""
    values = [abs(error[name]) for error in errors for name in ("tok_s_gpu", "tok_s_user")]
    return statistics.median(values) if values else None


def with_acceptance(model: EngineModel, length: float) -> EngineModel:
    """The model at another acceptance length (1 to S)."""
    if not 1 <= length <= model.block_size:
        raise ConfigError(f"acceptance length is {length}, expected 1 to the block size {model.block_size}")
    return replace(model, acceptance_length=length, histogram=None)


def with_cycle_table(model: EngineModel, table: Mapping[int, Mapping[int, float]], block_size: int) -> EngineModel:
    """The model at another block size S', from a measured cycle table.

    The acceptance length at S' is what the histogram of S leaves when blocks end early: 1 + the sum over the first
    S' - 1 positions of the share of cycles that kept them. (A drafter sees a shorter block then, which changes its
    proposals a little.)

    Args:
        table: block size → batch → seconds per cycle.

    Raises:
        ConfigError: the table has no such block size, or the model no histogram.
    """
    column = table.get(block_size)
    if not column:
        known = ", ".join(map(str, sorted(table)))
        raise ConfigError(f"the cycle table has no block size {block_size}; it has {known or 'none'}")
    cycle_s = Line(tuple(float(batch) for batch in sorted(column)), tuple(column[batch] for batch in sorted(column)))
    if block_size == model.block_size:
        return replace(model, cycle_s=cycle_s)
    if block_size == 1:
        return replace(model, cycle_s=cycle_s, block_size=1, acceptance_length=1.0, histogram=None)
    if model.histogram is None or block_size > model.block_size:
        raise ConfigError(
            f"block size {block_size} from measurements at {model.block_size}: expected a smaller one, and an "
            "acceptance histogram",
            hint="measure with the largest block size, in process",
        )
    cut = (*model.histogram[: block_size - 1], sum(model.histogram[block_size - 1 :]))
    return replace(
        model, cycle_s=cycle_s, block_size=block_size, acceptance_length=1 + sum(kept_shares(cut)), histogram=cut
    )


def scaled(
    model: EngineModel, *, bandwidth: float = 1.0, flops: float = 1.0, tp: int = 1, layer_comm_s: float = 0.0
) -> EngineModel:
    """The model on other hardware.

    Args:
        bandwidth, flops: how many times the memory bandwidth and the arithmetic of the measured GPU. The part of a
            cycle that does not grow with the batch (weights) scales with bandwidth; what a request adds scales with
            the smaller of the two; prefill scales with flops.
        tp: how many times the GPUs per engine; work divides by it.
        layer_comm_s: seconds of communication per target layer and pass when tp > 1.

    Raises:
        ConfigError: a factor is not positive.
    """
    if min(bandwidth, flops) <= 0 or tp < 1:
        raise ConfigError(f"bandwidth {bandwidth}, flops {flops}, tp {tp}: expected positive factors")
    communication = layer_comm_s * (model.layers or 0) if tp > 1 else 0.0
    first, last = model.cycle_s.places[0], model.cycle_s.places[-1]
    slope = 0.0 if first == last else max(0.0, (model.cycle_s.at(last) - model.cycle_s.at(first)) / (last - first))
    constant = max(0.0, min(t - slope * b for b, t in zip(model.cycle_s.places, model.cycle_s.values, strict=True)))
    cycle_s = tuple(
        (constant / bandwidth + (t - constant) / min(bandwidth, flops)) / tp + communication
        for t in model.cycle_s.values
    )
    prefill = 1 / (flops * tp)
    return replace(
        model,
        cycle_s=Line(model.cycle_s.places, cycle_s),
        prefill_s=model.prefill_s * prefill + communication,
        first_token_s=Line(
            model.first_token_s.places, tuple(w * prefill + communication for w in model.first_token_s.values)
        ),
        gpus=model.gpus * tp,
    )


def _prefills(running: float, cycles: float, pass_share: float) -> float:
    """Prefills, in units of P, while every one of ``running`` users gets a request through."""
    return (1 - pass_share) * running + pass_share * cycles * -math.expm1(-running / cycles)


def _pass_share(points: Sequence[Mapping[str, Any]], prefill_s: float) -> float:
    """The smallest s with which no point has a shorter cycle than the first one; 1 where none is enough.

    A point's cycle time is a straight line in s, so the bounds have closed forms.
    """
    at_0, at_1 = ([_unbounded_cycle_seconds(point, prefill_s, share) for point in points] for share in (0.0, 1.0))
    least = 0.0
    for low, high in zip(at_0[1:], at_1[1:], strict=True):
        shortfall, gain = at_0[0] - low, (high - at_1[0]) - (low - at_0[0])
        if shortfall > 0:
            least = max(least, shortfall / gain if gain > shortfall else 1.0)
    return least


def _cycle_seconds(point: Mapping[str, Any], prefill_s: float, pass_share: float) -> float:
    """t(B) backwards from a measured point; at least a tenth of the request's time, should P be overestimated."""
    return max(
        _unbounded_cycle_seconds(point, prefill_s, pass_share), 0.1 * _request_seconds(point) / _cycles_of(point)
    )


def _unbounded_cycle_seconds(point: Mapping[str, Any], prefill_s: float, pass_share: float) -> float:
    cycles = _cycles_of(point)
    return (_request_seconds(point) - prefill_s * _prefills(point["concurrency"], cycles, pass_share)) / cycles


def _request_seconds(point: Mapping[str, Any]) -> float:
    return float(point["concurrency"] * point["completion_tokens"] / point["tok_s"]["mean"])


def _cycles_of(point: Mapping[str, Any]) -> float:
    length = point["acceptance"]["acceptance_length"] if point["acceptance"] else 1.0
    return float((point["completion_tokens"] - 1) / length)


def _pooled_length(points: Sequence[Mapping[str, Any]]) -> float:
    known = [point["acceptance"] for point in points if point["acceptance"]]
    cycles = sum(part["cycles"] for part in known)
    return float((sum(part["accepted"] for part in known) + cycles) / cycles) if cycles else 1.0


def _summed(histograms: Sequence[Sequence[int] | None]) -> tuple[int, ...] | None:
    known = [histogram for histogram in histograms if histogram]
    if not known or len(known) != len(histograms):
        return None
    longest = max(map(len, known))
    return tuple(sum(histogram[kept] for histogram in known if kept < len(histogram)) for kept in range(longest))
