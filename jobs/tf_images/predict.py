"""The classes of pictures, by a run's export: `python -P -m jobs.tf_images.predict EXPORT CACHE_DIR`.

Reads a JSON object with `inputs`, paths of pictures, on stdin; writes one with `answers` to stdout.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from contracts.errors import DONE, WRONG_REQUEST, RequestError

BEST = 5


def answers(export: str, inputs: list[str], second: str | None) -> list[dict[str, Any]]:
    """For each picture the most probable classes, best first.

    Raises:
        RequestError: pictures cannot be read, or the export has no model; all of them are named.
    """
    from jobs.tf_images.shards import encoded

    wrong, pictures = [], []
    if second is not None:
        wrong.append("--second: is for jobs on pairs of texts; a picture stands alone")
    for path in inputs:
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
        facts = json.loads(Path(export, FACTS).read_text())
        network = keras.models.load_model(str(Path(export, KERAS)), compile=False)
    except (OSError, ValueError) as error:
        raise RequestError(f"{export}: has no model of tf_images that can be loaded ({error})") from None
    found = []
    for path, data in zip(inputs, pictures, strict=True):
        image_HWC = picture(data, facts["channels"], facts["size"], None)
        probabilities_K = network(image_HWC[None], training=False).numpy()[0]
        best = [
            {"text": facts["labels"][index], "probability": float(probabilities_K[index])}
            for index in np.argsort(-probabilities_K, kind="stable")[:BEST]
        ]
        found.append({"input": path, "heading": path, "best": best})
    return found


def main() -> int:
    asked = json.load(sys.stdin)
    try:
        found = answers(sys.argv[1], asked["inputs"], asked.get("second"))
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return WRONG_REQUEST
    print(json.dumps({"answers": found}))
    return DONE


if __name__ == "__main__":
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "CUDA_VISIBLE_DEVICES": ""}
    sys.exit(main())
