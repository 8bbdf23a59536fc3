"""What the TPU compiler estimates for matrix products alone, on one device: a large one, beside which `bench.tpu` puts
training steps, and those of flax_mlm's model, each by itself. Run by it in the environment that has libtpu.

python -m bench.tpu_product: a list of requests on standard input, each a slice as `jobs.runtime.jax.aot.slice_devices`
takes it, with "model" (the words of flax_mlm's options, for one device) or without: then it is the large product. The
last line of standard output has the cycles of each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jobs.flax_mlm.config import VOCABULARY_MULTIPLE, Config
from jobs.flax_mlm.step import slots_for
from jobs.runtime import option_rules
from jobs.runtime.jax import aot, hlo

SIDE = 8192


class Product(NamedTuple):
    """An einsum of two arrays in bfloat16, how often a step has it, and the dtype of its result."""

    equation: str
    left: tuple[int, ...]
    right: tuple[int, ...]
    times: int = 1
    result: Any = jnp.bfloat16


LARGE = Product("mk,kn->mn", (SIDE, SIDE), (SIDE, SIDE))


def model_products(config: Config) -> Iterator[Product]:
    """The products of a training step on one device: forward, and the gradients of both factors of each. Those of
    attention are not among them: splash attention takes their place in long sequences."""
    length, width, ff_width = config.sequence_length, config.size("width"), config.size("ff_width")
    rows, slots = config.batch_size * length, config.batch_size * slots_for(config.mask_share, length)
    vocab_rows = -(-config.size("vocab_size") // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    # Rows, width in, width out, times. Of the last layer only the hidden positions' results are computed.
    forward = [
        (rows, width, 3 * width, config.size("layers") - 1),
        (rows, width, width, config.size("layers") - 1),
        (rows, width, ff_width, config.size("layers") - 1),
        (rows, ff_width, width, config.size("layers") - 1),
        (rows, width, 2 * width, 1),
        (slots, width, width, 3),
        (slots, width, ff_width, 1),
        (slots, ff_width, width, 1),
        (slots, width, vocab_rows, 1),
    ]
    for m, k, n, times in forward:
        yield Product("mk,kn->mn", (m, k), (k, n), times)
        yield Product("mn,kn->mk", (m, n), (k, n), times)
        yield Product("mk,mn->kn", (m, k), (m, n), times, jnp.float32)


def attention_products(config: Config) -> Iterator[Product]:
    """Scores and their use, three times each: forward, and the gradients of both factors."""
    heads, length = config.size("heads"), config.sequence_length
    wide = (config.batch_size, length, heads, config.size("width") // heads)
    scores = (config.batch_size, heads, length, length)
    times = PASSES * config.size("layers")
    yield Product("bmhk,bshk->bhms", wide, wide, times, jnp.float32)
    yield Product("bhms,bshk->bmhk", scores, wide, times)


PASSES = 3


def cycles(products: Iterator[Product], device: jax.Device) -> int:
    """The compiler's estimate of these products, one after the other."""
    replicated = NamedSharding(Mesh(np.asarray([device]), ("one",)), PartitionSpec())
    total = 0
    for product in products:
        shapes = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=replicated)
            for shape in (product.left, product.right)
        ]
        einsum: Any = jax.jit(
            lambda left, right, product=product: jnp.einsum(
                product.equation, left, right, preferred_element_type=product.result
            )
        )
        text = einsum.lower(*shapes).compile().as_text()
        total += product.times * hlo.summary(text, [(0, 0)]).all_cycles
    return total


def answer(request: dict[str, Any]) -> list[int]:
    """[the large product's cycles], or [those of the model's products, those of its attention's]."""
    device = aot.slice_devices(request)[0]
    if "model" not in request:
        return [cycles(iter([LARGE]), device)]
    config = Config(**option_rules.parse(Config, request["model"]).values)
    return [cycles(model_products(config), device), cycles(attention_products(config), device)]


if __name__ == "__main__":
    print(json.dumps([answer(request) for request in json.load(sys.stdin)]))
