"""Rows and models that torch_glue and keras_glue both learn from, and what the first steps of both come to."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jobs.glue.data import read
from jobs.glue.options import Options
from jobs.glue.tokenizer import train_tokenizer

STEPS: dict[str, Any] = {"steps": 3, "batch_size": 8, "max_length": 32, "lengths": 3, "learning_rate": 1e-3}
EXACT: dict[str, Any] = {"dropout": 0.0, "dtype": "float32", "log_every": 1}
FIRST_STEPS = {
    "roberta": [(0.693093, 0.258640), (0.677402, 1.713313), (0.727985, 1.397731)],
    "bert": [(0.774647, 1.250953), (0.846842, 2.442294), (0.662935, 0.315367)],
}
"""Loss and norm of the gradient of STEPS, as torch_glue has computed them: without dropout, in float32."""
WIDTH, FF_WIDTH, LAYERS = 32, 48, 2


def write_rows(file: Path) -> Path:
    """200 sentences of 4 to 21 words; which of two words they have says their class."""
    drawn = random.Random(0)
    lines = []
    neutral = "the a film plot actor scene was of and".split()  # noqa: SIM905
    for _ in range(200):
        label = drawn.choice(["bad", "good"])
        terms = [drawn.choice(neutral) for _ in range(drawn.randint(3, 20))]
        terms.insert(drawn.randrange(len(terms)), {"bad": "awful", "good": "lovely"}[label])
        lines.append(json.dumps({"sentence": " ".join(terms), "label": label}))
    file.write_text("\n".join(lines) + "\n")
    return file


def write_folder(folder: Path, kind: str, rows: Path) -> Path:
    """A small model as transformers saves it, with weights that are far from those that would be drawn."""
    folder.mkdir()
    if kind == "roberta":
        train_tokenizer(read(Options(data=str(rows))).train.texts, folder)
        tokens = len(json.loads((folder / "vocab.json").read_text()))
    else:
        terms = "[PAD] [UNK] [CLS] [SEP] [MASK] the a film plot actor scene was of and awful lovely".split()  # noqa: SIM905
        (folder / "vocab.txt").write_text("\n".join(terms) + "\n")
        tokens = len(terms)
    settings = {
        "model_type": kind,
        "architectures": [
            {"roberta": "RobertaForSequenceClassification", "bert": "BertForSequenceClassification"}[kind]
        ],
        "vocab_size": tokens,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "intermediate_size": FF_WIDTH,
        "max_position_embeddings": 40,
        "type_vocab_size": 1 if kind == "roberta" else 2,
        "pad_token_id": 1 if kind == "roberta" else 0,
        "layer_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    random_numbers = np.random.Generator(np.random.Philox(7))
    tensors = {
        name: ((name.endswith("LayerNorm.weight")) + 0.1 * random_numbers.standard_normal(shape)).astype(
            np.float32
        )
        for name, shape in shapes(settings)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def shapes(settings: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of such a model for two classes, by transformers' names."""
    kind = settings["model_type"]

    def linear(name: str, inputs: int, outputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (outputs, inputs)
        yield f"{name}.bias", (outputs,)

    def norm(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.LayerNorm.weight", (WIDTH,)
        yield f"{name}.LayerNorm.bias", (WIDTH,)

    yield f"{kind}.embeddings.word_embeddings.weight", (settings["vocab_size"], WIDTH)
    yield f"{kind}.embeddings.position_embeddings.weight", (settings["max_position_embeddings"], WIDTH)
    yield f"{kind}.embeddings.token_type_embeddings.weight", (settings["type_vocab_size"], WIDTH)
    yield from norm(f"{kind}.embeddings")
    for index in range(LAYERS):
        layer = f"{kind}.encoder.layer.{index}"
        for part in ("query", "key", "value"):
            yield from linear(f"{layer}.attention.self.{part}", WIDTH, WIDTH)
        yield from linear(f"{layer}.attention.output.dense", WIDTH, WIDTH)
        yield from norm(f"{layer}.attention.output")
        yield from linear(f"{layer}.intermediate.dense", WIDTH, FF_WIDTH)
        yield from linear(f"{layer}.output.dense", FF_WIDTH, WIDTH)
        yield from norm(f"{layer}.output")
    yield from linear("classifier.dense" if kind == "roberta" else "bert.pooler.dense", WIDTH, WIDTH)
    yield from linear("classifier.out_proj" if kind == "roberta" else "classifier", WIDTH, 2)
