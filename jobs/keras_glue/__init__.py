"""Fine-tuning of RoBERTa or BERT in Keras on JAX: classes or numbers for one text or a pair, on all hosts' devices."""

from jobs.glue import METRICS

__all__ = ["FRAMEWORK", "HUB", "METRICS"]

FRAMEWORK = "jax"
HUB = ("transformers", "text-classification")
