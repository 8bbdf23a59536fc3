"""What training begins with, without a framework: the folder of --init-from, or a tokenizer and settings of a new
model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from contracts.errors import RequestError, noted_in
from jobs.glue import data
from jobs.glue.data import Dataset
from jobs.glue.options import SIZES, Options
from jobs.glue.tokenizer import open_tokenizer, train_tokenizer, vocabulary_size
from jobs.runtime.storage.cache import build_once
from jobs.runtime.storage.model_folder import (
    BYTE_LEVEL,
    CONFIG,
    PARTS,
    TOKENIZER,
    WEIGHTS,
    WORDPIECES,
    open_folder,
    read_config,
)

ARCHITECTURES = {"roberta": "RobertaForSequenceClassification", "bert": "BertForSequenceClassification"}
KEY = "tpu_stack"
"""In an export's config.json, beside what transformers reads of it: how the rows were made that it has learned from."""
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beginning:
    """What training begins with. settings: config.json. tokenizer, weights: folders; no weights: they are drawn.
    fingerprint: sha256 over all of it."""

    settings: Mapping[str, Any]
    tokenizer: Path
    weights: Path | None
    fingerprint: str


type Computes = Mapping[str, Collection[str]]
"""Of names in config.json, the values that a job computes; a name that is left out there means one of these."""
ALL: Computes = {}
"""Of a job that computes whatever transformers does."""
SIZE_NAMES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("max_position_embeddings", "type_vocab_size"),
)


def problems(options: Options, cache_dir: Path, computes: Computes = ALL) -> list[str]:
    """What is wrong with the data, and with the model of --init-from; called before anything is started.

    Raises:
        Unreachable: a place does not answer now.
    """
    messages = data.problems(options)
    if options.init_from is not None:
        with noted_in(messages):
            open_pretrained(options, options.init_from, cache_dir, lambda _: None, computes)
    return messages


def prepare(
    config: Options, dataset: Dataset, cache_dir: Path, say: Callable[[str], None], computes: Computes = ALL
) -> Beginning:
    """Open the folder of --init-from, or train a tokenizer.

    Raises:
        RequestError: as `open_pretrained`.
    """
    if config.init_from is None:
        folder = cache_dir / "glue" / f"tokenizer-{dataset.fingerprint[:32]}"
        build_once(folder, lambda temporary: train_tokenizer(dataset.train.texts, temporary), say=say)
        settings = drawn_settings(config.model, open_tokenizer(folder).get_vocab_size(), config.max_length)
    else:
        folder = open_pretrained(config, config.init_from, cache_dir, say, computes)
        settings = read_settings(folder)
    if config.dropout is not None:
        settings |= dict.fromkeys(DROPOUTS, config.dropout)
    names = dataset.labels or ("score",)
    settings |= {
        "architectures": [ARCHITECTURES[settings["model_type"]]],
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
        "problem_type": "regression" if dataset.task == "regression" else "single_label_classification",
        "tie_word_embeddings": False,
        "dtype": "float32",
        "torch_dtype": "float32",
        KEY: {"pairs": bool(dataset.train.texts_b), "max_length": config.max_length},
    }
    is_drawn = config.init_from is None or config.scratch
    return Beginning(
        settings=settings,
        tokenizer=folder,
        weights=None if is_drawn else folder,
        fingerprint=fingerprint(folder, scratch=is_drawn),
    )


class Limited(Protocol):
    """Options that say how long a row may be."""

    @property
    def max_length(self) -> int: ...


def open_pretrained(
    options: Limited, source: str, cache_dir: Path, say: Callable[[str], None], computes: Computes = ALL
) -> Path:
    """The folder of a model that this job can go on with. computes: where it does not compute all that there is.

    Raises:
        RequestError: there is no such folder, it lacks a file, its model is of another kind, or has too few positions
            or tokens.
    """
    folder = open_folder(source, cache_dir, say, (*BYTE_LEVEL, (WORDPIECES,)))
    settings = read_config(source, folder)
    kind = settings.get("model_type")
    if kind not in ARCHITECTURES:
        named = ", ".join(map(str, settings.get("architectures") or [])) or "nothing"
        raise RequestError(
            f"--init-from {source}: {CONFIG} names {named}, of the type {kind}; choose a model of the type "
            f"{' or '.join(ARCHITECTURES)}"
        )
    wrong = [
        f"{name} is {settings[name]!r}; choose a model with {', '.join(values)}"
        for name, values in computes.items()
        if name in settings and settings[name] not in values
    ]
    wrong += [
        f"{CONFIG} has {name} {settings.get(name)!r:.40}, which is no size; mend it"
        for name in SIZE_NAMES
        if (name in settings or name == "vocab_size") and not _is_size(settings.get(name))
    ]
    if wrong:
        raise RequestError(f"--init-from {source}: {'; '.join(wrong)}")
    longest = positions(settings)
    if options.max_length > longest:
        raise RequestError(
            f"--max-length {options.max_length}: the model has {longest} positions; choose at most {longest}"
        )
    tokens = vocabulary_size(folder)
    if tokens > settings["vocab_size"]:
        raise RequestError(
            f"--init-from {source}: its tokenizer has {tokens:,} tokens and its model {settings['vocab_size']:,}; the "
            "two are not of one model"
        )
    return folder


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def read_settings(folder: Path) -> dict[str, Any]:
    """A folder's config.json, with the id of the padding token that it means where it names none."""
    settings = json.loads((folder / CONFIG).read_bytes())
    return {"pad_token_id": 1 if settings["model_type"] == "roberta" else 0, **settings}


def positions(settings: dict[str, Any]) -> int:
    """The longest sequence that a configuration allows: RoBERTa counts from the padding token's id + 1 on."""
    offset = int(settings.get("pad_token_id", 1)) + 1 if settings["model_type"] == "roberta" else 0
    return int(settings.get("max_position_embeddings", 512)) - offset


def fingerprint(folder: Path, *, scratch: bool) -> str:
    """A sha256 over the configuration, the tokenizer and, but for `scratch`, the weights."""
    digest = hashlib.sha256()
    tokenizer = (TOKENIZER,) if (folder / TOKENIZER).exists() else PARTS
    for name in (CONFIG, *tokenizer, WORDPIECES, *(() if scratch else (WEIGHTS,))):
        if (folder / name).exists():
            with (folder / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def drawn_settings(model: str, vocab_size: int, max_length: int) -> dict[str, Any]:
    """The config.json of a RoBERTa of one of SIZES, for a tokenizer that was trained here."""
    size = SIZES[model]
    return {
        "model_type": "roberta",
        "vocab_size": vocab_size,
        "hidden_size": size["width"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "intermediate_size": size["ff_width"],
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": max(512, max_length) + 2,
        "type_vocab_size": 1,
        # 0.02 is for RoBERTa-base; a narrower model needs more.
        "initializer_range": 0.02 * math.sqrt(SIZES["base"]["width"] / size["width"]),
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
    }
