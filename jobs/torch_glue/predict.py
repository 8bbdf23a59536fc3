"""What an exported model says of texts or pairs: see `jobs.runtime.prediction`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from jobs.glue.classifier import Batch, Classifier


def load(export: Path, _cache_dir: Path) -> Classifier:
    """The predictor of an export, in float32."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(export, dtype=torch.float32).eval()

    def logits(batch: Batch) -> np.ndarray[Any, Any]:
        types = (
            {"token_type_ids": torch.from_numpy(batch.types_BS)} if model.config.type_vocab_size > 1 else {}
        )
        with torch.inference_mode():
            outputs = model(
                input_ids=torch.from_numpy(batch.ids_BS),
                attention_mask=torch.from_numpy(batch.mask_BS),
                **types,
            )
        logits_BC: np.ndarray[Any, Any] = outputs.logits.numpy()
        return logits_BC

    return Classifier(export, logits)
