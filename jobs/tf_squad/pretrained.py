"""Checks of the folder of --init-from; without TensorFlow, as they run before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from contracts.errors import RequestError
from jobs.glue import pretrained
from jobs.runtime.storage.model_folder import CONFIG
from jobs.tf_squad.config import Config

TAKEN = {"model_type": "roberta", "hidden_act": "gelu", "position_embedding_type": "absolute"}
"""What a config.json has to say where it says anything of these."""


def open_pretrained(config: Config, source: str, cache_dir: Path, say: Callable[[str], None]) -> Path:
    """The folder of a RoBERTa.

    Raises:
        RequestError: there is no such folder, it lacks a file, its model is of another kind, or has too few positions.
    """
    folder = pretrained.open_pretrained(config, source, cache_dir, say)
    model_config = json.loads((folder / CONFIG).read_bytes())
    wrong = [
        f"{name} {model_config[name]!r}"
        for name, taken in TAKEN.items()
        if model_config.get(name, taken) != taken
    ]
    if wrong:
        raise RequestError(
            f"--init-from {source}: {CONFIG} has {', '.join(wrong)}; this job takes "
            f"{', '.join(f'{name} {taken!r}' for name, taken in TAKEN.items())}"
        )
    return folder
