"""What every program of a comparison reads: weights, configuration, batches, and the optimizer's numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jobs.flax_mlm import data
from jobs.flax_mlm import step as steps
from jobs.flax_mlm.config import Config
from jobs.flax_mlm.export import hugging_face_config, hugging_face_tensors
from jobs.flax_mlm.flops import step_flops
from jobs.flax_mlm.masking import Masked, mask
from jobs.flax_mlm.model import Mlm
from jobs.runtime.cache import user_cache_dir

CASES: dict[str, dict[str, Any]] = {
    "small": {"model": "small", "sequence_length": 128, "batch_size": 32},
    "long": {"model": "small", "sequence_length": 512, "batch_size": 8},
    "base": {"model": "base", "sequence_length": 128, "batch_size": 8},
}
BATCHES = 64


def config_of(case: str, *, dropout: float, dtype: Any = "float32") -> Config:
    """15 % hidden, as in `transformers`' script, which does not clip the gradient either."""
    common: dict[str, Any] = {"mask_share": 0.15, "steps": 1000, "learning_rate": 2e-4, "clip_norm": 1e9}
    return Config(**CASES[case], **common, dropout=dropout, dtype=dtype)


def prepare(folder: Path, case: str, dropout: float) -> dict[str, Any]:
    """Write the files into `folder`; returns tokens and flops of a step."""
    config = config_of(case, dropout=dropout)
    tokens = data.prepare(config, user_cache_dir(), lambda _: None)
    dims, length, size = (
        steps.dimensions(config, tokens.tokenizer),
        config.sequence_length,
        config.batch_size,
    )
    rule = steps.mask_rule(tokens.tokenizer, config.mask_share, length)
    model = Mlm(dims, jnp.dtype("float32"), nnx.Rngs(0))
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    kept: dict[str, list[np.ndarray]] = {"tokens": [], "inputs": [], "labels": []}

    @jax.jit
    def hidden(step: jax.Array, tokens_BS: jax.Array) -> Masked:
        key = steps._fold(jax.random.key(config.seed), steps.MASK_STREAM, step)
        return mask(rule, key, tokens_BS, jnp.arange(size))

    for step in range(BATCHES):
        sequences = tokens.sequences("train", length)
        indices_B = data.step_indices(step, seed=config.seed, sequences=sequences, batch_size=size)
        tokens_BS = tokens.rows("train", indices_B, length)
        masked = jax.tree.map(np.asarray, hidden(jnp.int32(step), jnp.asarray(tokens_BS)))
        labels_BS = np.full(tokens_BS.shape, -100, np.int32)
        asked_BM = np.where(masked.weights_BM > 0, masked.targets_BM, -100)
        np.put_along_axis(labels_BS, masked.positions_BM, asked_BM, axis=1)
        for name, values in (("tokens", tokens_BS), ("inputs", masked.inputs_BS), ("labels", labels_BS)):
            kept[name].append(values)
    stacked: dict[str, Any] = {name: np.stack(values) for name, values in kept.items()}
    np.savez(folder / "batches.npz", **stacked)
    (folder / "config.json").write_text(json.dumps(hugging_face_config(dims, tokens.tokenizer)))
    save_file(hugging_face_tensors(params, dims), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "params.msgpack").write_bytes(flax.serialization.to_bytes(params))
    schedule = steps.learning_rate(config)
    optimizer = {
        "rates": [float(schedule(step)) for step in range(config.steps)],
        "weight_decay": config.weight_decay,
    }
    (folder / "optimizer.json").write_text(json.dumps(optimizer))
    (folder / "case.json").write_text(json.dumps({"case": case, "dropout": dropout}))
    flops = step_flops(dims, batch_size=size, length=length, slots=rule.slots)
    return {"tokens": size * length, "flops": flops}
