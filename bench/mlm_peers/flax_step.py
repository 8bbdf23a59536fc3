"""FlaxRobertaForMaskedLM with the training step of its time: float32, logits and one-hot targets everywhere, pmap.

Runs in the environment of bench/locks/flax.txt, which has nothing of ours: python flax_step.py FOLDER"""

# mypy: ignore-errors

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file
from transformers import FlaxRobertaForMaskedLM, RobertaConfig
from turns import answer, resident_bytes


def weights(folder, model):
    """PyTorch's tensors under Flax's names: a kernel lies the other way round."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {"kernel": "weight", "embedding": "weight", "scale": "weight"}
    results = {}
    for path, leaf in flatten_dict(model.params).items():
        tensor = tensors[".".join((*path[:-1], renamed.get(path[-1], path[-1])))]
        results[path] = jnp.asarray(tensor.T if path[-1] == "kernel" else tensor)
        assert results[path].shape == leaf.shape, path
    return unflatten_dict(results)


def main(folder):
    """See above."""
    facts = {"imported_bytes": resident_bytes()}
    settings = json.loads((folder / "optimizer.json").read_text())
    rates = jnp.asarray(settings["rates"])
    model = FlaxRobertaForMaskedLM(RobertaConfig.from_pretrained(folder), seed=0, dtype=jnp.float32)
    params = weights(folder, model)
    decayed = unflatten_dict({path: leaf.ndim > 1 for path, leaf in flatten_dict(params).items()})
    optimizer = optax.adamw(
        lambda count: rates[count],
        b1=0.9,
        b2=0.98,
        eps=1e-6,
        weight_decay=settings["weight_decay"],
        mask=decayed,
    )

    def step(params, state, dropout_key, inputs, labels):
        dropout_key, next_key = jax.random.split(dropout_key)

        def loss_function(params):
            logits = model(inputs, params=params, dropout_rng=dropout_key, train=True)[0]
            masked = labels >= 0
            targets = jax.nn.one_hot(labels, logits.shape[-1])
            return (optax.softmax_cross_entropy(logits, targets) * masked).sum(), masked.sum()

        (loss, masked), gradient = jax.value_and_grad(loss_function, has_aux=True)(params)
        masked = jax.lax.psum(masked, "batch")
        gradient = jax.tree.map(lambda leaf: leaf / masked, jax.lax.psum(gradient, "batch"))
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, next_key, jax.lax.psum(loss, "batch") / masked

    stepped = jax.pmap(step, "batch", donate_argnums=(0, 1))
    batches = np.load(folder / "batches.npz")
    inputs, labels = batches["inputs"], batches["labels"]
    place = lambda tree: jax.device_put_replicated(tree, jax.local_devices())  # noqa: E731
    running = [place(params), place(optimizer.init(params)), place(jax.random.PRNGKey(0))]

    def take(number):
        entry = number % len(inputs)
        *running[:], loss = stepped(*running, inputs[entry][None], labels[entry][None])
        return loss[0]

    answer(take, facts)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
