"""The trained model for others: Hugging Face's RoBERTa layout (safetensors), and Flax's own (msgpack)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import numpy as np
from safetensors.numpy import save_file

from contracts.run_directory import EXPORT, RunDirectory
from jobs.flax_mlm.config import Config
from jobs.flax_mlm.model import Dimensions, init_stddev
from jobs.flax_mlm.step import dimensions
from jobs.flax_mlm.tokenizer import TokenizerFacts, export_tokenizer
from jobs.flax_mlm.tokens import Tokens
from jobs.runtime.bucket_files import files_of

Tensors = dict[str, np.ndarray]


def export(directory: RunDirectory, config: Config, params: Any, tokens: Tokens) -> None:
    """Write export/ whole: config.json, model.safetensors, the tokenizer's files, params.msgpack, README.md.

    Args:
        params: the pure dict of float32 parameters that training uses.
    """
    host_params = jax.tree.map(np.asarray, params)
    dims = dimensions(config, tokens.tokenizer)
    with tempfile.TemporaryDirectory(prefix="export-") as folder:
        out = Path(folder)
        (out / "config.json").write_text(
            json.dumps(hugging_face_config(dims, tokens.tokenizer), indent=2) + "\n"
        )
        save_file(
            hugging_face_tensors(host_params, dims), out / "model.safetensors", metadata={"format": "pt"}
        )
        export_tokenizer(tokens.tokenizer.path, out, dims.max_positions)
        (out / "params.msgpack").write_bytes(flax.serialization.to_bytes(host_params))
        (out / "dimensions.json").write_text(json.dumps(vars(dims), indent=2) + "\n")
        (out / "README.md").write_text(README)
        files_of(directory.url).put_folder(folder, directory.path(EXPORT))


def hugging_face_config(dims: Dimensions, tokenizer: TokenizerFacts) -> dict[str, Any]:
    """config.json of a RobertaForMaskedLM with these sizes."""
    return {
        "architectures": ["RobertaForMaskedLM"],
        "model_type": "roberta",
        "vocab_size": dims.vocab_size,
        "hidden_size": dims.width,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "intermediate_size": dims.ff_width,
        "hidden_act": "gelu",
        "hidden_dropout_prob": dims.dropout,
        "attention_probs_dropout_prob": 0.0,
        # Hugging Face counts the rows of the position table, the unused ones included.
        "max_position_embeddings": dims.max_positions + dims.position_offset,
        "type_vocab_size": 1,
        "initializer_range": init_stddev(dims.width),
        "layer_norm_eps": 1e-5,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_id,
        "pad_token_id": tokenizer.pad_id,
        "eos_token_id": tokenizer.eos_id,
        "torch_dtype": "float32",
    }


def hugging_face_tensors(params: Mapping[str, Any], dims: Dimensions) -> Tensors:
    """The parameters under RobertaForMaskedLM's names and in PyTorch's orientation (a Linear is out x in).

    The output matrix is not among them: it is the word embeddings (tie_word_embeddings).
    """
    embeddings = params["embeddings"]
    tensors: Tensors = {
        "roberta.embeddings.word_embeddings.weight": embeddings["tokens"]["embedding"][: dims.vocab_size],
        "roberta.embeddings.position_embeddings.weight": embeddings["positions"]["embedding"],
        # RoBERTa's single token type adds the same vector everywhere; it is part of the others here.
        "roberta.embeddings.token_type_embeddings.weight": np.zeros((1, dims.width), np.float32),
        "lm_head.bias": params["head_bias"][: dims.vocab_size],
        **_norm("roberta.embeddings.LayerNorm", embeddings["norm"]),
        **_linear("lm_head.dense", params["head_dense"]),
        **_norm("lm_head.layer_norm", params["head_norm"]),
    }
    for index in range(dims.layers):
        layer, name = params["layers"][index], f"roberta.encoder.layer.{index}"
        for part, qkv in enumerate(("query", "key", "value")):
            columns = slice(part * dims.width, (part + 1) * dims.width)
            one = {"kernel": layer["qkv"]["kernel"][:, columns], "bias": layer["qkv"]["bias"][columns]}
            tensors |= _linear(f"{name}.attention.self.{qkv}", one)
        tensors |= _linear(f"{name}.attention.output.dense", layer["attention_out"])
        tensors |= _norm(f"{name}.attention.output.LayerNorm", layer["attention_norm"])
        tensors |= _linear(f"{name}.intermediate.dense", layer["ff_in"])
        tensors |= _linear(f"{name}.output.dense", layer["ff_out"])
        tensors |= _norm(f"{name}.output.LayerNorm", layer["ff_norm"])
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def _linear(name: str, params: Mapping[str, Any]) -> Tensors:
    return {f"{name}.weight": params["kernel"].T, f"{name}.bias": params["bias"]}


def _norm(name: str, params: Mapping[str, Any]) -> Tensors:
    return {f"{name}.weight": params["scale"], f"{name}.bias": params["bias"]}


README = """\
# A masked language model in RoBERTa's architecture

| file | what |
|---|---|
| `config.json`, `model.safetensors` | the model in Hugging Face's layout (RobertaForMaskedLM) |
| `tokenizer.json` and its companions | the tokenizer in the same layout |
| `params.msgpack`, `dimensions.json` | the parameters as Flax holds them, and the sizes to build the model from |

PyTorch, with `transformers`:

    from transformers import pipeline
    fill = pipeline("fill-mask", model="export", tokenizer="export")
    print(fill("Return the <mask> of the list."))

JAX, in a checkout of tpu-stack:

    import json, pathlib
    import flax.serialization, jax, jax.numpy as jnp
    from flax import nnx
    from jobs.flax_mlm.model import Dimensions, Mlm

    export = pathlib.Path("export")
    dims = Dimensions(**json.loads((export / "dimensions.json").read_text()))
    model = Mlm(dims, jnp.float32, nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    params = flax.serialization.from_bytes(params, (export / "params.msgpack").read_bytes())
    nnx.update(model, params)
    logits = model.logits(model.encode(jnp.array([[0, 100, 200, 2]])))  # (1, 4, vocabulary)
"""
