"""What training begins with, and the folder that it leaves: both in Hugging Face's layout, and for Keras a `.keras`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
from safetensors.numpy import save_file

from contracts.run_directory import EXPORT, RunDirectory
from jobs.glue import pretrained
from jobs.glue.data import Dataset
from jobs.glue.pretrained import Beginning
from jobs.glue.tokenizer import copy_tokenizer
from jobs.keras_glue import model
from jobs.keras_glue.config import COMPUTES, Config
from jobs.runtime.storage.bucket_files import files_of
from jobs.runtime.storage.model_folder import CONFIG, WEIGHTS

KERAS = "model.keras"


def prepare(config: Config, dataset: Dataset, cache_dir: Path, say: Callable[[str], None]) -> Beginning:
    """As `jobs.glue.pretrained.prepare`; raises RequestError also for a model that this job does not compute."""
    return pretrained.prepare(config, dataset, cache_dir, say, COMPUTES)


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
        copy_tokenizer(beginning.tokenizer, out)
        complete.save(out / KERAS)
        to = directory.path(EXPORT)
        files_of(to).put_folder(folder, to)
