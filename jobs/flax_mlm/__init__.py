"""Masked-language-model pre-training of RoBERTa in Flax NNX, data-parallel over every device of every host."""

from jobs.runtime.monitoring.metric_definitions import Metric, Metrics

FRAMEWORK = "jax"
PREDICTS_FROM = ("config.json", "model.safetensors", "tokenizer.json")
"""What predict.py reads of an export; there may be a copy of the parameters for Flax besides."""
HUB = ("transformers", "fill-mask")
METRICS = Metrics(
    headline="eval_loss",
    progress=("loss", "tokens_per_s"),
    metrics=(
        Metric(name="loss", title="loss", unit="nats", better="lower"),
        Metric(
            name="eval_loss",
            title="eval loss",
            unit="nats",
            better="lower",
            baseline="unigram_entropy",
            is_evaluation=True,
            chart="loss",
        ),
        Metric(
            name="eval_accuracy",
            title="accuracy",
            unit="% of the masked tokens",
            better="higher",
            is_evaluation=True,
        ),
        Metric(name="unigram_entropy", title="unigram baseline", unit="nats"),
        Metric(name="pseudo_perplexity", title="pseudo-perplexity", better="lower", is_detail=True),
        Metric(name="tokens_per_s", title="speed", unit="tokens/s", better="higher"),
        Metric(name="learning_rate", title="learning rate"),
        Metric(name="grad_norm", title="gradient norm"),
    ),
)
