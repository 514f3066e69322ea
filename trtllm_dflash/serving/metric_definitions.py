"""Names, kinds and meanings of the metrics, for Triton's metrics endpoint and for the front end's.

``deploy`` copies this file beside the proxy's ``model.py``, like ``wire.py``: standard library only, nothing of ours.
The engine process counts (``engine_metrics``) and sends *samples*, ``(sample name, labels, number)``, with its
heartbeats; everything else only publishes them. A histogram travels as its cumulative ``_bucket`` samples (label
``le``), ``_sum`` and ``_count``.
"""

from __future__ import annotations

from dataclasses import dataclass

Sample = tuple[str, dict[str, str], float]

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")

QUEUE_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(frozen=True)
class Metric:
    """One metric: its ``kind``, its ``help`` line, and upper bounds in seconds for a histogram."""

    kind: str
    help: str
    buckets: tuple[float, ...] = ()


METRICS: dict[str, Metric] = {
    "dflash_requests_total": Metric(COUNTER, "Requests that ended, by outcome."),
    "dflash_errors_total": Metric(COUNTER, "Requests that ended in an error, by status word."),
    "dflash_prompt_tokens_total": Metric(COUNTER, "Prompt tokens of ended requests."),
    "dflash_output_tokens_total": Metric(COUNTER, "Output tokens sent to clients."),
    "dflash_cycles_total": Metric(COUNTER, "Draft-verify cycles of ended requests, counted per request."),
    "dflash_drafted_tokens_total": Metric(COUNTER, "Draft tokens proposed to ended requests."),
    "dflash_accepted_tokens_total": Metric(COUNTER, "Draft tokens accepted and sent, of ended requests."),
    "dflash_accepted_tokens_per_position_total": Metric(
        COUNTER, "Draft tokens accepted of ended requests, by position in the block (1 is the first draft)."
    ),
    "dflash_acceptance_length": Metric(
        GAUGE, "Tokens committed per cycle over the last thousand cycles of ended requests; 0 before the first."
    ),
    "dflash_low_acceptance": Metric(GAUGE, "1 while the acceptance length stays under 1.2, which a warning reports."),
    "dflash_queue_seconds": Metric(HISTOGRAM, "From arrival in the engine to the first pass.", QUEUE_BUCKETS_S),
    "dflash_time_to_first_token_seconds": Metric(
        HISTOGRAM, "From arrival in the engine to the first token.", FIRST_TOKEN_BUCKETS_S
    ),
    "dflash_inter_token_seconds": Metric(
        HISTOGRAM,
        "Time between two deliveries of a request over the tokens of the later one, counted once per token.",
        INTER_TOKEN_BUCKETS_S,
    ),
    "dflash_request_seconds": Metric(
        HISTOGRAM, "From arrival in the engine to the last token of a request.", REQUEST_BUCKETS_S
    ),
    "dflash_kv_pages": Metric(GAUGE, "Pages of the KV caches, by state; free, used and cached add up to all."),
    "dflash_requests_running": Metric(GAUGE, "Requests in a slot of the engine."),
    "dflash_requests_waiting": Metric(GAUGE, "Requests waiting for a slot or for pages."),
    "dflash_engine_info": Metric(GAUGE, "1; the labels say what runs."),
    # Of the proxy, which sees engine processes come and go.
    "dflash_engine_up": Metric(GAUGE, "1 while an engine process is ready."),
    "dflash_engine_restarts_total": Metric(COUNTER, "Engine processes started again after one ended."),
    # Counted by the runtime; absent while its version does not count them.
    "dflash_prefix_hit_tokens_total": Metric(COUNTER, "Prompt tokens found in the prefix cache instead of computed."),
    "dflash_prefix_lookup_tokens_total": Metric(COUNTER, "Prompt tokens looked up in the prefix cache."),
    "dflash_pages_evicted_total": Metric(COUNTER, "Pages the prefix cache gave up to make room."),
    "dflash_preemptions_total": Metric(COUNTER, "Running requests sent back to the queue because pages ran out."),
}


def metric_of(sample_name: str) -> tuple[str, Metric] | None:
    """The metric that a sample belongs to, and its definition; None for an unknown name."""
    if sample_name in METRICS:
        return sample_name, METRICS[sample_name]
    for suffix in HISTOGRAM_SUFFIXES:
        name = sample_name.removesuffix(suffix)
        if name != sample_name and name in METRICS and METRICS[name].kind == HISTOGRAM:
            return name, METRICS[name]
    return None


def kind_of_sample(sample_name: str) -> str:
    """``counter`` or ``gauge``: how one sample moves. Samples of a histogram only grow."""
    found = metric_of(sample_name)
    return GAUGE if found is not None and found[1].kind == GAUGE else COUNTER
