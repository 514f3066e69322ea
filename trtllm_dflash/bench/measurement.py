"""From records of requests to the figures of one run.

What the words mean (docs/benchmarking.md says it for users):

- ``tok_s`` and ``requests_s`` of a closed loop are those of whole requests: of ``in_flight`` requests that take W
  seconds on average, in_flight / W end a second (Little's law), each with its tokens. What is half done when the window
  begins or ends tilts neither, and they agree: tok/s is requests/s times tokens per request. In an open loop, which may
  not be in balance, they count tokens and ends of all requests within the window, over its length.
- ``tok_s_user`` is how fast one user sees tokens: tokens after the first event over the time after it, pooled over the
  measured requests. ``tpot_ms`` is its inverse per request.
- ``itl_ms`` are the pauses between two events of a stream; with speculation an event brings several tokens.
- ``acceptance_length`` is pooled (tokens over cycles of all requests), ``acceptance_length_per_request`` the mean of
  the requests' own; they differ, so both are given.
"""

from __future__ import annotations

import hashlib
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from trtllm_dflash.bench.capacity import cut_short
from trtllm_dflash.bench.load import LoadResult
from trtllm_dflash.bench.records import RequestRecord
from trtllm_dflash.errors import EngineError


@dataclass(frozen=True)
class Percentiles:
    """Mean and percentiles of a sample, in the unit of its name."""

    mean: float
    p50: float
    p95: float
    p99: float
    count: int


@dataclass(frozen=True)
class Acceptance:
    """Speculative decoding of the measured requests.

    Attributes:
        acceptance_length: Σ tokens / Σ cycles (bonus counted, first token of the prefill not).
        acceptance_length_per_request: mean of the requests' own.
        cycles, drafted, accepted: sums. drafted is None when the endpoint does not say.
        histogram: entry j counts cycles that kept j drafts; None when the endpoint does not say.
        per_position: entry j is the share of cycles that kept draft j + 1 (all before it kept too); None likewise.
    """

    acceptance_length: float
    acceptance_length_per_request: float
    cycles: int
    accepted: int
    drafted: int | None
    histogram: tuple[int, ...] | None
    per_position: tuple[float, ...] | None


@dataclass(frozen=True)
class Measurement:
    """Figures of one run; see the module's text for the words.

    Attributes:
        requests, errors: measured requests, and those of them that failed. window_s: seconds of the measured window.
        tok_s, tok_s_user, tok_s_gpu, requests_s: rates. gpus: what tok_s_gpu was divided by (1 for a CPU).
        ttft_ms, itl_ms, tpot_ms, e2e_ms: None when no request had such a figure.
        prompt_tokens, completion_tokens: means per measured request; None when the endpoint does not say.
        in_flight: mean requests in flight within the window.
        acceptance: None for plain decoding, and where the endpoint does not say.
        joules, joules_per_token: of the GPUs within the window, None without NVML.
        outputs_sha256: of all measured outputs; equal for two runs whose outputs are the same.
        first_error: text of the first failure.
        cut_short: measured requests whose max_tokens did not fit into the sequence and whose output ended there.
    """

    requests: int
    errors: int
    window_s: float
    tok_s: float
    tok_s_user: float | None
    tok_s_gpu: float
    requests_s: float
    gpus: int
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    tpot_ms: Percentiles | None
    e2e_ms: Percentiles | None
    prompt_tokens: float | None
    completion_tokens: float | None
    in_flight: float
    acceptance: Acceptance | None
    joules: float | None
    joules_per_token: float | None
    outputs_sha256: str
    first_error: str | None = None
    cut_short: int = 0


def measure(result: LoadResult, *, gpus: int = 1, joules: float | None = None) -> Measurement:
    """The figures of a finished load.

    Args:
        result: its records. gpus: GPUs that served it, 1 for a CPU. joules: GPU energy within the window, or None.

    Raises:
        EngineError: every measured request failed.
    """
    measured = sorted(result.measured, key=lambda record: record.start)
    good = [record for record in measured if record.error is None]
    failed = [record for record in measured if record.error is not None]
    if not good:
        raise EngineError(
            f"all {len(measured)} measured requests failed, the first with: {failed[0].error}",
            hint="send one of these prompts alone, e.g. with `trtllm-dflash generate`",
        )
    begin, end = result.window
    window_s = end - begin
    in_flight = sum(max(0.0, min(r.end, end) - max(r.start, begin)) for r in result.records) / window_s
    tok_s, requests_s = _counted_rates(result) if result.is_open_loop else _whole_request_rates(measured, in_flight)
    decode_s = sum(record.decode_s or 0.0 for record in good)
    decoded = sum(record.decoded_tokens for record in good if record.decode_s)
    return Measurement(
        requests=len(measured),
        errors=len(failed),
        window_s=window_s,
        tok_s=tok_s,
        tok_s_user=decoded / decode_s if decode_s else None,
        tok_s_gpu=tok_s / gpus,
        requests_s=requests_s,
        gpus=gpus,
        ttft_ms=percentiles([record.ttft_s * 1e3 for record in good if record.ttft_s is not None]),
        itl_ms=percentiles([gap * 1e3 for record in good for gap in _gaps(record)]),
        tpot_ms=percentiles(
            [
                record.decode_s / record.decoded_tokens * 1e3
                for record in good
                if record.decode_s and record.decoded_tokens
            ]
        ),
        e2e_ms=percentiles([(record.end - record.start) * 1e3 for record in good]),
        prompt_tokens=_mean([record.prompt_tokens for record in good]),
        completion_tokens=_mean([record.completion_tokens for record in good]),
        in_flight=in_flight,
        acceptance=_acceptance(good),
        joules=joules,
        joules_per_token=joules / window_s / tok_s if joules is not None and tok_s else None,
        outputs_sha256=_digest(good),
        first_error=failed[0].error if failed else None,
        cut_short=cut_short(good),
    )


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """Mean and percentiles (linear interpolation between order statistics, as numpy's default); None without values."""
    if not values:
        return None
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (place - below)

    return Percentiles(statistics.fmean(ordered), at(0.50), at(0.95), at(0.99), len(ordered))


def kept_shares(histogram: Sequence[int]) -> tuple[float, ...]:
    """From counts of cycles by drafts kept to the share of cycles that kept at least 1, 2, … drafts."""
    cycles = sum(histogram)
    return tuple(sum(histogram[kept:]) / cycles for kept in range(1, len(histogram))) if cycles else ()


def _whole_request_rates(measured: Sequence[RequestRecord], in_flight: float) -> tuple[float, float]:
    """tok/s and requests/s of a closed loop, from measured requests that all ran under full load.

    A failed request took its user's time and brought nothing that counts.
    """
    good = [record for record in measured if record.error is None]
    per_second = in_flight / sum(record.end - record.start for record in measured)
    return per_second * sum(record.tokens for record in good), per_second * len(good)


def _counted_rates(result: LoadResult) -> tuple[float, float]:
    """tok/s and requests/s that left the engine within the window."""
    begin, end = result.window
    tokens = sum(n for record in result.records for at, n in record.events if begin < at <= end)
    ended = sum(record.error is None and begin < record.end <= end for record in result.records)
    return tokens / (end - begin), ended / (end - begin)


def _acceptance(records: Sequence[RequestRecord]) -> Acceptance | None:
    spoken = [record for record in records if record.cycles and record.accepted is not None]
    drafted = [record.drafted for record in spoken if record.drafted is not None]
    # Plain decoding counts cycles too, none of which had a draft.
    if not spoken or (len(drafted) == len(spoken) and not sum(drafted)):
        return None
    cycles = sum(record.cycles or 0 for record in spoken)
    accepted = sum(record.accepted or 0 for record in spoken)
    histogram = _sum_histograms([record.histogram for record in spoken])
    return Acceptance(
        acceptance_length=(accepted + cycles) / cycles,
        acceptance_length_per_request=statistics.fmean(record.acceptance_length or 0.0 for record in spoken),
        cycles=cycles,
        accepted=accepted,
        drafted=sum(drafted) if len(drafted) == len(spoken) else None,
        histogram=histogram,
        per_position=kept_shares(histogram) if histogram else None,
    )


def _sum_histograms(histograms: Sequence[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    known = [histogram for histogram in histograms if histogram is not None]
    if not known or len(known) != len(histograms):
        return None
    return tuple(
        sum(histogram[kept] for histogram in known if kept < len(histogram)) for kept in range(max(map(len, known)))
    )


def _gaps(record: RequestRecord) -> list[float]:
    times = [at for at, _ in record.events]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def _mean(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _digest(records: Sequence[RequestRecord]) -> str:
    outputs = sorted((record.index, record.digest or "") for record in records)
    return hashlib.sha256(repr(outputs).encode()).hexdigest()
