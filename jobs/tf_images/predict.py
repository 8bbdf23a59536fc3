"""The classes of pictures, by an exported model on a CPU: see `jobs.runtime.prediction`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from contracts.errors import RequestError
from jobs.runtime.prediction import Answer, Asked, Guess, main

BEST = 5


def predict(export: Path, _cache_dir: Path, asked: Asked) -> list[Answer]:
    """For each picture the most probable classes, best first.

    Raises:
        RequestError: pictures cannot be read, or the export has no model; all of them are named.
    """
    from jobs.tf_images.shards import encoded

    asked.refuse_second("a model that classifies pictures")
    wrong, pictures = [], []
    for path in asked.inputs:
        try:
            pictures.append(encoded(path)[0])
        except Exception as error:  # Pillow raises many kinds for what is no picture
            wrong.append(f"{path}: cannot be read as a picture ({error})")
    if wrong:
        raise RequestError("; ".join(wrong))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import numpy as np
    import tf_keras as keras

    from jobs.tf_images.input_pipeline import picture
    from jobs.tf_images.model import FACTS, KERAS

    try:
        facts = json.loads((export / FACTS).read_text())
        network = keras.models.load_model(str(export / KERAS), compile=False)
    except (OSError, ValueError) as error:
        raise RequestError(f"{export}: has no model of tf_images that can be loaded ({error})") from None
    found = []
    for path, data in zip(asked.inputs, pictures, strict=True):
        image_HWC = picture(data, facts["channels"], facts["size"], None)
        shares_K = network(image_HWC[None], training=False).numpy()[0]
        best = [
            Guess(text=facts["labels"][index], probability=float(shares_K[index]))
            for index in np.argsort(-shares_K, kind="stable")[:BEST]
        ]
        found.append(Answer(input=path, best=best))
    return found


if __name__ == "__main__":
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "CUDA_VISIBLE_DEVICES": ""}
    main(predict)
