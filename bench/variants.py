"""flax_mlm's step with one of its improvements taken out: what stands in for it, put in the code's place from outside.

The job has no switches for this. A substitution names a module's attribute, which must be there, and what takes its
place must have been used when the step has run: a job that has been changed is noticed, not measured by mistake."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax

from jobs.flax_mlm import attention, model, parts, products, sizes
from jobs.flax_mlm import step as steps
from launch.environment import ON_CPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """instead: what takes the place of an object's attribute; around: the same, made of what stood there.
    environ: of the process.

    same_loss: it draws the same dropout and computes the same, but for rounding. cases: of CASES, those where it
    changes anything; None: all.
    """

    instead: Sequence[tuple[Any, str, Any]] = ()
    around: Sequence[tuple[Any, str, Callable[[Any], Any]]] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    same_loss: bool = True
    cases: frozenset[str] | None = None


# --- what stands in -----------------------------------------------------------------------------------------


def _all_logits(self: Any, tokens_BS: Any, _: Any, keys_B: Any = None, apply: Any = model.plainly) -> Any:
    return self.padded_logits(self.encode(tokens_BS, keys_B, None, apply))


def _at_every_position(there: Any) -> Any:
    def cross_entropy(logits_BSV: Any, masked: Any) -> Any:
        """Weighted by 0 where nothing is hidden."""
        rows_B1 = jnp.arange(logits_BSV.shape[0])[:, None]

        def spread(of_slots_BM: Any) -> Any:
            empty_BS = jnp.zeros(logits_BSV.shape[:2], of_slots_BM.dtype)
            return empty_BS.at[rows_B1, masked.positions_BM].set(of_slots_BM)

        wide = masked._replace(targets_BM=spread(masked.targets_BM), weights_BM=spread(masked.weights_BM))
        return there(logits_BSV, wide)

    return cross_entropy


def _one_hot(logits_BMV: Any, masked: Any) -> Any:
    nats_BM = optax.softmax_cross_entropy(logits_BMV, jax.nn.one_hot(masked.targets_BM, logits_BMV.shape[-1]))
    hits_BM = logits_BMV.argmax(-1) == masked.targets_BM
    return (nats_BM * masked.weights_BM).sum(), (hits_BM * masked.weights_BM).sum()


def _whole_last_layer(there: Any) -> Any:
    def encode(self: Any, tokens_BS: Any, keys_B: Any = None, positions_BM: Any = None, *how: Any) -> Any:
        x_BSD = there(self, tokens_BS, keys_B, None, *how)
        return x_BSD if positions_BM is None else jnp.take_along_axis(x_BSD, positions_BM[:, :, None], axis=1)

    return encode


def _three_products(there: Any) -> Any:
    def call(self: Any, x: Any, columns: slice = slice(None)) -> Any:
        inputs, outputs = self.kernel.shape
        if outputs != 3 * inputs:
            return there(self, x, columns)
        begin, end, _ = columns.indices(outputs)
        thirds = [slice(at, at + inputs) for at in range(begin, end, inputs)]
        return jnp.concatenate([there(self, x, third) for third in thirds], axis=-1)

    return call


def _product(x: Any, kernel_IO: Any) -> Any:
    return x @ kernel_IO.astype(x.dtype)


def _product_of_transposed(x: Any, kernel_OI: Any) -> Any:
    return jnp.matmul(x, kernel_OI.T.astype(x.dtype), preferred_element_type=kernel_OI.dtype)


def _attend(q_BMHK: Any, k_BSHK: Any, v_BSHK: Any, *segments: Any) -> Any:
    assert all(each is None for each in segments), "the plain attention knows no documents"
    scores_BHMS = jnp.einsum("bmhk,bshk->bhms", q_BMHK, k_BSHK) / q_BMHK.shape[-1] ** 0.5
    return jnp.einsum("bhms,bshk->bmhk", jax.nn.softmax(scores_BHMS, axis=-1), v_BSHK)


def _jax_attend(q_BMHK: Any, k_BSHK: Any, v_BSHK: Any, *segments: Any) -> Any:
    assert all(each is None for each in segments), "this attention is given no documents"
    return jax.nn.dot_product_attention(q_BMHK, k_BSHK, v_BSHK)


def _add_bias(x: Any, bias_D: Any) -> Any:
    return x + bias_D.astype(x.dtype)


def _layer_norm(x: Any, scale_D: Any, bias_D: Any) -> Any:
    wide = parts.widened(x)
    centred = wide - wide.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + parts.LAYER_NORM_EPSILON) * scale_D + bias_D).astype(x.dtype)


def _threefry(x_BSD: Any, rate: float, keys_B: Any) -> Any:
    if keys_B is None or rate == 0.0:
        return x_BSD
    kept_BSD = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x_BSD.shape[1:]))(keys_B)
    return jnp.where(kept_BSD, x_BSD / (1 - rate), jnp.zeros_like(x_BSD))


def _unsafe_rbg(x_BSD: Any, rate: float, keys_B: Any) -> Any:
    """One key for the whole batch, as this generator is meant to be used."""
    if keys_B is None or rate == 0.0:
        return x_BSD
    key = jax.random.wrap_key_data(jax.random.bits(keys_B[0], (4,)), impl="unsafe_rbg")
    return jnp.where(
        jax.random.bernoulli(key, 1 - rate, x_BSD.shape), x_BSD / (1 - rate), jnp.zeros_like(x_BSD)
    )


def _as_it_lies(x: Any) -> Any:
    return x.swapaxes(-1, -2)


def _undonated(there: Any) -> Any:
    def jit(*its: Any, **options: Any) -> Any:
        return there(*its, **{name: value for name, value in options.items() if name != "donate_argnums"})

    return jit


def _fetched(there: Any) -> Any:
    def make_train_step(*its: Any) -> Any:
        train_step = there(*its)

        def step(*arguments: Any) -> Any:
            state, results = train_step(*arguments)
            return state, {name: float(value) for name, value in results.items()}

        return step

    return make_train_step


VARIANTS: dict[str, Variant] = {
    "one-hot cross-entropy": Variant(instead=[(steps, "cross_entropy", _one_hot)]),
    "logits at every position": Variant(
        instead=[(model.Mlm, "__call__", _all_logits)],
        around=[(steps, "cross_entropy", _at_every_position)],
        same_loss=False,
    ),
    "last layer at every position": Variant(
        around=[(model.Mlm, "encode", _whole_last_layer)], same_loss=False
    ),
    "three products for QKV": Variant(around=[(model.Linear, "__call__", _three_products)]),
    "products of three axes": Variant(
        instead=[(model, "product", _product), (model, "product_of_transposed", _product_of_transposed)]
    ),
    "matrices transposed as they lie": Variant(
        instead=[(products, "transposed", _as_it_lies), (attention, "transposed", _as_it_lies)],
    ),
    "bias by autodiff": Variant(instead=[(model, "add_bias", _add_bias)]),
    "attention by jax.nn": Variant(instead=[(model, "attend", _jax_attend)]),
    "attention by einsum": Variant(instead=[(model, "attend", _attend)]),
    "GELU by autodiff": Variant(instead=[(model, "gelu", functools.partial(jax.nn.gelu, approximate=False))]),
    "layer norm by autodiff": Variant(instead=[(model, "layer_norm", _layer_norm)]),
    "dropout by threefry": Variant(instead=[(model, "dropout", _threefry)], same_loss=False),
    "dropout by unsafe_rbg": Variant(instead=[(model, "dropout", _unsafe_rbg)], same_loss=False),
    "no buffer donated": Variant(around=[(jax, "jit", _undonated)]),
    "vocabulary not padded": Variant(instead=[(sizes, "VOCABULARY_MULTIPLE", 1)], cases=frozenset({"base"})),
    "results fetched each step": Variant(around=[(steps, "make_train_step", _fetched)]),
    "large pages": Variant(environ=dict.fromkeys(ON_CPU, "")),
    "bfloat16": Variant(options={"dtype": "bfloat16"}, same_loss=False),
}
"""In this order they are put in, so that several go together: the second's logits at every position meet the first's
cross-entropy. What draws dropout at other positions comes to another loss as well."""
BESIDES = frozenset(
    {
        "bfloat16",
        "dropout by unsafe_rbg",
        "last layer at every position",
        "attention by jax.nn",
        "matrices transposed as they lie",
    }
)
"""Left out of "all of them": no improvement everywhere, or one that another variant takes out with it."""


def all_of_them(case: str) -> list[str]:
    return [name for name in of_case(case) if name not in BESIDES]


def of_case(case: str) -> list[str]:
    return [name for name, each in VARIANTS.items() if each.cases is None or case in each.cases]


# --- putting it in ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def taken_out(names: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Within it the variants' substitutes stand in; yields what raises unless all of them have been used.

    Raises:
        LookupError: a variant speaks of something that the job does not have any more.
    """
    used: dict[str, bool] = {}
    with contextlib.ExitStack() as stack:

        def put(place: str, owner: Any, attribute: str, instead: Any) -> None:
            if callable(instead):
                used[place] = False
                instead = _noting(instead, place, used)
            stack.enter_context(mock.patch.object(owner, attribute, instead))

        for name in names:
            for owner, attribute, instead in VARIANTS[name].instead:
                _there(name, owner, attribute)
                put(f"{name}: {attribute}", owner, attribute, instead)
            for owner, attribute, around in VARIANTS[name].around:
                put(f"{name}: {attribute}", owner, attribute, around(_there(name, owner, attribute)))

        def all_used() -> None:
            unused = [place for place, was in used.items() if not was]
            if unused:
                raise LookupError(f"never used: {', '.join(unused)}; bench/variants.py has to follow the job")

        yield all_used


def _there(name: str, owner: Any, attribute: str) -> Any:
    if not hasattr(owner, attribute):
        raise LookupError(
            f"{name}: {owner.__name__} has no {attribute} any more; bench/variants.py has to follow the job"
        )
    return getattr(owner, attribute)


def _noting(put: Callable[..., Any], place: str, used: dict[str, bool]) -> Callable[..., Any]:
    def noted(*arguments: Any, **named: Any) -> Any:
        used[place] = True
        return put(*arguments, **named)

    return noted
