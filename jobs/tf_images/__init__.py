"""Image classification in TensorFlow: pictures from TFRecord shards, by Keras' fit, on all hosts' devices."""

from jobs.runtime.monitoring.metric_definitions import Metric, Metrics

FRAMEWORK = "tensorflow"
PREDICTS_FROM = ("model.keras", "pictures.json")
HUB = ("keras", "image-classification")
METRICS = Metrics(
    headline="accuracy",
    progress=("loss", "images_per_s"),
    metrics=(
        Metric(
            name="accuracy",
            title="accuracy",
            unit="%",
            better="higher",
            baseline="baseline",
            is_evaluation=True,
        ),
        Metric(name="loss", title="loss", unit="nats", better="lower"),
        Metric(
            name="eval_loss", title="eval loss", unit="nats", better="lower", is_evaluation=True, chart="loss"
        ),
        Metric(name="baseline", title="baseline"),
        Metric(name="images_per_s", title="speed", unit="images/s", better="higher"),
        Metric(name="learning_rate", title="learning rate"),
    ),
)
