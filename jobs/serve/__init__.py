"""Serves the export of a run over HTTP: what `fab serve` starts, one process on one host."""

from jobs.runtime.monitoring.metric_definitions import Metric, Metrics

FRAMEWORKS = ("jax", "pytorch", "tensorflow")
FRAMEWORK = FRAMEWORKS[0]
METRICS = Metrics(
    headline="requests",
    metrics=(
        Metric(name="requests", title="requests"),
        Metric(name="rows", title="rows"),
        Metric(name="batches", title="batches"),
    ),
)
