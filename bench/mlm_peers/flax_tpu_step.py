"""The training step of FlaxRobertaForMaskedLM, compiled for a TPU slice that need not be there: logits and one-hot
targets at all positions, dropout and AdamW as its script has them, rows over all devices.

Runs in the environment of bench/locks/flax_tpu.txt, which has nothing of ours:
python flax_tpu_step.py TOPOLOGY ROWS LENGTH DTYPE FILE

ROWS: of a device. FILE: where the compiled program is written. Prints the bytes of memory of a device."""

# mypy: ignore-errors

import os
import sys
from pathlib import Path

# No TPU is opened: none is locked, and no metadata server is asked.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
os.environ |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": ""}

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from transformers import FlaxRobertaForMaskedLM, RobertaConfig


def main(topology, rows, length, dtype, file):
    """See above."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.asarray(devices), ("batch",))
    replicated, by_row = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("batch"))
    base = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
    model = FlaxRobertaForMaskedLM(base, dtype=jnp.dtype(dtype), _do_init=False)
    params = jax.eval_shape(lambda: model.init_weights(jax.random.PRNGKey(0), (1, length)))
    decayed = unflatten_dict({path: leaf.ndim > 1 for path, leaf in flatten_dict(params).items()})
    optimizer = optax.adamw(1e-4, b1=0.9, b2=0.98, eps=1e-6, weight_decay=0.01, mask=decayed)

    def step(params, state, dropout_key, inputs, labels):
        dropout_key, next_key = jax.random.split(dropout_key)

        def mean_loss(params):
            logits = model(inputs, params=params, dropout_rng=dropout_key, train=True)[0]
            is_target = labels >= 0
            targets = jax.nn.one_hot(labels, logits.shape[-1])
            return (optax.softmax_cross_entropy(logits, targets) * is_target).sum() / is_target.sum()

        loss, gradient = jax.value_and_grad(mean_loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, next_key, loss

    def shapes(tree, sharding):
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        )

    tokens = jax.ShapeDtypeStruct((rows * len(devices), length), jnp.int32, sharding=by_row)
    state = jax.eval_shape(optimizer.init, params)
    key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    arguments = (*shapes((params, state, key), replicated), tokens, tokens)
    compiled = jax.jit(step, donate_argnums=(0, 1), out_shardings=replicated).lower(*arguments).compile()
    Path(file).write_text(compiled.as_text())
    memory = compiled.memory_analysis()
    lasting_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    print(lasting_bytes + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
