"""The classes of pictures, by an exported model: see `jobs.runtime.prediction`."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import RequestError
from jobs.runtime.prediction import PICTURE, Answer, Encoded, Guess, Row, refuse_second

BEST = 5
MOST_PIXELS = 50_000_000
"""Of a picture: in memory, one takes 15 bytes for each."""


class PictureClassifier:
    """Tells the most probable classes of a picture."""

    task, takes, longest = "image-classification", PICTURE, 1

    def __init__(self, export: Path) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        import tensorflow as tf
        import tf_keras as keras

        from jobs.tf_images.model import FACTS, KERAS

        try:
            self._facts = json.loads((export / FACTS).read_text())
            network = keras.models.load_model(str(export / KERAS), compile=False)
        except (OSError, ValueError) as error:
            raise RequestError(f"{export}: has no model of tf_images that can be loaded ({error})") from None
        size, channels = self._facts["size"], self._facts["channels"]
        signature = tf.TensorSpec((None, size, size, channels), tf.uint8)
        self._network = tf.function(
            lambda images: network(images, training=False), input_signature=[signature]
        )

    @property
    def example(self) -> tuple[bytes, None]:
        from PIL import Image

        file = io.BytesIO()
        Image.new("RGB", (self._facts["size"],) * 2, "grey").save(file, "PNG")
        return file.getvalue(), None

    def encode(self, value: str | bytes, second: str | None) -> Encoded:
        """As `Predictor` has it. Raises RequestError: it is no picture, or too large a one."""
        from PIL import Image, UnidentifiedImageError

        from jobs.tf_images.input_pipeline import picture
        from jobs.tf_images.shards import encoded

        refuse_second(second, "a model that classifies pictures")
        assert isinstance(value, bytes)
        try:
            width, height = Image.open(io.BytesIO(value)).size
            pixels = width * height
            data = encoded(value)[0] if pixels <= MOST_PIXELS else b""
        except UnidentifiedImageError:
            raise RequestError("is no picture of a kind that is known, such as JPEG or PNG") from None
        except Exception as error:  # Pillow raises many kinds for a picture that is damaged
            raise RequestError(f"cannot be read as a picture ({error})") from None
        if pixels > MOST_PIXELS:
            raise RequestError(
                f"has {pixels:,} pixels, and at most {MOST_PIXELS:,} are read; make it smaller"
            )
        image_HWC = picture(data, self._facts["channels"], self._facts["size"], None).numpy()
        return Encoded(rows=[Row(length=1, values=image_HWC)], answers=self._answers)

    def compute(self, rows: Sequence[Row], size: int, _length: int) -> list[Any]:
        images_BHWC = np.stack([row.values for row in rows])
        unfilled = np.zeros((size - len(rows), *images_BHWC.shape[1:]), np.uint8)
        return list(self._network(np.concatenate([images_BHWC, unfilled])).numpy())[: len(rows)]

    def _answers(self, outputs: Sequence[Any]) -> list[Answer]:
        labels = self._facts["labels"]
        return [
            Answer(
                best=[
                    Guess(text=labels[index], probability=float(shares_K[index]))
                    for index in np.argsort(-shares_K, kind="stable")[:BEST]
                ]
            )
            for shares_K in outputs
        ]


def load(export: Path, _cache_dir: Path) -> PictureClassifier:
    """The predictor of an export. Raises RequestError: it has no model."""
    return PictureClassifier(export)
