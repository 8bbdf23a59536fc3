"""What fine-tuning jobs share: options, rows, tokens, batches, scores and what is said of them. Not a job itself."""

from jobs.runtime.monitoring.metric_definitions import Metric, Metrics

METRICS = Metrics(
    headline="eval_score",
    progress=("loss", "rows_per_s"),
    metrics=(
        Metric(name="eval_score", title="score", better="higher", baseline="baseline", is_evaluation=True),
        Metric(name="loss", title="loss", better="lower"),
        Metric(name="eval_loss", title="eval loss", better="lower", is_evaluation=True, chart="loss"),
        Metric(name="baseline", title="baseline"),
        Metric(name="accuracy", title="accuracy", unit="%", better="higher", chart="eval_score"),
        Metric(name="f1", title="F1", better="higher", chart="eval_score"),
        Metric(name="matthews", title="Matthews correlation", better="higher", chart="eval_score"),
        Metric(name="pearson", title="Pearson correlation", better="higher", chart="eval_score"),
        Metric(name="spearman", title="Spearman correlation", better="higher", chart="eval_score"),
        Metric(name="mse", title="mean squared error", better="lower"),
        Metric(name="rows_per_s", title="speed", unit="rows/s", better="higher"),
        Metric(name="learning_rate", title="learning rate"),
        Metric(name="grad_norm", title="gradient norm"),
        Metric(name="padding", title="padding", unit="% of the tokens", better="lower", is_detail=True),
    ),
)
