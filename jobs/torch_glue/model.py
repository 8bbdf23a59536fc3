"""The model: a RoBERTa or BERT of transformers with a head for the labels, from a folder or drawn; and its export."""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from contracts.run_directory import EXPORT, RunDirectory
from jobs.glue.answers import KEY, row_settings
from jobs.glue.data import Dataset
from jobs.glue.options import Options
from jobs.glue.pretrained import drawn_settings, fingerprint, open_pretrained
from jobs.glue.tokenizer import train_tokenizer
from jobs.runtime.storage.bucket_files import files_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beginning:
    """What training begins with. settings: transformers' configuration. weights: a folder; None: they are drawn.
    fingerprint: sha256 over all of it."""

    tokenizer: Any
    settings: Any
    weights: Path | None
    fingerprint: str


def prepare(config: Options, dataset: Dataset, cache_dir: Path, say: Callable[[str], None]) -> Beginning:
    """Open the folder of --init-from, or train a tokenizer.

    Raises:
        RequestError: there is no such folder, or its model is another kind of model than this job trains.
    """
    from transformers import AutoConfig, AutoTokenizer

    weights = None
    if config.init_from is None:
        settings, tokenizer = _drawn(config, dataset)
        digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    else:
        folder = open_pretrained(config, config.init_from, cache_dir, say)
        settings, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        weights = None if config.scratch else folder
        digest = fingerprint(folder, scratch=config.scratch)
    if config.dropout is not None:
        settings.hidden_dropout_prob = settings.attention_probs_dropout_prob = config.dropout
        settings.classifier_dropout = config.dropout
    names = dataset.labels or ("score",)
    settings.num_labels = len(names)
    settings.id2label = dict(enumerate(names))
    settings.label2id = {name: index for index, name in enumerate(names)}
    settings.problem_type = "regression" if dataset.task == "regression" else "single_label_classification"
    settings.tie_word_embeddings = False
    setattr(settings, KEY, row_settings(config, dataset))
    return Beginning(tokenizer=tokenizer, settings=settings, weights=weights, fingerprint=digest)


def _drawn(config: Options, dataset: Dataset) -> tuple[Any, Any]:
    """The configuration of a model of one of SIZES, and a byte-level BPE trained on the training rows."""
    from transformers import RobertaConfig, RobertaTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        train_tokenizer(dataset.train.texts, Path(folder))
        tokenizer = RobertaTokenizerFast.from_pretrained(folder)
    settings = RobertaConfig(**drawn_settings(config, len(tokenizer)))
    return settings, tokenizer


def build(beginning: Beginning, seed: int) -> torch.nn.Module:
    """The model in float32; what no folder has, its head among it, is drawn from the seed."""
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.set_verbosity_error()  # it would list the head that is new, as it has to be
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    if beginning.weights is None:
        model = AutoModelForSequenceClassification.from_config(
            beginning.settings, attn_implementation="sdpa", dtype=torch.float32
        )
    else:
        model = AutoModelForSequenceClassification.from_pretrained(
            beginning.weights, config=beginning.settings, attn_implementation="sdpa", dtype=torch.float32
        )
    module: torch.nn.Module = model
    return module


def export(directory: RunDirectory, model: Any, weights: dict[str, torch.Tensor], tokenizer: Any) -> None:
    """Write export/, which `AutoModelForSequenceClassification.from_pretrained` loads, label names included."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)
        to = directory.path(EXPORT)
        files_of(to).put_folder(folder, to)
