"""How many floating-point operations a step's arithmetic is: what MFU is measured against.

Matrix products alone are counted, two operations (multiply, add) for each weight that a position meets, and three
times the forward pass for training: the backward pass computes each product's gradient to both of its factors
(Chowdhery et al. 2022, arXiv:2204.02311, appendix B; Narayanan et al. 2021, arXiv:2104.04473, appendix). Of them

    a layer, for each of S positions   8 D² (query, key, value, output) + 4 D F (feed-forward) + 4 S D (attention)
    the head, for each of M slots      2 D² (dense) + 2 D V (the vocabulary)

The last layer's results are read at the M slots alone: there the other positions count for its keys and values only,
4 D² each.
Embedding look-ups, norms, GELU, softmax, dropout and the optimizer are left out, as is what is computed only because
it suits the machine: the vocabulary's padding, and activations that are computed a second time.
"""

from __future__ import annotations

from jobs.flax_mlm.model import Dimensions

PASSES = 3
"""A forward pass and a backward one of twice its work."""


def forward_flops(dims: Dimensions, *, length: int, slots: int) -> int:
    """Of one sequence of `length` tokens whose head is asked at `slots` positions."""
    d = dims.width
    keys_and_values = 4 * d * d
    the_rest = 4 * d * d + 4 * d * dims.ff_width + 4 * length * d
    layers = dims.layers * length * keys_and_values + ((dims.layers - 1) * length + slots) * the_rest
    head = slots * (2 * d * d + 2 * d * dims.vocab_size)
    return layers + head


def step_flops(dims: Dimensions, *, batch_size: int, length: int, slots: int) -> int:
    """Of one training step over all hosts together."""
    return PASSES * batch_size * forward_flops(dims, length=length, slots=slots)
