"""Masked-language-model pre-training of RoBERTa in Flax NNX, data-parallel over every device of every host."""

STACK = "jax"
