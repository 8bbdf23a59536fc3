"""Fine-tuning of RoBERTa or BERT in PyTorch: classes or numbers for one text or a pair, on all hosts' devices."""

FRAMEWORK = "pytorch"
