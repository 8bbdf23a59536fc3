"""What an exported model says of texts or pairs: the program that `fab predict` runs (`jobs.runtime.prediction`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jobs.glue import answers
from jobs.glue.batches import Batch
from jobs.runtime.prediction import Answer, Asked, main


def load(export: Path) -> Callable[[Batch], np.ndarray[Any, Any]]:
    """The model of an export, on the CPU in float32."""
    os.environ |= {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}  # which are read once, by the imports
    from jobs.glue.pretrained import settings_of
    from jobs.keras_glue import model

    settings = settings_of(export)
    whole = model.build(settings)
    model.load(whole, settings, str(export), export)

    def logits(batch: Batch) -> np.ndarray[Any, Any]:
        return np.asarray(whole(model.inputs_of(batch, settings), training=False))

    return logits


def predict(export: Path, _cache_dir: Path, asked: Asked) -> list[Answer]:
    return answers.answer(export, asked, load)


if __name__ == "__main__":
    main(predict)
