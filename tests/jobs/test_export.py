"""What is exported is the model: an independent forward pass from the files gives the same logits."""

from __future__ import annotations

import json
import math
import runpy
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from contracts.run_directory import RunDirectory
from jobs.flax_mlm import export as exporting
from jobs.flax_mlm.config import Config
from jobs.flax_mlm.model import Mlm
from jobs.flax_mlm.step import dimensions
from jobs.flax_mlm.tokenizer import TokenizerFacts, load_tokenizer, train_tokenizer

pytestmark = pytest.mark.usefixtures("two_devices")

Array = np.ndarray[Any, Any]
TOKENS_BS = np.array([[0, 5, 9, 282, 2, 1], [0, 282, 7, 7, 100, 2]])


@pytest.fixture
def trained(tmp_path: Path) -> TokenizerFacts:
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["the cat sat on the mat and the dog ate the hat"] * 20, 300, path)
    return load_tokenizer(path)


@pytest.fixture
def model(config: Config, trained: TokenizerFacts) -> Mlm:
    """A model none of whose parameters is 0 or 1, as it would be if one were left at what it starts from."""
    graph, state = nnx.split(Mlm(dimensions(config, trained), jnp.dtype("float32"), nnx.Rngs(0)))
    random = np.random.default_rng(1)
    return nnx.merge(
        graph, jax.tree.map(lambda leaf: jnp.asarray(random.normal(0.3, 0.4, leaf.shape), jnp.float32), state)
    )


@pytest.fixture
def exported(tmp_path: Path, config: Config, trained: TokenizerFacts, model: Mlm) -> Path:
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    tokens: Any = SimpleNamespace(tokenizer=trained)
    exporting.export(RunDirectory(str(tmp_path / "run")), config, params, tokens)
    return tmp_path / "run" / "export"


def expected_shapes(*, vocab: int, rows: int, layers: int, d: int, f: int) -> dict[str, tuple[int, ...]]:
    """The state dict that `RobertaForMaskedLM.from_pretrained` asks for, tied weights left out."""

    def linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}

    def norm(name: str) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (d,), f"{name}.bias": (d,)}

    shapes: dict[str, tuple[int, ...]] = {
        "roberta.embeddings.word_embeddings.weight": (vocab, d),
        "roberta.embeddings.position_embeddings.weight": (rows, d),
        "roberta.embeddings.token_type_embeddings.weight": (1, d),
        **norm("roberta.embeddings.LayerNorm"),
        "lm_head.bias": (vocab,),
        **linear("lm_head.dense", d, d),
        **norm("lm_head.layer_norm"),
    }
    for i in range(layers):
        layer = f"roberta.encoder.layer.{i}"
        for part in ("query", "key", "value"):
            shapes |= linear(f"{layer}.attention.self.{part}", d, d)
        shapes |= linear(f"{layer}.attention.output.dense", d, d)
        shapes |= norm(f"{layer}.attention.output.LayerNorm")
        shapes |= linear(f"{layer}.intermediate.dense", d, f)
        shapes |= linear(f"{layer}.output.dense", f, d)
        shapes |= norm(f"{layer}.output.LayerNorm")
    return shapes


def roberta(tensors: dict[str, Array], config: dict[str, Any], tokens_BS: Array) -> Array:
    """RobertaForMaskedLM in plain numpy, from its published definition: nothing of the job's is used."""

    def linear(name: str, x: Array) -> Array:
        y: Array = x @ tensors[f"{name}.weight"].T.astype(np.float64) + tensors[f"{name}.bias"]
        return y

    def norm(name: str, x: Array) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config["layer_norm_eps"])
        y: Array = scaled * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]
        return y

    def gelu(x: Array) -> Array:
        y: Array = x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
        return y

    embeddings = "roberta.embeddings"
    batch, length = tokens_BS.shape
    # create_position_ids_from_input_ids, of sequences without padding: pad_token_id + 1, + 2, …
    positions_S = np.arange(length) + config["pad_token_id"] + 1
    x = (
        tensors[f"{embeddings}.word_embeddings.weight"][tokens_BS]
        + tensors[f"{embeddings}.position_embeddings.weight"][positions_S]
        + tensors[f"{embeddings}.token_type_embeddings.weight"][0]
    ).astype(np.float64)
    x = norm(f"{embeddings}.LayerNorm", x)
    heads = config["num_attention_heads"]
    for i in range(config["num_hidden_layers"]):
        layer = f"roberta.encoder.layer.{i}"
        q, k, v = (
            linear(f"{layer}.attention.self.{part}", x).reshape(batch, length, heads, -1).swapaxes(1, 2)
            for part in ("query", "key", "value")
        )
        scores = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (weights / weights.sum(-1, keepdims=True)) @ v
        mixed = mixed.swapaxes(1, 2).reshape(batch, length, -1)
        x = norm(f"{layer}.attention.output.LayerNorm", x + linear(f"{layer}.attention.output.dense", mixed))
        inner = gelu(linear(f"{layer}.intermediate.dense", x))
        x = norm(f"{layer}.output.LayerNorm", x + linear(f"{layer}.output.dense", inner))
    x = norm("lm_head.layer_norm", gelu(linear("lm_head.dense", x)))
    logits: Array = x @ tensors[f"{embeddings}.word_embeddings.weight"].T + tensors["lm_head.bias"]
    return logits


def test_roberta_computed_from_the_exported_files_alone_gives_the_models_logits(
    exported: Path, model: Mlm
) -> None:
    told = json.loads((exported / "config.json").read_text())
    theirs = roberta(load_file(exported / "model.safetensors"), told, TOKENS_BS)
    ours = np.asarray(model.logits(model.encode(jnp.asarray(TOKENS_BS))))
    assert np.abs(ours).max() > 1  # or agreement would mean little
    np.testing.assert_allclose(theirs, ours, atol=1e-4, rtol=1e-4)


def test_names_and_shapes_are_those_of_robertas_state_dict(
    exported: Path, config: Config, trained: TokenizerFacts
) -> None:
    tensors = load_file(exported / "model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == expected_shapes(
        vocab=trained.vocab_size, rows=config.positions + 2, layers=2, d=16, f=24
    )
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype("float32")}


def test_the_configuration_says_what_the_tensors_are(exported: Path, trained: TokenizerFacts) -> None:
    told, tensors = (
        json.loads((exported / "config.json").read_text()),
        load_file(exported / "model.safetensors"),
    )
    rows, width = tensors["roberta.embeddings.position_embeddings.weight"].shape
    assert (told["max_position_embeddings"], told["hidden_size"]) == (rows, width)
    assert (
        told["vocab_size"]
        == tensors["roberta.embeddings.word_embeddings.weight"].shape[0]
        == trained.vocab_size
    )
    assert told["intermediate_size"] == tensors["roberta.encoder.layer.0.intermediate.dense.bias"].size
    assert (told["pad_token_id"], told["bos_token_id"], told["eos_token_id"]) == (1, 0, 2)
    assert told["tie_word_embeddings"] is True


def test_the_readmes_jax_block_runs_as_it_stands_and_gives_the_models_logits(
    exported: Path, model: Mlm, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = (exported / "README.md").read_text().split("JAX, in a checkout of tpu-stack:")[1]
    (exported.parent / "block.py").write_text(textwrap.dedent(block))
    monkeypatch.chdir(exported.parent)
    names = runpy.run_path("block.py")
    expected = model.logits(model.encode(jnp.array([[0, 100, 200, 2]])))
    np.testing.assert_allclose(names["logits"], expected, atol=1e-5)


def test_a_second_export_replaces_the_first_whole(
    exported: Path, tmp_path: Path, config: Config, trained: TokenizerFacts, model: Mlm
) -> None:
    (exported / "left-over").write_text("of the export before")
    before = {path.name: path.read_bytes() for path in exported.iterdir() if path.name != "left-over"}
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    tokens: Any = SimpleNamespace(tokenizer=trained)
    exporting.export(RunDirectory(str(tmp_path / "run")), config, params, tokens)
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before
