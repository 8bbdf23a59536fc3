"""The operations of a step are those of its matrix products, three times over."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jobs.flax_mlm.flops import forward_flops, step_flops
from jobs.flax_mlm.model import Dimensions, Mlm

pytestmark = pytest.mark.usefixtures("two_devices")

BASE = Dimensions(
    vocab_size=50265, max_positions=512, position_offset=2, layers=12, width=768, heads=12, ff_width=3072
)


def product_flops(jaxpr: Any) -> int:
    """Two for each multiplication of every dot_general in a traced program, however deep."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, out = equation.invars[0].aval, equation.outvars[0].aval
            total += 2 * out.size * int(jnp.prod(jnp.array([left.shape[axis] for axis in contracted])))
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += product_flops(inner)
    return total


@pytest.mark.parametrize(
    ("changed", "batch", "length", "slots"),
    [({}, 2, 16, 3), ({"layers": 3, "heads": 1}, 1, 7, 7), ({"width": 24, "ff_width": 5}, 3, 9, 1)],
)
def test_the_forward_pass_is_the_sum_of_the_models_own_products(
    changed: dict[str, int], batch: int, length: int, slots: int
) -> None:
    """Counted in the traced program: a product added to the model, or taken out, is missed otherwise."""
    small = {"vocab_size": 40, "max_positions": 16, "position_offset": 2, "layers": 2, "width": 8}
    dims = Dimensions(**{**small, "heads": 2, "ff_width": 12, **changed})

    def run(tokens_BS: jax.Array, positions_BM: jax.Array) -> jax.Array:
        return Mlm(dims, jnp.dtype("float32"), nnx.Rngs(0))(tokens_BS, positions_BM)

    traced = jax.make_jaxpr(run)(jnp.zeros((batch, length), int), jnp.zeros((batch, slots), int))
    filling = 2 * batch * slots * dims.width * (dims.vocab_rows - dims.vocab_size)
    counted = product_flops(traced.jaxpr) - filling
    assert counted == batch * forward_flops(dims, length=length, slots=slots)


def test_robertas_base_step_costs_what_it_is_known_to_cost() -> None:
    """8 sequences of 128 tokens: 777 GFLOP with logits everywhere, 553 with those and the last layer at 24 slots."""
    assert step_flops(BASE, batch_size=8, length=128, slots=128) == pytest.approx(777e9, rel=2e-3)
    assert step_flops(BASE, batch_size=8, length=128, slots=24) == pytest.approx(553e9, rel=5e-3)


@given(st.integers(1, 64), st.integers(1, 512))
def test_a_long_sequence_costs_what_six_operations_a_parameter_and_token_say_and_the_attention_besides(
    batch: int, length: int
) -> None:
    """6 N of Kaplan et al. 2020, N without the embeddings, plus 12 layers times length times width."""
    d, f = BASE.width, BASE.ff_width
    matrices = BASE.layers * (4 * d * d + 2 * d * f) + d * d + d * BASE.vocab_size
    known = batch * length * (6 * matrices + 12 * BASE.layers * length * d)
    assert step_flops(BASE, batch_size=batch, length=length, slots=length) == known
