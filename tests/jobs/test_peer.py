"""The model is RobertaForMaskedLM: `transformers`, in PyTorch, finds the same logits, loss and gradients.

PyTorch comes into an environment of its own (`bench.peers`), 5 GiB once a machine; so these tests are slow ones.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from bench.peers import PROGRAMS, run_in_peer
from jobs.flax_mlm.config import Dimensions
from jobs.flax_mlm.hugging_face import hugging_face_config, hugging_face_tensors
from jobs.flax_mlm.model import Mlm
from jobs.flax_mlm.step import Masked, cross_entropy
from jobs.flax_mlm.tokenizer import TokenizerFacts

pytestmark = [pytest.mark.usefixtures("two_devices"), pytest.mark.nightly, pytest.mark.timeout(1800)]

DIMS = Dimensions(
    vocab_size=211, max_positions=40, position_offset=2, layers=3, width=32, heads=4, ff_width=80
)
BATCH, LENGTH, SLOTS = 4, 24, 5
Found = dict[str, np.ndarray]


def both(folder: Path) -> tuple[Found, Found]:
    """What our model finds with some weights on a masked batch, and what theirs finds."""
    random = np.random.default_rng(5)
    graph, drawn = nnx.split(Mlm(DIMS, jnp.dtype("float32"), nnx.Rngs(0)))
    # None of them 0 or 1, as a bias or a scale begins, and so large that nothing is near linear.
    params = nnx.to_pure_dict(
        jax.tree.map(lambda leaf: jnp.asarray(random.normal(0.1, 0.3, leaf.shape), jnp.float32), drawn)
    )
    inputs_BS = random.integers(4, DIMS.vocab_size, (BATCH, LENGTH)).astype(np.int32)
    positions_BM = np.stack([random.permutation(LENGTH)[:SLOTS] for _ in range(BATCH)])
    targets_BM = random.integers(4, DIMS.vocab_size, (BATCH, SLOTS))
    weights_BM = np.ones((BATCH, SLOTS), np.float32)
    weights_BM[0, 3:] = 0  # a sequence with fewer hidden tokens than the others

    def loss(params: Any) -> jax.Array:
        masked = Masked(*map(jnp.asarray, (inputs_BS, positions_BM, targets_BM, weights_BM)))
        logits_BMV = nnx.merge(graph, params)(masked.inputs_BS, masked.positions_BM)
        return cross_entropy(logits_BMV, masked)[0] / masked.weights_BM.sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    model = nnx.merge(graph, params)
    logits_BSV = model.logits(model.encode(jnp.asarray(inputs_BS)))
    ours = {
        "logits": np.asarray(logits_BSV),
        "loss": np.asarray(value),
        **hugging_face_tensors(jax.tree.map(np.asarray, gradient), DIMS),
    }

    labels_BS = np.full((BATCH, LENGTH), -100)
    for row, slot in np.argwhere(weights_BM > 0):
        labels_BS[row, positions_BM[row, slot]] = targets_BM[row, slot]
    np.savez(folder / "batch.npz", inputs_BS=inputs_BS, labels_BS=labels_BS)
    told = TokenizerFacts(
        path=folder, vocab_size=211, bos_id=0, pad_id=1, eos_id=2, unk_id=3, mask_id=4, sha256=""
    )
    (folder / "config.json").write_text(json.dumps(hugging_face_config(DIMS, told)))
    tensors = hugging_face_tensors(jax.tree.map(np.asarray, params), DIMS)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    run_in_peer("pytorch", PROGRAMS / "torch_step.py", [str(folder), "--reference"], limit_s=300)
    return ours, dict(np.load(folder / "found.npz"))


def test_logits_loss_and_the_gradient_of_every_parameter_are_those_of_transformers(tmp_path: Path) -> None:
    """The single token type has no parameter of its own here: its part lies in the positions'."""
    ours, theirs = both(tmp_path)
    assert np.abs(theirs["logits"]).max() > 1  # or agreement would mean little
    np.testing.assert_allclose(ours.pop("logits"), theirs.pop("logits"), atol=1e-4)
    assert float(ours.pop("loss")) == pytest.approx(float(theirs.pop("loss")), abs=1e-5)
    token_type = "roberta.embeddings.token_type_embeddings.weight"
    assert ours.keys() - {token_type} == theirs.keys() - {token_type, "lm_head.decoder.bias"}
    for name in ours.keys() - {token_type}:
        scale = np.abs(theirs[name]).max()
        assert scale > 0, name
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-4 * scale + 1e-6, err_msg=name)
