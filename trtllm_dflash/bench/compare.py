"""Two sweeps of the same points: what moved beyond noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trtllm_dflash.errors import ConfigError

Verdict = Literal["better", "worse", "same", "unknown"]

# name in runs' results, path within it, and whether more is better
METRICS: dict[str, tuple[tuple[str, ...], bool]] = {
    "tok/s per GPU": (("tok_s_gpu",), True),
    "tok/s per user": (("tok_s_user",), True),
    "first token p95 ms": (("ttft_ms", "p95"), False),
    "between events p95 ms": (("itl_ms", "p95"), False),
    "acceptance length": (("acceptance", "acceptance_length"), True),
}
MIN_CHANGE = 0.02
SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class Change:
    """One figure of one point in both sweeps.

    Attributes:
        config, concurrency, metric: which. before, after: means over repeats. change: after / before - 1.
        p_value: of Welch's t test, corrected for the number of comparisons (Holm); None without repeats.
        verdict: ``better`` or ``worse`` when it moved beyond noise (p below 0.05 and more than the least change),
            ``same`` when not, ``unknown`` without repeats on a side.
    """

    config: str
    concurrency: int
    metric: str
    before: float
    after: float
    change: float
    p_value: float | None
    verdict: Verdict


def compare_sweeps(
    before: Mapping[str, Any], after: Mapping[str, Any], *, min_change: float = MIN_CHANGE
) -> list[Change]:
    """Compare the points that two results documents share.

    Raises:
        ConfigError: other prompts, sampling or method, or no common point.
    """
    for name in ("prompts_sha256", "sampling", "chat_template", "forced_acceptance_length"):
        a, b = (document["method"]["workload"][name] for document in (before, after))
        if a != b:
            raise ConfigError(f"the sweeps differ in {name}: {a!r} and {b!r}; their points are not comparable")
    versions = [document["method"].get("version", 1) for document in (before, after)]
    if versions[0] != versions[1]:
        raise ConfigError(
            f"the sweeps were measured by methods {versions[0]} and {versions[1]}; the same engine has other figures",
            hint="measure the older one again with this version",
        )
    pairs = []
    for key, runs in _runs(before).items():
        others = _runs(after).get(key)
        for metric, (path, _) in METRICS.items():
            olds, news = _values(runs, path), _values(others or [], path)
            if olds and news and sum(olds):
                pairs.append((key, metric, olds, news))
    if not pairs:
        raise ConfigError("the sweeps have no common point (label and concurrency)")
    p_values = _holm([_welch(olds, news) for _, _, olds, news in pairs])
    return [_change(*pair, p, min_change) for pair, p in zip(pairs, p_values, strict=True)]


def _change(
    key: tuple[str, int],
    metric: str,
    olds: Sequence[float],
    news: Sequence[float],
    p_value: float | None,
    min_change: float,
) -> Change:
    before, after = sum(olds) / len(olds), sum(news) / len(news)
    change = after / before - 1
    verdict: Verdict = "same"
    if p_value is None:
        verdict = "unknown"
    elif p_value < SIGNIFICANCE and abs(change) > min_change:
        verdict = "better" if (change > 0) == METRICS[metric][1] else "worse"
    return Change(key[0], key[1], metric, before, after, change, p_value, verdict)


def _welch(olds: Sequence[float], news: Sequence[float]) -> float | None:
    if len(olds) < 2 or len(news) < 2:
        return None
    if len({*olds}) == 1 and len({*news}) == 1:
        # Without spread there is no t: equal is equal, and what is exactly repeatable moved if it differs at all.
        return 1.0 if olds[0] == news[0] else 0.0
    from scipy.stats import ttest_ind

    return float(ttest_ind(olds, news, equal_var=False).pvalue)


def _holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction; None stays None."""
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(known) - rank)))
        corrected[place] = largest
    return corrected


def _runs(document: Mapping[str, Any]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    grouped: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for run in document["runs"]:
        grouped.setdefault((run["config"], run["concurrency"]), []).append(run["result"])
    return grouped


def _values(results: Sequence[Mapping[str, Any]], path: Sequence[str]) -> list[float]:
    values = []
    for result in results:
        value: Any = result
        for step in path:
            value = None if value is None else value[step]
        if value is not None:
            values.append(float(value))
    return values
