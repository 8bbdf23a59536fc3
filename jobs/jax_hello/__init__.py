"""The smallest job that has everything: a network learns a curve, and a stopped run goes on exactly."""

from jobs.runtime.monitoring.metric_definitions import Metric, Metrics

FRAMEWORK = "jax"
LOSS = Metric(name="loss", title="mean squared error", better="lower")
METRICS = Metrics(headline="loss", progress=("loss",), metrics=(LOSS,))
