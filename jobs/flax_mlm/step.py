"""What one step computes: the state, the loss, the update, and the evaluation; functions of (seed, step) and the
parameters only.

Which tokens a step hides depends on a key and on the row's place in the global batch: the same step hides the same
tokens however many processes there are and however often the run was resumed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from contracts.errors import RequestError
from jobs.flax_mlm import hugging_face, sharding
from jobs.flax_mlm.config import Config, Dimensions, dimensions, problems
from jobs.flax_mlm.model import Mlm
from jobs.flax_mlm.sharding import make_model
from jobs.flax_mlm.tokenizer import TokenizerFacts, facts_of_size, load_tokenizer
from jobs.runtime import processor
from jobs.runtime.jax import aot, distributed
from jobs.runtime.jax.ops import nats
from jobs.runtime.storage.cache import user_cache_dir

State = dict[str, Any]
"""params (float32), opt_state, and step: how many steps have been taken, int32."""

EVAL_MASK_SHARE = 0.15
EVAL_SEED = 0x4D4C4D
"""Evaluations hide the same tokens whatever the run's own seed and mask share, so that runs can be compared."""
CACHED_BYTES = 2**26
"""Of parameters: where they are more, passes over memory are what a CPU's optimizer takes time for."""
KINDS_THAT_SUM_BY_SHAPE = ("TPU v6 lite",)
"""Whose step takes the gradient's norm by `norm_by_shape`."""
INIT_STREAM, MASK_STREAM, DROPOUT_STREAM = 0, 1, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskRule:
    """BERT's rule (Devlin et al. 2018, 3.1): of the chosen tokens 80 % become the mask, 10 % a random token.

    slots: tokens chosen in each sequence, a fixed number so that shapes are static.
    special_ids: never chosen, and never the random token.
    """

    slots: int
    mask_id: int
    special_ids: tuple[int, ...]
    vocab_size: int
    mask_share: float = 0.8
    random_share: float = 0.1


class Masked(NamedTuple):
    """One masked batch. Slots beyond a sequence's ordinary tokens have weight 0."""

    inputs_BS: jax.Array
    positions_BM: jax.Array
    targets_BM: jax.Array
    weights_BM: jax.Array


def slots_for(share: float, length: int) -> int:
    """The number of masked slots of a sequence of `length` tokens: `share` of them, rounded, at least one."""
    return max(1, round(share * length))


def mask(rule: MaskRule, key: jax.Array, tokens_BS: jax.Array, rows_B: jax.Array) -> Masked:
    """Choose `rule.slots` ordinary tokens of each row, uniformly without repetition, and hide them.

    A row draws from `fold_in(key, rows_B[i])`: its place in the global batch, or in the held-out split.
    """
    keys_B = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows_B)
    return jax.vmap(lambda row_key, tokens_S: _mask_row(rule, row_key, tokens_S))(keys_B, tokens_BS)


def _mask_row(rule: MaskRule, key: jax.Array, tokens_S: jax.Array) -> Masked:
    choose_key, fate_key, random_key = jax.random.split(key, 3)
    special_S = jnp.isin(tokens_S, jnp.asarray(rule.special_ids, tokens_S.dtype))
    score_S = jnp.where(special_S, -1.0, jax.random.uniform(choose_key, tokens_S.shape))
    score_M, positions_M = jax.lax.top_k(score_S, rule.slots)
    targets_M = tokens_S[positions_M]
    ordinary = [i for i in range(rule.vocab_size) if i not in set(rule.special_ids)]
    random_M = jax.random.choice(random_key, jnp.asarray(ordinary, tokens_S.dtype), (rule.slots,))
    fate_M = jax.random.uniform(fate_key, (rule.slots,))
    hidden_M = jnp.where(
        fate_M < rule.mask_share,
        rule.mask_id,
        jnp.where(fate_M < rule.mask_share + rule.random_share, random_M, targets_M),
    )
    chosen_M = score_M >= 0
    inputs_S = tokens_S.at[positions_M].set(jnp.where(chosen_M, hidden_M, targets_M))
    return Masked(inputs_S, positions_M, targets_M, chosen_M.astype(jnp.float32))


def mask_rule(tokenizer: TokenizerFacts, share: float, length: int) -> MaskRule:
    return MaskRule(
        slots=slots_for(share, length),
        mask_id=tokenizer.mask_id,
        special_ids=tokenizer.special_ids,
        vocab_size=tokenizer.vocab_size,
    )


def decided(config: Config, platform: str) -> Config:
    """Decide the activations' dtype where it is left open: bfloat16, or float32 where some host's CPU has no
    instructions for it. All processes ask together and come to the same."""
    dtype = processor.dtype(config.dtype, platform, distributed.all_processes)
    return dataclasses.replace(config, dtype=dtype)


def activations_dtype(config: Config, mesh: Mesh) -> jnp.dtype:
    return jnp.dtype(decided(config, mesh.devices.flat[0].platform).dtype)


def sent_dtype(config: Config, mesh: Mesh) -> jnp.dtype:
    """In which training collects matrices and sums their gradients between devices: on TPUs that of the activations,
    to which products round the matrices anyway (docs/benchmarks.md), else float32 at least."""
    dtype = activations_dtype(config, mesh)
    is_tpu = mesh.devices.flat[0].platform == "tpu"
    return dtype if is_tpu else jnp.promote_types(dtype, sharding.FLOAT32)


def learning_rate(config: Config) -> optax.Schedule:
    """Linear from 0 to the peak over the warm-up, then linear to 0 at the last step."""
    rise = optax.linear_schedule(0.0, config.peak_learning_rate, max(1, config.warmup_steps))
    fall = optax.linear_schedule(config.peak_learning_rate, 0.0, max(1, config.steps - config.warmup_steps))
    return optax.join_schedules([rise, fall], [config.warmup_steps])


def make_optimizer(config: Config) -> optax.GradientTransformationExtraArgs:
    """AdamW with RoBERTa's constants (Liu et al. 2019, table 9); matrices decay, biases and norms do not."""
    return optax.chain(
        _clip(config.clip_norm),
        optax.adamw(
            learning_rate(config),
            b1=0.9,
            b2=0.98,
            eps=1e-6,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )


def _clip(longest: float) -> optax.GradientTransformationExtraArgs:
    """`optax.clip_by_global_norm`, which may be told the norm: then each leaf is clipped by itself."""
    plain = optax.clip_by_global_norm(longest)

    def update(gradient: Any, state: Any, _params: Any = None, *, norm: jax.Array | None = None) -> Any:
        if norm is None:
            return plain.update(gradient, state)
        return jax.tree.map(
            lambda leaf: jax.lax.select(norm < longest, leaf, leaf / norm * longest), gradient
        ), state

    return optax.GradientTransformationExtraArgs(plain.init, update)


def create(
    config: Config,
    tokenizer: TokenizerFacts,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    compiled: Callable[..., Callable[[], State]] = lambda function: function,
) -> tuple[nnx.GraphDef[Mlm], State]:
    """The model's structure, and its state before the first step, drawn from the seed, on each device its part.

    compiled: what makes a program of a function of jax.jit's, such as `Executables.cached`.
    """
    dims, dtype = dimensions(config, tokenizer), activations_dtype(config, mesh)
    graph = nnx.split(nnx.eval_shape(lambda: Mlm(dims, dtype, nnx.Rngs(0))))[0]

    def draw() -> State:
        key = jax.random.fold_in(jax.random.key(config.seed), INIT_STREAM)
        params = nnx.to_pure_dict(nnx.state(Mlm(dims, dtype, nnx.Rngs(key)), nnx.Param))
        return {"params": params, "opt_state": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}

    return graph, compiled(jax.jit(draw, out_shardings=sharding.shardings(jax.eval_shape(draw), mesh)))()


def with_params(state: State, params: Any) -> State:
    """The state before the first step of a model that has been trained before; each device is given its own part."""

    def replace_leaf(old: jax.Array, new: Any) -> jax.Array:
        return jax.make_array_from_callback(old.shape, old.sharding, lambda part: new[part])

    return {**state, "params": jax.tree.map(replace_leaf, state["params"], params)}


def mask_of_step(
    rule: MaskRule, seed: int, step: jax.Array, tokens_BS: jax.Array, rows_B: jax.Array
) -> Masked:
    """Mask the tokens of the step that follows `step` steps; rows_B: their places in the global batch."""
    return mask(rule, _fold(seed, MASK_STREAM, step), tokens_BS, rows_B)


def cross_entropy(logits_BMV: jax.Array, masked: Masked) -> tuple[jax.Array, jax.Array]:
    """Sums over the hidden tokens: of the cross-entropy in nats, and of the right guesses."""
    nats_BM = nats(logits_BMV, masked.targets_BM)
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
    told_norm = optax.with_extra_args_support(optimizer)
    schedule, device = learning_rate(config), mesh.devices.flat[0]
    sums_by_shape = device.device_kind in KINDS_THAT_SUM_BY_SHAPE
    state_shardings, params_specs = sharding.shardings(state, mesh), sharding.specs(state["params"], mesh)
    sharded_sums = _make_sums(graph, rule, config, mesh, params_specs)

    def step(state: State, tokens_BS: jax.Array, rows_B: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        summed, nats, hidden = sharded_sums(state["params"], tokens_BS, rows_B, state["step"])
        gradient = mean_gradient(summed, hidden)
        loss = nats / hidden
        norm = norm_by_shape(summed) / jnp.maximum(hidden, 1) if sums_by_shape else optax.tree.norm(gradient)
        results = {"loss": loss, "grad_norm": norm, "learning_rate": schedule(state["step"])}
        is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        with jax.named_scope("optimizer"):
            if device.platform == "cpu":
                after = updated_in_place(told_norm, summed, hidden, norm, is_finite, state)
            else:
                after = updated(told_norm, gradient, norm, is_finite, state)
        return after, results

    return jax.jit(step, donate_argnums=0, out_shardings=(state_shardings, sharding.replicated(mesh)))


def _make_sums(
    graph: nnx.GraphDef[Mlm], rule: MaskRule, config: Config, mesh: Mesh, params_specs: Any
) -> Callable[..., tuple[Any, jax.Array, jax.Array]]:
    """(params, tokens_BS, rows_B, step) to the gradient of the summed cross-entropy, that sum, and the hidden tokens,
    over all devices."""
    sent = sent_dtype(config, mesh)
    cross_entropy_sum = make_model(
        graph,
        params_specs,
        method=Mlm.cross_entropy,
        sent=sent,
        remat=config.remat,
        recollect=config.fsdp > 1,
    )

    def masked_nats(params: Any, masked: Masked, keys_B: jax.Array) -> jax.Array:
        return cross_entropy_sum(params)(*masked, keys_B)

    def sums(params: Any, tokens_BS: jax.Array, rows_B: jax.Array, step: jax.Array) -> tuple[Any, ...]:
        """On each device: the gradient of the summed cross-entropy of its rows, that sum, and its hidden tokens."""
        with jax.named_scope("mask"):
            masked = mask_of_step(rule, config.seed, step, tokens_BS, rows_B)
        dropout_key = _fold(config.seed, DROPOUT_STREAM, step)
        keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(dropout_key, rows_B)
        slopes = functools.partial(jax.value_and_grad(masked_nats), params)
        nats, gradient = _sum_by_parts(slopes, config.accumulate, masked, keys_B)
        return sharding.sum_gradients(gradient, params_specs, sent), *sharding.sum_over(
            (nats, masked.weights_BM.sum())
        )

    return sharding.on_each_device(
        sums,
        mesh,
        (params_specs, sharding.ROWS, sharding.ROWS, sharding.REPLICATED),
        (params_specs, sharding.REPLICATED, sharding.REPLICATED),
    )


def make_eval_step(
    graph: nnx.GraphDef[Mlm], rule: MaskRule, mesh: Mesh, state: State, *, parts: int = 1
) -> Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]:
    """(params, tokens_BS, rows_B, counts_B) to (3,) sums: cross-entropy, right guesses, hidden tokens.

    rows_B: the sequences' places in the held-out split; counts_B: 1.0, or 0.0 for a row that only fills the batch.
    parts: in which a device takes its rows, as in training.
    """
    params_specs = sharding.specs(state["params"], mesh)
    model = make_model(graph, params_specs)

    def sums(params: Any, *by_row: jax.Array) -> jax.Array:
        logits = model(params)

        def part_sums(tokens_BS: jax.Array, rows_B: jax.Array, counts_B: jax.Array) -> jax.Array:
            masked = mask(rule, jax.random.key(EVAL_SEED), tokens_BS, rows_B)
            masked = masked._replace(weights_BM=masked.weights_BM * counts_B[:, None])
            logits_BMV = logits(masked.inputs_BS, masked.positions_BM)
            return jnp.stack([*cross_entropy(logits_BMV, masked), masked.weights_BM.sum()])

        summed: jax.Array = sharding.sum_over(_sum_by_parts(part_sums, parts, *by_row))
        return summed

    rows = sharding.ROWS
    return jax.jit(sharding.on_each_device(sums, mesh, (params_specs, rows, rows, rows), sharding.REPLICATED))


class Steps(NamedTuple):
    """What a training is made of: the model's structure, the state before the first step, and its two compiled steps.

    slots: the tokens that a training step hides in each sequence.
    """

    graph: nnx.GraphDef[Mlm]
    state: State
    train: Callable[[State, jax.Array, jax.Array], tuple[State, dict[str, jax.Array]]]
    evaluate: Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]
    slots: int


def make_steps(
    config: Config,
    tokenizer: TokenizerFacts,
    mesh: Mesh,
    compiled: Callable[[Any], Callable[..., Any]] = lambda function: function,
) -> Steps:
    """The steps of `config`, and the state drawn from its seed; compiled: see `create`."""
    optimizer = make_optimizer(config)
    graph, state = create(config, tokenizer, optimizer, mesh, compiled)
    train_rule = mask_rule(tokenizer, config.mask_share, config.sequence_length)
    eval_rule = mask_rule(tokenizer, EVAL_MASK_SHARE, config.sequence_length)
    return Steps(
        graph,
        state,
        compiled(make_train_step(graph, optimizer, train_rule, config, mesh, state)),
        compiled(make_eval_step(graph, eval_rule, mesh, state, parts=config.accumulate)),
        train_rule.slots,
    )


def lower_step(config: Config, devices: Sequence[jax.Device]) -> aot.TrainStep:
    """The training step of `config` for devices that need not be there. A vocabulary that would be trained counts as
    one of as many tokens as the options say.

    Raises:
        RequestError: the model of --init-from or the tokenizer cannot be read, or the options do not suit the devices.
    """
    config, _ = hugging_face.adopt(config, user_cache_dir(), lambda text: print(text, file=sys.stderr))
    wrong = problems(config, devices=len(devices))
    if wrong:
        raise RequestError("; ".join(wrong))
    mesh = sharding.make_mesh(config.fsdp, devices)
    config = decided(config, mesh.devices.flat[0].platform)
    tokenizer = (
        facts_of_size(config.size("vocab_size"))
        if config.tokenizer is None
        else load_tokenizer(Path(config.tokenizer))
    )
    optimizer, rule = make_optimizer(config), mask_rule(tokenizer, config.mask_share, config.sequence_length)
    graph, drawn = create(config, tokenizer, optimizer, mesh, lambda function: function.eval_shape)
    state = aot.shapes(drawn, sharding.shardings(drawn, mesh))
    step: Any = make_train_step(graph, optimizer, rule, config, mesh, state)
    rows = (config.batch_size, config.sequence_length)
    batch = [
        jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding.by_row(mesh)) for shape in (rows, rows[:1])
    ]
    return aot.TrainStep(
        traced=step.trace(state, *batch),
        arguments=(state, *batch),
        parameters=state["params"],
        optimizer=state["opt_state"],
        unit="tokens",
        per_step=math.prod(rows),
        steps=config.steps,
        model_operations=step_flops(
            dimensions(config, tokenizer),
            batch_size=config.batch_size,
            length=config.sequence_length,
            slots=rule.slots,
        ),
    )


def mean_gradient(summed: Any, hidden: jax.Array) -> Any:
    """The gradient of the mean; of a batch that hides nothing the loss is no number, and the gradient nothing."""
    return jax.tree.map(lambda leaf: leaf / jnp.maximum(hidden, 1), summed)


def norm_by_shape(tree: Any) -> jax.Array:
    """`optax.tree.norm`, in few sums: squares of leaves of one shape are added to each other before they are summed.
    Each sum costs a TPU something besides its bytes."""
    squares: dict[tuple[int, ...], jax.Array] = {}
    for leaf in jax.tree.leaves(tree):
        squares[leaf.shape] = squares.get(leaf.shape, 0) + leaf * leaf
    return jnp.sqrt(functools.reduce(jnp.add, [square.sum() for square in squares.values()]))


def updated(
    optimizer: optax.GradientTransformationExtraArgs,
    gradient: Any,
    norm: jax.Array,
    is_finite: jax.Array,
    before: State,
) -> State:
    """The state after a step, or as it was before. Counters go on in either case: the learning rate is the step's.

    norm: of the gradient.
    """
    params, opt_state = before["params"], before["opt_state"]
    updates, opt_state_after = optimizer.update(gradient, opt_state, params, norm=norm)
    after = {"params": optax.apply_updates(params, updates), "opt_state": opt_state_after}
    chosen = _applied_if(is_finite, after, {"params": params, "opt_state": opt_state})
    return {**chosen, "step": before["step"] + 1}


def updated_in_place(
    optimizer: optax.GradientTransformationExtraArgs,
    summed: Any,
    hidden: jax.Array,
    norm: jax.Array,
    is_finite: jax.Array,
    before: State,
) -> State:
    """As `updated`, for CPUs; of a large model in one pass over memory for the parameters and each of its two means.

    XLA writes to memory what several results are computed from, here a clipped gradient, as large as the model. And it
    computes the parameters from the means of before, which it copies if they may be overwritten by then. Through a
    barrier it does not see that numbers are the same, and what is behind one waits.

    summed: the gradient of the sum over the hidden tokens; norm: of that of the mean.
    """
    params = before["params"]

    def update(numbers: tuple[jax.Array, jax.Array], opt_state: Any) -> Any:
        hidden, norm = numbers
        return optimizer.update(mean_gradient(summed, hidden), opt_state, params, norm=norm)

    is_large = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) > CACHED_BYTES
    numbers = [(hidden, norm)] * 3
    of_params, of_mean, of_square = jax.lax.optimization_barrier(numbers) if is_large else numbers
    params_after = optax.apply_updates(params, update(of_params, before["opt_state"])[0])
    params_after, opt_state = jax.lax.optimization_barrier(
        (_applied_if(is_finite, params_after, params), before["opt_state"])
    )
    opt_state_after = update(of_mean, opt_state)[1]
    if is_large:
        square = optax.tree.get(update(of_square, opt_state)[1], "nu")
        opt_state_after = optax.tree.set(opt_state_after, nu=square)
    chosen = _applied_if(is_finite, opt_state_after, opt_state)
    return {"params": params_after, "opt_state": chosen, "step": before["step"] + 1}


def _applied_if(is_finite: jax.Array, after: Any, before: Any) -> Any:
    """What is after a step, or was before; whole numbers count on.

    Not by `jnp.where`: whether two calls of that are one function of the program is up to JAX's caches, so that the
    same step would be compiled anew by the next process.
    """

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        if jnp.issubdtype(new.dtype, jnp.integer):
            return new
        return jax.lax.select(jnp.broadcast_to(is_finite, new.shape), new, old)

    return jax.tree.map(choose, after, before)


def _sum_by_parts(function: Callable[..., Any], parts: int, *by_row: Any) -> Any:
    """The sum of `function` over a device's rows, taken in so many parts one after the other."""
    if parts == 1:
        return function(*by_row)
    split = jax.tree.map(lambda leaf: leaf.reshape(parts, -1, *leaf.shape[1:]), by_row)

    def add(sums: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, function(*part)), None

    one_part = jax.eval_shape(function, *jax.tree.map(lambda leaf: leaf[0], split))
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), one_part)
    return jax.lax.scan(add, nothing, split)[0]


def _fold(seed: int, stream: int, step: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """loss: mean cross-entropy in nats over the hidden tokens; accuracy: share of them guessed."""

    loss: float
    accuracy: float


def evaluate(
    eval_step: Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array],
    params: Any,
    read_rows: Callable[[np.ndarray], jax.Array],
    place: Callable[[np.ndarray], jax.Array],
    *,
    sequences: int,
    batch_size: int,
    tick: Callable[[], None],
) -> Evaluation:
    """Evaluate the first `sequences` held-out sequences, a batch at a time; the last batch is filled up.

    Args:
        eval_step: see `make_eval_step`.
        read_rows: (B,) indices of held-out sequences to (B, S) tokens over all devices.
        place: (B,) values to an array over all devices.
        tick: called at every sign of progress.
    """
    sums, totals = [], []
    for first in range(0, sequences, batch_size):
        places_B = np.arange(first, first + batch_size)
        rows_B = np.minimum(places_B, sequences - 1).astype(np.int32)
        counts_B = (places_B < sequences).astype(np.float32)
        sums.append(eval_step(params, read_rows(rows_B), place(rows_B), place(counts_B)))
        tick()
    for batch in sums:
        totals.append(np.asarray(batch, dtype=np.float64))
        tick()
    nats, hits, hidden = np.sum(totals, axis=0)
    return Evaluation(loss=float(nats / hidden), accuracy=float(hits / hidden))


PASSES = 3
"""A forward pass and a backward one of twice its work."""


def forward_flops(dims: Dimensions, *, length: int, slots: int) -> int:
    """Floating-point operations of one sequence of `length` tokens whose head is asked at `slots` positions.

    Only matrix products are counted, two operations (multiply, add) for each weight that a position meets, and three
    times the forward pass for training: the backward pass computes each product's gradient to both of its factors
    (Chowdhery et al. 2022, arXiv:2204.02311, appendix B; Narayanan et al. 2021, arXiv:2104.04473, appendix). Of them

        a layer, for each of S positions   8 D² (query, key, value, output) + 4 D F (feed-forward) + 4 S D (attention)
        the head, for each of M slots      2 D² (dense) + 2 D V (the vocabulary)

    The last layer's results are read at the M slots only: there the other positions count for its keys and values only,
    4 D² each. Embedding look-ups, norms, GELU, softmax, dropout and the optimizer are left out, as is what is computed
    only because it suits the machine: the vocabulary's padding, and activations that are computed a second time.
    """
    d = dims.width
    keys_and_values = 4 * d * d
    the_rest = 4 * d * d + 4 * d * dims.ff_width + 4 * length * d
    layers = dims.layers * length * keys_and_values + ((dims.layers - 1) * length + slots) * the_rest
    head = slots * (2 * d * d + 2 * d * dims.vocab_size)
    return layers + head


def step_flops(dims: Dimensions, *, batch_size: int, length: int, slots: int) -> int:
    """Floating-point operations of one training step over all hosts together: what MFU is measured against."""
    return PASSES * batch_size * forward_flops(dims, length=length, slots=slots)
