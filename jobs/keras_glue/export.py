"""What training begins with, and the folder that it leaves: both in Hugging Face's layout, and for Keras a `.keras`."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
from safetensors.numpy import save_file

from contracts.errors import RequestError
from contracts.run_directory import EXPORT, RunDirectory
from jobs.glue.answers import KEY, row_settings
from jobs.glue.data import Dataset
from jobs.glue.pretrained import drawn_settings, fingerprint, open_pretrained, read_settings
from jobs.glue.tokenizer import open_tokenizer, train_tokenizer
from jobs.keras_glue import model
from jobs.keras_glue.config import Config, unfit
from jobs.runtime.storage.bucket_files import files_of
from jobs.runtime.storage.cache import build_once
from jobs.runtime.storage.model_folder import ADDED, CONFIG, PARTS, SETTINGS, TOKENIZER, WEIGHTS, WORDPIECES

ARCHITECTURES = {"roberta": "RobertaForSequenceClassification", "bert": "BertForSequenceClassification"}
KERAS = "model.keras"
TOKENIZERS = (TOKENIZER, *PARTS, WORDPIECES, SETTINGS, ADDED, "special_tokens_map.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beginning:
    """What training begins with. settings: config.json. tokenizer, weights: folders; no weights: they are drawn.
    fingerprint: sha256 over all of it."""

    settings: Mapping[str, Any]
    tokenizer: Path
    weights: Path | None
    fingerprint: str


def prepare(config: Config, dataset: Dataset, cache_dir: Path, say: Callable[[str], None]) -> Beginning:
    """Open the folder of --init-from, or train a tokenizer.

    Raises:
        RequestError: there is no such folder, or its model is not one that this job trains.
    """
    if config.init_from is None:
        folder = cache_dir / "keras_glue" / f"tokenizer-{dataset.fingerprint[:32]}"
        build_once(folder, lambda temporary: train_tokenizer(dataset.train.texts, temporary), say=say)
        tokens = open_tokenizer(folder).get_vocab_size()
        settings: dict[str, Any] = {"model_type": "roberta", **drawn_settings(config, tokens)}
    else:
        folder = open_pretrained(config, config.init_from, cache_dir, say)
        settings = read_settings(folder)
        if unfit(settings):
            raise RequestError(f"--init-from {config.init_from}: {'; '.join(unfit(settings))}")
    if config.dropout is not None:
        shares = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
        settings |= dict.fromkeys(shares, config.dropout)
    names = dataset.labels or ("score",)
    settings |= {
        "architectures": [ARCHITECTURES[settings["model_type"]]],
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
        "problem_type": "regression" if dataset.task == "regression" else "single_label_classification",
        "tie_word_embeddings": False,
        "dtype": "float32",
        "torch_dtype": "float32",
        KEY: row_settings(config, dataset),
    }
    is_drawn = config.init_from is None or config.scratch
    return Beginning(
        settings=settings,
        tokenizer=folder,
        weights=None if is_drawn else folder,
        fingerprint=fingerprint(folder, scratch=is_drawn),
    )


def write(directory: RunDirectory, trained: keras.Model, beginning: Beginning) -> None:
    """Write export/, which `AutoModelForSequenceClassification.from_pretrained` and `keras.saving.load_model` load."""
    keras.distribution.set_distribution(None)  # this process writes it alone
    keras.config.set_dtype_policy("float32")
    complete = model.build(beginning.settings)
    for own, theirs in zip(complete.weights, trained.weights, strict=True):
        own.assign(np.asarray(theirs.value))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        (out / CONFIG).write_text(
            json.dumps(beginning.settings, indent=2, ensure_ascii=False) + "\n", "utf-8"
        )
        save_file(model.tensors(complete, beginning.settings), out / WEIGHTS, metadata={"format": "pt"})
        for name in TOKENIZERS:
            if (beginning.tokenizer / name).exists():
                shutil.copyfile(beginning.tokenizer / name, out / name)
        complete.save(out / KERAS)
        to = directory.path(EXPORT)
        files_of(to).put_folder(folder, to)
