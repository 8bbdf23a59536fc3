"""Fine-tuning of RoBERTa or BERT in PyTorch: classes or numbers for one text or a pair, on all hosts' devices."""

from jobs.glue import METRICS

__all__ = ["FRAMEWORK", "FRAMEWORKS", "HUB", "METRICS"]

FRAMEWORKS = ("pytorch", "pytorch_xla")
FRAMEWORK = FRAMEWORKS[0]
HUB = ("transformers", "text-classification")
