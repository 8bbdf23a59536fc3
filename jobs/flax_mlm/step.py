"""What one step computes: the state, the loss, the update; pure functions of (seed, step) and the parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from jobs.flax_mlm import sharding
from jobs.flax_mlm.config import Config
from jobs.flax_mlm.layerwise import model_of
from jobs.flax_mlm.masking import Masked, MaskRule, mask, slots_for
from jobs.flax_mlm.model import Dimensions, Mlm
from jobs.flax_mlm.tokenizer import TokenizerFacts
from jobs.runtime import distributed, processor

State = dict[str, Any]
"""params (float32), opt_state, and step: how many steps have been taken, int32."""

EVAL_MASK_SHARE = 0.15
EVAL_SEED = 0x4D4C4D
"""Evaluations hide the same tokens whatever the run's own seed and mask share, so that runs can be compared."""
INIT_STREAM, MASK_STREAM, DROPOUT_STREAM = 0, 1, 2


def dimensions(config: Config, tokenizer: TokenizerFacts) -> Dimensions:
    return Dimensions(
        # A model that is gone on with may have room for more tokens than its tokenizer knows.
        vocab_size=max(tokenizer.vocab_size, (config.tokenizer and config.vocab_size) or 0),
        max_positions=config.positions,
        position_offset=tokenizer.pad_id + 1,
        layers=config.size("layers"),
        width=config.size("width"),
        heads=config.size("heads"),
        ff_width=config.size("ff_width"),
        dropout=config.dropout,
        document_start=tokenizer.bos_id if config.attend_within == "document" else None,
    )


def mask_rule(tokenizer: TokenizerFacts, share: float, length: int) -> MaskRule:
    return MaskRule(
        slots=slots_for(share, length),
        mask_id=tokenizer.mask_id,
        special_ids=tokenizer.special_ids,
        vocab_size=tokenizer.vocab_size,
    )


def decided(config: Config) -> Config:
    """What its activations are computed in, where that is left open: bfloat16, but float32 where a CPU would have to do
    without instructions for it. All processes ask together: they compute in the same."""
    if config.dtype != "auto":
        return config
    is_fast = jax.default_backend() != "cpu" or distributed.everywhere(processor.multiplies_bfloat16())
    return dataclasses.replace(config, dtype="bfloat16" if is_fast else "float32")


def activations_dtype(config: Config) -> jnp.dtype:
    return jnp.dtype(decided(config).dtype)


def learning_rate(config: Config) -> optax.Schedule:
    """Linear from 0 to the peak over the warm-up, then linear to 0 at the last step."""
    rise = optax.linear_schedule(0.0, config.peak_learning_rate, max(1, config.warmup_steps))
    fall = optax.linear_schedule(config.peak_learning_rate, 0.0, max(1, config.steps - config.warmup_steps))
    return optax.join_schedules([rise, fall], [config.warmup_steps])


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW with RoBERTa's constants (Liu et al. 2019, table 9); matrices decay, biases and norms do not."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config),
            b1=0.9,
            b2=0.98,
            eps=1e-6,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )


def create(
    config: Config,
    tokenizer: TokenizerFacts,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    compiled: Callable[..., Callable[[], State]] = lambda function: function,
) -> tuple[nnx.GraphDef[Mlm], State]:
    """The model's structure, and its state before the first step, drawn from the seed, on each device its part.

    compiled: what makes a program of a function of jax.jit's, such as `Executables.of`.
    """
    dims, dtype = dimensions(config, tokenizer), activations_dtype(config)
    graph = nnx.split(nnx.eval_shape(lambda: Mlm(dims, dtype, nnx.Rngs(0))))[0]

    def draw() -> State:
        key = jax.random.fold_in(jax.random.key(config.seed), INIT_STREAM)
        params = nnx.to_pure_dict(nnx.state(Mlm(dims, dtype, nnx.Rngs(key)), nnx.Param))
        return {"params": params, "opt_state": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}

    return graph, compiled(jax.jit(draw, out_shardings=sharding.shardings(jax.eval_shape(draw), mesh)))()


def with_params(state: State, params: Any) -> State:
    """The state before the first step of a model that has been trained before; each device is given its own part."""

    def put(old: jax.Array, new: Any) -> jax.Array:
        return jax.make_array_from_callback(old.shape, old.sharding, lambda part: new[part])

    return {**state, "params": jax.tree.map(put, state["params"], params)}


def mask_of_step(
    rule: MaskRule, seed: int, step: jax.Array, tokens_BS: jax.Array, rows_B: jax.Array
) -> Masked:
    """What the step that follows `step` steps hides of its tokens; rows_B: their places in the global batch."""
    return mask(rule, _fold(seed, MASK_STREAM, step), tokens_BS, rows_B)


def cross_entropy(logits_BMV: jax.Array, masked: Masked) -> tuple[jax.Array, jax.Array]:
    """Sums over the hidden tokens: of the cross-entropy in nats, and of the right guesses."""
    of_target_BM = jnp.take_along_axis(logits_BMV, masked.targets_BM[..., None], axis=-1)[..., 0]
    nats_BM = jax.nn.logsumexp(logits_BMV, axis=-1) - of_target_BM
    hits_BM = logits_BMV.argmax(-1) == masked.targets_BM
    return (nats_BM * masked.weights_BM).sum(), (hits_BM * masked.weights_BM).sum()


def make_train_step(
    graph: nnx.GraphDef[Mlm],
    optimizer: optax.GradientTransformation,
    rule: MaskRule,
    config: Config,
    mesh: Mesh,
    state: State,
) -> Callable[[State, jax.Array, jax.Array], tuple[State, dict[str, jax.Array]]]:
    """(state, tokens_BS, rows_B) to (next state, {loss, grad_norm, learning_rate}).

    rows_B: the sequences' places in the global batch. The state's memory is used again. The loss is the mean over
    all hidden tokens of the global batch, whichever host holds them. A step whose loss or gradient is not finite
    changes neither parameters nor the optimizer's means, which it would destroy; the next one goes on from there.
    """
    schedule = learning_rate(config)
    state_shardings, params_specs = sharding.shardings(state, mesh), sharding.specs(state["params"], mesh)
    model = model_of(graph, params_specs, remat=config.remat)

    def nats_of(params: Any, masked: Masked, keys_B: jax.Array) -> jax.Array:
        logits_BMV = model(params)(masked.inputs_BS, masked.positions_BM, keys_B)
        return cross_entropy(logits_BMV, masked)[0]

    def sums(params: Any, tokens_BS: jax.Array, rows_B: jax.Array, step: jax.Array) -> tuple[Any, ...]:
        """On each device: the gradient of the summed cross-entropy of its rows, that sum, and its hidden tokens."""
        masked = mask_of_step(rule, config.seed, step, tokens_BS, rows_B)
        dropout_key = _fold(config.seed, DROPOUT_STREAM, step)
        keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(dropout_key, rows_B)
        slopes = functools.partial(jax.value_and_grad(nats_of), params)
        nats, gradient = _sum_by_parts(slopes, config.accumulate, masked, keys_B)
        return sharding.sum_gradients(gradient, params_specs), *sharding.sum_over(
            (nats, masked.weights_BM.sum())
        )

    sharded_sums = sharding.on_each_device(
        sums,
        mesh,
        (params_specs, sharding.ROWS, sharding.ROWS, sharding.WHOLE),
        (params_specs, sharding.WHOLE, sharding.WHOLE),
    )

    def step(state: State, tokens_BS: jax.Array, rows_B: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        gradient, nats, hidden = sharded_sums(state["params"], tokens_BS, rows_B, state["step"])
        # Of a batch that hides nothing the loss is no number, and the gradient nothing.
        gradient = jax.tree.map(lambda leaf: leaf / jnp.maximum(hidden, 1), gradient)
        updates, opt_state = optimizer.update(gradient, state["opt_state"], state["params"])
        next_state = {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
            "step": state["step"] + 1,
        }
        results = {
            "loss": nats / hidden,
            "grad_norm": optax.tree.norm(gradient),
            "learning_rate": schedule(state["step"]),
        }
        is_finite = jnp.isfinite(results["loss"]) & jnp.isfinite(results["grad_norm"])
        return _applied_if(is_finite, next_state, state), results

    return jax.jit(step, donate_argnums=0, out_shardings=(state_shardings, sharding.whole(mesh)))


def make_eval_step(
    graph: nnx.GraphDef[Mlm], rule: MaskRule, mesh: Mesh, state: State, *, parts: int = 1
) -> Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]:
    """(params, tokens_BS, rows_B, counts_B) to (3,) sums: cross-entropy, right guesses, hidden tokens.

    rows_B: the sequences' places in the held-out split; counts_B: 1.0, or 0.0 for a row that only fills the batch.
    parts: in which a device takes its rows, as in training.
    """
    params_specs = sharding.specs(state["params"], mesh)
    model = model_of(graph, params_specs)

    def sums(params: Any, *by_row: jax.Array) -> jax.Array:
        logits = model(params)

        def of_part(tokens_BS: jax.Array, rows_B: jax.Array, counts_B: jax.Array) -> jax.Array:
            masked = mask(rule, jax.random.key(EVAL_SEED), tokens_BS, rows_B)
            masked = masked._replace(weights_BM=masked.weights_BM * counts_B[:, None])
            logits_BMV = logits(masked.inputs_BS, masked.positions_BM)
            return jnp.stack([*cross_entropy(logits_BMV, masked), masked.weights_BM.sum()])

        summed: jax.Array = sharding.sum_over(_sum_by_parts(of_part, parts, *by_row))
        return summed

    rows = sharding.ROWS
    return jax.jit(sharding.on_each_device(sums, mesh, (params_specs, rows, rows, rows), sharding.WHOLE))


def _applied_if(is_finite: jax.Array, after: State, before: State) -> State:
    """The state after a step, or as it was before. Counters go on in either case: the learning rate is the step's."""
    chosen: State = jax.tree.map(
        lambda new, old: new if jnp.issubdtype(new.dtype, jnp.integer) else jnp.where(is_finite, new, old),
        after,
        before,
    )
    return chosen


def _sum_by_parts(function: Callable[..., Any], parts: int, *by_row: Any) -> Any:
    """The sum of `function` over a device's rows, taken in so many parts one after the other."""
    if parts == 1:
        return function(*by_row)
    split = jax.tree.map(lambda leaf: leaf.reshape(parts, -1, *leaf.shape[1:]), by_row)

    def add(sums: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, function(*part)), None

    of_one = jax.eval_shape(function, *jax.tree.map(lambda leaf: leaf[0], split))
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), of_one)
    return jax.lax.scan(add, nothing, split)[0]


def _fold(seed: int, stream: int, step: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), step)
