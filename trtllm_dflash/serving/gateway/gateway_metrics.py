"""The front end's ``/metrics``: its own counters, and the engines' as their last health answer had them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from trtllm_dflash.serving.gateway.replicas import Replica
from trtllm_dflash.serving.metric_definitions import (
    COUNTER,
    FIRST_TOKEN_BUCKETS_S,
    GAUGE,
    METRICS,
    REQUEST_BUCKETS_S,
    Sample,
    metric_of,
)

# The time at which each counter began: Prometheus' text format has it as one more gauge for every counter.
disable_created_metrics()


class GatewayMetrics:
    """Metrics of the front end.

    Args:
        replicas: whose engines' metrics are shown too, under the label ``replica``.
    """

    def __init__(self, replicas: Iterable[Replica]) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "dflash_gateway_requests",
            "Requests answered, by path and status.",
            ["path", "status"],
            registry=self._registry,
        )
        self.in_flight = Gauge("dflash_gateway_in_flight", "Requests being answered.", registry=self._registry)
        self.first_token = Histogram(
            "dflash_gateway_time_to_first_token_seconds",
            "From the request's arrival at the front end to its first output.",
            buckets=FIRST_TOKEN_BUCKETS_S,
            registry=self._registry,
        )
        self.duration = Histogram(
            "dflash_gateway_request_seconds",
            "From the request's arrival at the front end to its end.",
            buckets=REQUEST_BUCKETS_S,
            registry=self._registry,
        )
        self._registry.register(_EngineCollector(list(replicas)))

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, replicas: list[Replica]) -> None:
        self._replicas = replicas

    def describe(self) -> list[Metric]:
        return []  # registering must not collect: nothing is known yet

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("dflash_engine_up", METRICS["dflash_engine_up"].help, labels=["replica"])
        restarts = CounterMetricFamily(
            "dflash_engine_restarts", METRICS["dflash_engine_restarts_total"].help, labels=["replica"]
        )
        gathered: dict[str, list[tuple[str, Sample]]] = {}
        for replica in self._replicas:
            label = str(replica.index)
            up.add_metric([label], float(replica.state == "ready"))
            if replica.state != "unreachable":
                restarts.add_metric([label], float(replica.facts.get("restarts", 0)))
                for name, labels, value in replica.facts.get("samples", []):
                    found = metric_of(name)
                    gathered.setdefault(found[0] if found else name, []).append((label, (name, labels, value)))
        yield up
        yield restarts
        for name, samples in gathered.items():
            yield _family(name, samples)


def _family(name: str, samples: list[tuple[str, Sample]]) -> Metric:
    definition = METRICS.get(name)
    text = definition.help if definition else "A counter of the runtime."
    kind = definition.kind if definition else COUNTER
    family: Metric
    if kind == COUNTER:
        family = CounterMetricFamily(name.removesuffix("_total"), text)
    elif kind == GAUGE:
        family = GaugeMetricFamily(name, text)
    else:
        family = HistogramMetricFamily(name, text)
    for replica, (sample, labels, value) in samples:
        family.add_sample(sample, {"replica": replica, **labels}, value)
    return family
