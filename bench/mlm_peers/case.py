"""What every program of a comparison reads: weights, configuration, batches, and the optimizer's numbers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jobs.flax_mlm import data, input_pipeline
from jobs.flax_mlm import step as steps
from jobs.flax_mlm.config import Config, dimensions
from jobs.flax_mlm.data import Tokens
from jobs.flax_mlm.hugging_face import hugging_face_config, hugging_face_tensors
from jobs.flax_mlm.model import Mlm
from jobs.flax_mlm.step import Masked, mask, step_flops
from jobs.runtime.cache import user_cache_dir

CASES: dict[str, dict[str, Any]] = {
    "small": {"model": "small", "sequence_length": 128, "batch_size": 32},
    "long": {"model": "small", "sequence_length": 512, "batch_size": 8},
    "base": {"model": "base", "sequence_length": 128, "batch_size": 8},
}
BATCHES = 64
NO_CLIP = 1e9
SCHEDULE_STEPS = 1000
"""Of the learning rate, where only some first steps are taken."""


def config_of(case: str, *, dropout: float, seed: int = 0, steps: int = SCHEDULE_STEPS) -> Config:
    """15 % hidden, as in `transformers`' script, which does not clip the gradient either.

    The model has room for its size's whole vocabulary, even where the text is too short to fill it.
    """
    common: dict[str, Any] = {"mask_share": 0.15, "learning_rate": 2e-4, "clip_norm": NO_CLIP}
    config = Config(**CASES[case], **common, steps=steps, seed=seed, dropout=dropout, dtype="float32")
    trained = data.prepare(config, user_cache_dir(), lambda _: None).tokenizer
    return dataclasses.replace(config, tokenizer=str(trained.path), vocab_size=config.size("vocab_size"))


def prepare(
    folder: Path, config: Config, *, batches: int = BATCHES, held_out: int = 0, init_seed: int | None = None
) -> dict[str, Any]:
    """Write the files into `folder`; returns tokens and flops of a step.

    Args:
        batches: of training, which a program begins again when it has had them all.
        held_out: sequences to evaluate on, rounded down to whole batches; 0: no evaluation.
        init_seed: of the weights, where it is not the configuration's.
    """
    tokens = data.prepare(config, user_cache_dir(), lambda _: None)
    dims, length = dimensions(config, tokens.tokenizer), config.sequence_length
    rule = steps.mask_rule(tokens.tokenizer, config.mask_share, length)
    model = Mlm(dims, jnp.dtype("float32"), nnx.Rngs(config.seed if init_seed is None else init_seed))
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))

    np.savez(folder / "batches.npz", **_training(config, tokens, batches))
    if held_out:
        np.savez(folder / "held_out.npz", **_held_out(config, tokens, held_out))
    (folder / "config.json").write_text(json.dumps(hugging_face_config(dims, tokens.tokenizer)))
    save_file(hugging_face_tensors(params, dims), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "params.msgpack").write_bytes(flax.serialization.to_bytes(params))
    schedule = steps.learning_rate(config)
    optimizer = {
        "rates": [float(schedule(step)) for step in range(config.steps)],
        "weight_decay": config.weight_decay,
    }
    (folder / "optimizer.json").write_text(json.dumps(optimizer))
    (folder / "case.json").write_text(json.dumps(dataclasses.asdict(config)))
    flops = step_flops(dims, batch_size=config.batch_size, length=length, slots=rule.slots)
    return {"tokens": config.batch_size * length, "flops": flops}


def _training(config: Config, tokens: Tokens, batches: int) -> dict[str, Any]:
    """tokens, and the same with hidden ones, as flax_mlm's own step hides them: (batches, B, S) each."""
    length, size = config.sequence_length, config.batch_size
    rule = steps.mask_rule(tokens.tokenizer, config.mask_share, length)

    @jax.jit
    def hidden(step: jax.Array, tokens_BS: jax.Array) -> Masked:
        return steps.mask_of_step(rule, config.seed, step, tokens_BS, jnp.arange(size))

    kept: dict[str, list[np.ndarray]] = {"tokens": [], "inputs": [], "labels": []}
    sequences = tokens.sequences("train", length)
    for step in range(batches):
        indices_B = input_pipeline.step_indices(step, seed=config.seed, sequences=sequences, batch_size=size)
        tokens_BS = tokens.rows("train", indices_B, length)
        _keep(kept, tokens_BS, hidden(jnp.int32(step), jnp.asarray(tokens_BS)))
    return {name: np.stack(values) for name, values in kept.items()}


def _held_out(config: Config, tokens: Tokens, sequences: int) -> dict[str, Any]:
    """As `_training`, of the first held-out sequences: the tokens that flax_mlm's own evaluation hides."""
    length, size = config.sequence_length, config.batch_size
    rule = steps.mask_rule(tokens.tokenizer, steps.EVAL_MASK_SHARE, length)

    @jax.jit
    def hidden(tokens_BS: jax.Array, rows_B: jax.Array) -> Masked:
        return mask(rule, jax.random.key(steps.EVAL_SEED), tokens_BS, rows_B)

    kept: dict[str, list[np.ndarray]] = {"tokens": [], "inputs": [], "labels": []}
    batches = min(sequences, tokens.sequences("eval", length)) // size
    assert batches, f"{config.data}: has no {size} held-out sequences of {length} tokens; bring more text"
    for batch in range(batches):
        rows_B = np.arange(batch * size, (batch + 1) * size, dtype=np.int32)
        tokens_BS = tokens.rows("eval", rows_B, length)
        _keep(kept, tokens_BS, hidden(jnp.asarray(tokens_BS), jnp.asarray(rows_B)))
    return {name: np.stack(values) for name, values in kept.items()}


def _keep(kept: dict[str, list[np.ndarray]], tokens_BS: np.ndarray, found: Masked) -> None:
    """labels: -100 where nothing is asked, as in `transformers`."""
    masked = jax.tree.map(np.asarray, found)
    labels_BS = np.full(tokens_BS.shape, -100, np.int32)
    asked_BM = np.where(masked.weights_BM > 0, masked.targets_BM, -100)
    np.put_along_axis(labels_BS, masked.positions_BM, asked_BM, axis=1)
    for name, values in (("tokens", tokens_BS), ("inputs", masked.inputs_BS), ("labels", labels_BS)):
        kept[name].append(values)
