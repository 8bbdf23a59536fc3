"""Operations of models whose gradients are written by hand, for CPUs and TPUs, each with the name of its plain twin in
`ops`, which chooses it.

On a CPU, XLA passes over memory once for each operation of a backward pass that autodiff wrote, and is slow at some
shapes, orders and sums of bfloat16. On a TPU it then fuses what it should not (a norm's gradient into the product
before it, the gradient of scores into each of the products that take it) and keeps float32 where bfloat16 would do.
docs/benchmarks.md has what each of these is worth.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jobs.runtime.jax import attention_kernel

LAYER_NORM_EPSILON = 1e-5
SUM_COLUMNS = 128
"""A sum of rows as a product has this many columns, as wide as a matrix unit: as a sum XLA estimates three times its
cycles or more."""
NEVER = -1e30
"""The logit of what is no token."""
KINDS_BY_COLUMNS = ("TPU v5",)
"""A v5p. Its compiler else makes queries, keys and values row by row, and copies each for the products of heads."""
KINDS_THAT_SUM_SHARES = ("TPU v6 lite",)
"""A v6e. What a row of shares' gradients has in common it sums in less time than it keeps the results in float32."""
KINDS_THAT_KEEP_SLOPES = ("TPU v6 lite",)
"""A v6e. Its matrix units are done with the gradient's product before GELU's slope is computed beside it, and the
forward product leaves time for that. On a v5e it costs more than it saves (docs/benchmarks.md)."""
CACHED_ACTIVATION_BYTES = 2**21
"""An activation of more bytes has left a CPU's caches by the time that the backward pass comes to it."""
MOST_NATS = 60.0
"""Sums of exponentials of such numbers are far from what bfloat16 and float32 can hold, 3e38."""


def platform() -> str:
    """The platform that the program being traced is for: its mesh's, or where it has none, this process's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else str(device.platform)


def device_kind() -> str:
    """The kind of the devices that it is for, such as "TPU v4"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return str((jax.devices()[0] if device is None else device).device_kind)


def _computed_once(x: jax.Array) -> jax.Array:
    """x, which XLA for TPU else computes again in each of the products that take it."""
    materialized: jax.Array = jax.lax.optimization_barrier(x) if platform() == "tpu" else x
    return materialized


def wide_type(x: Any) -> jnp.dtype:
    """float32, or x's own dtype where that is wider."""
    return jnp.promote_types(x.dtype, jnp.float32)


def widened(x: Any) -> jax.Array:
    """x in float32, or in its own dtype where that is wider."""
    return jnp.asarray(x, wide_type(x))


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x in `dtype`, which may be narrower. A conversion alone XLA for TPU estimates at twice the cycles of one that is
    fused with another operation, which here is the same rounding."""
    if platform() == "tpu" and dtype == jnp.bfloat16:
        x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def leaves_caches(x: jax.Array) -> bool:
    """Whether this is an activation on a CPU of more than CACHED_ACTIVATION_BYTES."""
    return platform() == "cpu" and x.nbytes > CACHED_ACTIVATION_BYTES


def _recomputed_from[Kept](kept: Kept, gradient: jax.Array) -> tuple[Kept, jax.Array]:
    """Both as they are. What the backward pass needs of a large activation it computes again from `kept`: XLA on a CPU
    else keeps what the forward pass computed from it, in float32, which is two to three times as large."""
    if not any(map(leaves_caches, jax.tree.leaves(kept))):
        return kept, gradient
    barred: tuple[Kept, jax.Array] = jax.lax.optimization_barrier((kept, gradient))
    return barred


def linear(x: jax.Array, kernel_IO: jax.Array, bias_O: jax.Array) -> jax.Array:
    """x W + b over the last axis, in x's dtype."""
    return _add_bias(_product(x, kernel_IO), bias_O)


def projections(x: jax.Array, kernel_IO: jax.Array, bias_O: jax.Array, parts: int) -> list[jax.Array]:
    """x W + b in equal parts of the last axis: for TPUs a product each, whose results are copied nowhere.

    XLA fuses the sum for the bias's gradient with the product that the gradient comes from, not with a kernel.
    """
    columns = kernel_IO.shape[1] // parts
    cuts = [slice(part * columns, (part + 1) * columns) for part in range(parts)]
    is_for_kernel = x.shape[-2] >= attention_kernel.LEAST_POSITIONS
    add_bias = _add_bias_of_kernel if is_for_kernel else _add_bias
    results = [add_bias(_product(x, kernel_IO[:, cut]), bias_O[cut]) for cut in cuts]
    is_by_columns = device_kind() in KINDS_BY_COLUMNS and not is_for_kernel
    return [_by_columns(result) for result in results] if is_by_columns else results


@jax.custom_vjp
def _by_columns(x_BSD: jax.Array) -> jax.Array:
    """x, of which a column's positions lie side by side in memory."""
    laid_out: jax.Array = with_layout_constraint(x_BSD, Layout((0, 2, 1)))
    return laid_out


_by_columns.defvjp(lambda x_BSD: (_by_columns(x_BSD), None), lambda _, gradient: (gradient,))


def logits(x: jax.Array, table_VD: jax.Array, bias_V: jax.Array) -> jax.Array:
    """x Eᵀ + b over the last axis, in the table's dtype."""
    return _add_bias(_product_of_transposed(x, table_VD), bias_V)


@jax.custom_vjp
def _product(x: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    """x W in x's dtype. On a CPU the other axes go as rows of one matrix: products of three axes are slower there. The
    gradient of W has W's own dtype: it is never rounded to x's, and never converted back."""
    if platform() == "tpu":
        return x @ kernel_IO.astype(x.dtype)
    return (_rows(x) @ kernel_IO.astype(x.dtype)).reshape(*x.shape[:-1], kernel_IO.shape[-1])


def _product_forward(x: jax.Array, kernel_IO: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, kernel_IO), (x, kernel_IO)


def _product_backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel_IO = kept
    if platform() == "tpu":
        of_kernel_IO = jnp.einsum("...i,...o->io", x, gradient, preferred_element_type=kernel_IO.dtype)
        return gradient @ kernel_IO.astype(gradient.dtype).T, of_kernel_IO
    # The conversion is done again: what the forward pass converted would be kept, 13 MiB a layer of base.
    kernel_IO, gradient = jax.lax.optimization_barrier((kernel_IO, gradient))
    of_x = _rows(gradient) @ transposed(kernel_IO.astype(gradient.dtype))
    of_kernel_IO = _product_of_rows(x, gradient, kernel_IO.dtype)
    return of_x.reshape(x.shape), of_kernel_IO


_product.defvjp(_product_forward, _product_backward)


@jax.custom_vjp
def _product_of_transposed(x: jax.Array, kernel_OI: jax.Array) -> jax.Array:
    """x Wᵀ, otherwise as `_product`, but in W's dtype: logits are not rounded to x's.

    On a CPU, of few rows in bfloat16, it is (W xᵀ)ᵀ: of the two copies with swapped axes that is the smaller one.
    """
    rows, kernel_OI, dtype = _rows(x), kernel_OI.astype(x.dtype), kernel_OI.dtype
    is_short = rows.shape[0] * dtype.itemsize < rows.shape[1] * x.dtype.itemsize
    if platform() == "cpu" and x.dtype == jnp.bfloat16 and is_short:
        found = jnp.matmul(kernel_OI, transposed(rows), preferred_element_type=dtype)
        # Without the barrier XLA makes the swap a part of the product, which it cannot compute then.
        found = _by_rows(jax.lax.optimization_barrier(found).T)
    else:
        found = jnp.matmul(rows, transposed(kernel_OI), preferred_element_type=dtype)
    return found.reshape(*x.shape[:-1], kernel_OI.shape[0])


def _of_transposed_forward(
    x: jax.Array, kernel_OI: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product_of_transposed(x, kernel_OI), (x, kernel_OI)


def _of_transposed_backward(
    kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel_OI = kept
    gradient = gradient.astype(x.dtype)
    of_x = _rows(gradient) @ kernel_OI.astype(x.dtype)
    of_kernel_OI = _product_of_rows(gradient, x, kernel_OI.dtype)
    return of_x.reshape(x.shape), of_kernel_OI


_product_of_transposed.defvjp(_of_transposed_forward, _of_transposed_backward)


def _product_of_rows(x: jax.Array, y: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """xᵀ y, of two activations' rows: what each product gives to the gradient of its matrix."""
    found = jnp.matmul(transposed(_rows(x)), _rows(y), preferred_element_type=dtype)
    # Where the gradient's axes are swapped afterwards, XLA makes that a part of the product, which in bfloat16 is slow.
    return _by_rows(found) if x.dtype == jnp.bfloat16 else found


def transposed(x: jax.Array) -> jax.Array:
    """The last two axes swapped; of bfloat16, on a CPU, as a copy, whose rows lie one after another.

    XLA hands a matrix to a product as it lies, and of bfloat16 one that lies the other way takes twice the time: 27 ms
    instead of 12 and 1 for the copy (1,024 x 768 x 3,072, one core). Of float32 it makes no difference.
    """
    swapped = x.swapaxes(-1, -2)
    return _by_rows(swapped) if x.dtype == jnp.bfloat16 and platform() == "cpu" else swapped


def _by_rows(x: jax.Array) -> jax.Array:
    """x in memory row by row, whatever XLA would choose."""
    laid_out: jax.Array = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    return laid_out


@jax.custom_vjp
def _add_bias(x: jax.Array, bias_D: jax.Array) -> jax.Array:
    """x + b over the last axis, in x's dtype."""
    return x + bias_D.astype(x.dtype)


def _add_bias_forward(x: jax.Array, bias_D: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _add_bias(x, bias_D), bias_D


def _add_bias_backward(bias_D: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    """On a CPU the bias's gradient is a product with ones; of many numbers in bfloat16, which XLA copies in float32
    first, it is their sum: 0.12 ms in place of 0.55 for 1,024 x 3,072, on two cores."""
    rows = _rows(gradient)
    if platform() == "tpu" or (gradient.dtype == jnp.bfloat16 and leaves_caches(gradient)):
        return gradient, widened(gradient).sum(range(gradient.ndim - 1)).astype(bias_D.dtype)
    ones = jnp.ones((1, rows.shape[0]), gradient.dtype)
    sums = jnp.matmul(ones, rows, preferred_element_type=wide_type(gradient))[0]
    return gradient, sums.astype(bias_D.dtype)


_add_bias.defvjp(_add_bias_forward, _add_bias_backward)


@jax.custom_vjp
def _add_bias_of_kernel(x: jax.Array, bias_D: jax.Array) -> jax.Array:
    """As `_add_bias`; the bias's gradient is a product."""
    return x + bias_D.astype(x.dtype)


def _add_bias_of_kernel_backward(bias_D: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gradient, _sum_of_rows(_rows(gradient)).astype(bias_D.dtype)


def _sum_of_rows(rows_RD: jax.Array) -> jax.Array:
    """The sum of the rows, in float32 at least, as a product with SUM_COLUMNS columns: for TPUs."""
    return _wide_product(_first_column(rows_RD).T, rows_RD)[0]


def _first_column(rows_RD: jax.Array) -> jax.Array:
    """(R, SUM_COLUMNS): 1 in the first column, 0 elsewhere."""
    first_RC = jnp.broadcast_to(jnp.arange(SUM_COLUMNS) == 0, (rows_RD.shape[0], SUM_COLUMNS))
    return first_RC.astype(rows_RD.dtype)


_add_bias_of_kernel.defvjp(
    lambda x, bias_D: (_add_bias_of_kernel(x, bias_D), bias_D), _add_bias_of_kernel_backward
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def embed(table_RD: jax.Array, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of a table, rounded to `dtype`: of the copy that the product with the vocabulary takes."""
    return table_RD.astype(dtype)[ids].astype(table_RD.dtype)


def _embed_backward(
    _dtype: jnp.dtype, kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None]:
    """The sum of many small numbers, so it is taken in the table's own dtype."""
    table_RD, ids = kept
    return jnp.zeros_like(table_RD).at[ids].add(gradient.astype(table_RD.dtype)), None


embed.defvjp(lambda table_RD, ids, dtype: (embed(table_RD, ids, dtype), (table_RD, ids)), _embed_backward)


def at_positions(x_BSD: jax.Array, positions_BM: jax.Array) -> jax.Array:
    """(B, M, D): x_BSD at these positions, as a product with a 1 in each row. The gradient of a look-up is a sort and a
    sum of one row after another."""
    is_there_BMS = positions_BM[..., None] == jnp.arange(x_BSD.shape[1])
    at_BMD: jax.Array = jnp.einsum(
        "bms,bsd->bmd", is_there_BMS.astype(x_BSD.dtype), x_BSD, precision=jax.lax.Precision.HIGHEST
    )
    return at_BMD


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """x Φ(x) by erf: `jax.nn.gelu` takes erfc, which is two functions on a CPU."""
    return (x * _normal_below(x)).astype(x.dtype)


def _normal_below(x: jax.Array) -> jax.Array:
    """Φ(x), the share of a normal distribution that lies below x; in float32 at least."""
    return 0.5 * (1 + jax.lax.erf(widened(x) * math.sqrt(0.5)))


def _gelu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Kept is x, or on some TPUs the slope there, in x's dtype."""
    if device_kind() not in KINDS_THAT_KEEP_SLOPES:
        return gelu(x), x
    below, slope = _gelu_parts(x)
    return (x * below).astype(x.dtype), _computed_once(slope.astype(x.dtype))


def _gelu_backward(kept: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    """Where only x is kept, Φ is computed again."""
    kept, gradient = _recomputed_from(kept, gradient)
    slope = kept if device_kind() in KINDS_THAT_KEEP_SLOPES else _gelu_parts(kept)[1]
    return ((gradient * slope).astype(kept.dtype),)


def _gelu_parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Φ(x), and GELU's slope Φ(x) + x φ(x); in float32 at least."""
    wide = widened(x)
    exponential = jnp.exp(-0.5 * wide * wide)
    below = _normal_below_by(exponential, wide) if platform() == "tpu" else _normal_below(x)
    return below, below + wide * exponential * math.sqrt(0.5 / math.pi)


def _normal_below_by(exponential: jax.Array, x: jax.Array) -> jax.Array:
    """Φ(x) of x and exp(-x²/2), which is at hand, to 7.5e-8 (Abramowitz & Stegun 1964, 26.2.17): on a v6e, where a
    product takes little time, erf beside it adds a tenth."""
    t = 1 / (1 + 0.2316419 * jnp.abs(x))
    terms = (1.330274429, -1.821255978, 1.781477937, -0.356563782, 0.319381530)
    start: Any = 0.0
    polynomial = functools.reduce(lambda total, term: (total + term) * t, terms, start)
    beyond = exponential * math.sqrt(0.5 / math.pi) * polynomial
    return jnp.where(x < 0, beyond, 1 - beyond)


gelu.defvjp(_gelu_forward, _gelu_backward)


def attention(
    q_BMHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    mask_B1MS: jax.Array | None,
    kept_BHMS: jax.Array | None = None,
) -> jax.Array:
    """softmax(q k / √K) v, (B, M, H, K), in q's dtype. kept_BHMS: what shares are multiplied by."""
    q_BHMK, k_BHSK, v_BHSK = (x.swapaxes(1, 2) for x in (q_BMHK, k_BSHK, v_BSHK))
    scaled_BHMK = q_BHMK * q_BHMK.shape[-1] ** -0.5
    return _attention(scaled_BHMK, k_BHSK, v_BHSK, mask_B1MS, kept_BHMS).swapaxes(1, 2)


@jax.custom_vjp
def _attention(
    q_BHMK: jax.Array,
    k_BHSK: jax.Array,
    v_BHSK: jax.Array,
    mask_B1MS: jax.Array | None,
    kept_BHMS: jax.Array | None,
) -> jax.Array:
    """softmax(q k) v of scaled queries.

    Of all that is as large as the scores, (B, H, M, S), only their exponentials are kept, and nothing so large is ever
    divided: the sums of the exponentials divide the results, which are smaller, and in the backward pass their
    gradients (as flash attention does it, Dao et al. 2022, appendix B). On a CPU such passes over memory took half as
    long as attention's matrix products.

    Scores, and what the gradient of each of them is the difference of, are float32 at least and of the same rounded
    exponentials: while attention is nearly even that difference is smaller than what bfloat16 rounds off, and a small
    model then learns late what to attend to (`docs/benchmarks.md`).
    """
    return _attention_forward(q_BHMK, k_BHSK, v_BHSK, mask_B1MS, kept_BHMS)[0]


def _attention_forward(
    q_BHMK: jax.Array,
    k_BHSK: jax.Array,
    v_BHSK: jax.Array,
    mask_B1MS: jax.Array | None,
    kept_BHMS: jax.Array | None,
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    scores_BHMS = _wide_product(q_BHMK, transposed(k_BHSK))
    if mask_B1MS is not None:
        scores_BHMS = jnp.where(mask_B1MS, scores_BHMS, jnp.asarray(-jnp.inf, scores_BHMS.dtype))
    highest_BHM1 = scores_BHMS.max(axis=-1, keepdims=True)
    exponentials_BHMS = jnp.exp(scores_BHMS - highest_BHM1).astype(q_BHMK.dtype)
    sums_BHM1 = widened(exponentials_BHMS).sum(axis=-1, keepdims=True)
    mixing_BHMS = exponentials_BHMS if kept_BHMS is None else exponentials_BHMS * kept_BHMS
    mixed_BHMK = _wide_product(mixing_BHMS, v_BHSK) / sums_BHM1
    mixed_or_none = None if device_kind() in KINDS_THAT_SUM_SHARES else mixed_BHMK
    residuals = q_BHMK, k_BHSK, v_BHSK, exponentials_BHMS, sums_BHM1, mixed_or_none, kept_BHMS
    return mixed_BHMK.astype(q_BHMK.dtype), residuals


def _attention_backward(residuals: tuple[Any, ...], gradient_BHMK: jax.Array) -> tuple[jax.Array | None, ...]:
    *large, sums_BHM1, mixed_BHMK, kept_BHMS = residuals
    large, gradient_BHMK = _recomputed_from(large, gradient_BHMK)
    q_BHMK, k_BHSK, v_BHSK, exponentials_BHMS = large
    mixing_BHMS = exponentials_BHMS if kept_BHMS is None else exponentials_BHMS * kept_BHMS
    shared_BHMK = (_computed_once(gradient_BHMK) / sums_BHM1).astype(q_BHMK.dtype)
    if mixed_BHMK is not None:
        along_BHM1 = (widened(shared_BHMK) * mixed_BHMK).sum(axis=-1, keepdims=True)
    of_shares_BHMS = _wide_product(shared_BHMK, transposed(v_BHSK))
    if kept_BHMS is not None:
        of_shares_BHMS = of_shares_BHMS * kept_BHMS
    if mixed_BHMK is None:
        along_BHM1 = (exponentials_BHMS * of_shares_BHMS).sum(axis=-1, keepdims=True) / sums_BHM1
    of_scores_BHMS = _computed_once((exponentials_BHMS * (of_shares_BHMS - along_BHM1)).astype(q_BHMK.dtype))
    of_q_BHMK = of_scores_BHMS @ k_BHSK
    of_k_BHSK = transposed(of_scores_BHMS) @ q_BHMK
    of_v_BHSK = transposed(mixing_BHMS) @ shared_BHMK
    return of_q_BHMK, of_k_BHSK, of_v_BHSK, None, None


_attention.defvjp(_attention_forward, _attention_backward)


def _wide_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """x y, not rounded to their own dtype."""
    return jnp.matmul(x, y, preferred_element_type=wide_type(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: jax.Array, scale_D: jax.Array, bias_D: jax.Array, kept: jnp.dtype) -> jax.Array:
    """Layer norm over the last axis, in the dtype `kept`, whatever x's is; for TPUs.

    The variance is the mean of the squares less the square of the mean, in one pass with the mean, as Flax's own layer
    norm computes it. The normal values are kept for the backward pass in that dtype too.
    """
    return _layer_norm_forward(x, scale_D, bias_D, kept)[0]


def _layer_norm_forward(
    x: jax.Array, scale_D: jax.Array, bias_D: jax.Array, kept: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    wide = widened(x)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.maximum((wide * wide).mean(-1, keepdims=True) - mean * mean, 0)
    inverse = jax.lax.rsqrt(variance + LAYER_NORM_EPSILON)
    normal = (wide - mean) * inverse
    dtype_of_x = jnp.zeros(0, x.dtype)
    return (normal * scale_D + bias_D).astype(kept), (normal.astype(kept), inverse, scale_D, dtype_of_x)


def _layer_norm_backward(
    _kept: jnp.dtype, residuals: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    normal, inverse, scale_D, dtype_of_x = residuals
    normal, wide = widened(normal), widened(gradient)
    of_normal = wide * scale_D
    mean, along = (values.mean(-1, keepdims=True) for values in (of_normal, of_normal * normal))
    of_x = (inverse * (of_normal - mean - normal * along)).astype(dtype_of_x.dtype)
    rows = tuple(range(gradient.ndim - 1))
    return of_x, (wide * normal).sum(rows).astype(scale_D.dtype), wide.sum(rows).astype(scale_D.dtype)


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def cross_entropy(
    x_BMD: jax.Array,
    table_VD: jax.Array,
    bias_V: jax.Array,
    targets_BM: jax.Array,
    weights_BM: jax.Array,
    tokens: int,
) -> jax.Array:
    """The weighted sum of the cross-entropies in nats of the logits x Eᵀ + b; for TPUs.

    Of all that is as large as the logits, only their exponentials are kept, in x's dtype: of their distances to the
    target's logit. The highest logit, of which distances are never positive, would be known only when all are: they
    would have to be computed twice, or written to memory in float32 and read again. Where a token's loss is beyond
    MOST_NATS, the distances that exceed it count as that. Exponentials and their sums are of the same rounded numbers,
    as in `attention`.

    tokens: the table's rows that are tokens; what follows only fills it.
    """
    return _cross_entropy_forward(x_BMD, table_VD, bias_V, targets_BM, weights_BM, tokens)[0]


def _cross_entropy_forward(
    x_BMD: jax.Array,
    table_VD: jax.Array,
    bias_V: jax.Array,
    targets_BM: jax.Array,
    weights_BM: jax.Array,
    tokens: int,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    x_RD, targets_R, weights_R = _rows(x_BMD), targets_BM.reshape(-1), weights_BM.reshape(-1)
    narrow_VD = table_VD.astype(x_RD.dtype)
    masked_V = jnp.where(jnp.arange(bias_V.size) < tokens, bias_V, NEVER)

    rows_RD = narrow_VD[targets_R]
    of_targets_R = (widened(x_RD) * widened(rows_RD)).sum(-1) + bias_V[targets_R]
    logits_RV = jnp.matmul(x_RD, narrow_VD.T, preferred_element_type=table_VD.dtype) + masked_V
    beyond_RV = jnp.minimum(logits_RV - of_targets_R[:, None], MOST_NATS)
    exponentials_RV = jnp.exp(beyond_RV).astype(x_RD.dtype)
    sums_R = widened(exponentials_RV).sum(-1)
    nats_R = jnp.log(sums_R)
    return (nats_R * weights_R).sum(), (
        x_BMD, narrow_VD, rows_RD, targets_R, weights_R, exponentials_RV, sums_R
    )  # fmt: skip


def _cross_entropy_backward(
    _tokens: int, residuals: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array | None, ...]:
    x_BMD, narrow_VD, rows_RD, targets_R, weights_R, exponentials_RV, sums_R = residuals
    x_RD, each_R1 = _rows(x_BMD), (gradient * weights_R)[:, None]
    scale_R1 = each_R1 / sums_R[:, None]
    of_x_RD = _wide_product(exponentials_RV, narrow_VD) * scale_R1 - widened(rows_RD) * each_R1
    is_target_RV = targets_R[:, None] == jnp.arange(narrow_VD.shape[0])
    of_logits_RV = exponentials_RV * scale_R1 - jnp.where(is_target_RV, each_R1, 0)
    of_logits_VR = of_logits_RV.astype(x_RD.dtype).T
    of_bias_VC = _wide_product(of_logits_VR, _first_column(x_RD))
    of_table_VD = _wide_product(of_logits_VR, x_RD)
    return of_x_RD.astype(x_BMD.dtype).reshape(x_BMD.shape), of_table_VD, of_bias_VC.sum(-1), None, None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
