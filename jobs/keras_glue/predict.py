"""Answers of an exported model to texts or pairs: see `jobs.runtime.prediction`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from jobs.glue.classifier import Batch, Classifier


def load(export: Path, _cache_dir: Path) -> Classifier:
    """The predictor of an export, in float32."""
    os.environ["KERAS_BACKEND"] = "jax"  # which is read once, by the import
    import jax

    from jobs.glue.pretrained import read_settings
    from jobs.keras_glue import model

    settings = read_settings(export)
    network = model.build(settings)
    model.load(network, settings, str(export), export)
    variables = [
        [variable.value for variable in kind]
        for kind in (network.trainable_variables, network.non_trainable_variables)
    ]

    @jax.jit
    def compute(trained: Any, fixed: Any, inputs: Any) -> Any:
        return network.stateless_call(trained, fixed, inputs, training=False)[0]

    def logits(batch: Batch) -> np.ndarray[Any, Any]:
        return np.asarray(compute(*variables, model.model_inputs(batch, settings)))

    return Classifier(export, logits)
