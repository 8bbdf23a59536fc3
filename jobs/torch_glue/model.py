"""The model: a RoBERTa or BERT of transformers with a head for the labels, from a folder or drawn; and its export."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from contracts.run_directory import EXPORT, RunDirectory
from jobs.glue.pretrained import Beginning
from jobs.glue.tokenizer import copy_tokenizer
from jobs.runtime.storage.bucket_files import files_of


def build(beginning: Beginning, seed: int) -> torch.nn.Module:
    """The model in float32; what no folder has, its head among it, is drawn from the seed."""
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.set_verbosity_error()  # it would list the head that is new, as it has to be
    logging.disable_progress_bar()
    settings = AutoConfig.for_model(**beginning.settings)
    torch.manual_seed(seed)
    if beginning.weights is None:
        model = AutoModelForSequenceClassification.from_config(
            settings, attn_implementation="sdpa", dtype=torch.float32
        )
    else:
        model = AutoModelForSequenceClassification.from_pretrained(
            beginning.weights, config=settings, attn_implementation="sdpa", dtype=torch.float32
        )
    module: torch.nn.Module = model
    return module


def export(
    directory: RunDirectory, model: Any, weights: dict[str, torch.Tensor], beginning: Beginning
) -> None:
    """Write export/, which `AutoModelForSequenceClassification.from_pretrained` loads, label names included."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict=weights)
        copy_tokenizer(beginning.tokenizer, Path(folder))
        to = directory.path(EXPORT)
        files_of(to).put_folder(folder, to)
