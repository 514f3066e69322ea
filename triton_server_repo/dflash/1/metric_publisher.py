"""The engine's metric samples on Triton's own metrics endpoint. Standard library only (besides what is given).

Each call into Triton takes 30 to 50 microseconds, so only what has changed is passed on, every two seconds. The metrics
of Triton's Python backend can be incremented and set, and a histogram can only observe single values: the engine counts
its histograms itself, and their ``_bucket``, ``_sum`` and ``_count`` samples are published as counters, which is what
PromQL's ``histogram_quantile`` and ``rate`` read.
"""

import metric_definitions as definitions

UP = "dflash_engine_up"
RESTARTS = "dflash_engine_restarts_total"


class MetricPublisher:
    """Publishes under the label ``model``.

    Args:
        pb: ``triton_python_backend_utils``. model: the model's name.
    """

    def __init__(self, pb, model):
        self._pb = pb
        self._model = model
        self._families = {}  # Triton drops a metric whose Python objects are not held
        self._metrics = {}
        self._last = {}

    def publish(self, samples, *, restarts, ready):
        """Bring Triton's metrics to ``samples``; counters of a new engine process go on from the old one's."""
        self._set(UP, {}, 1 if ready else 0, definitions.GAUGE)
        self._set(RESTARTS, {}, restarts, definitions.COUNTER)
        if not ready:
            # What was running or waiting is gone with its process.
            samples = [("dflash_requests_running", {}, 0), ("dflash_requests_waiting", {}, 0)]
        for name, labels, value in samples:
            self._set(name, labels, value, definitions.kind_of_sample(name))

    def _set(self, name, labels, value, kind):
        key = (name, *sorted(labels.items()))
        before = self._last.get(key)
        if value == before:
            return
        metric = self._metrics.get(key)
        if metric is None:
            family = self._family(name, kind)
            metric = self._metrics[key] = family.Metric(labels={"model": self._model, **labels})
        if kind == definitions.GAUGE:
            metric.set(value)
        else:
            # Smaller than before: a new process counts from nothing.
            grown = value if before is None or value < before else value - before
            if grown:
                metric.increment(grown)
        self._last[key] = value

    def _family(self, name, kind):
        if name not in self._families:
            found = definitions.metric_of(name)
            kinds = {definitions.GAUGE: self._pb.MetricFamily.GAUGE, definitions.COUNTER: self._pb.MetricFamily.COUNTER}
            self._families[name] = self._pb.MetricFamily(
                name=name, description=found[1].help if found else "A counter of the runtime.", kind=kinds[kind]
            )
        return self._families[name]
