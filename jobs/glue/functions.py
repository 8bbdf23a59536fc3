"""Text for pre-training before the default task is learned: `python -m jobs.glue.functions FILE.jsonl`.

It holds the functions that the task trains on, each below its own docstring. None is of a module that is held out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jobs.glue import data
from jobs.glue.docstrings import LABELS
from jobs.glue.options import Options


def main(path: str) -> None:
    rows = data.read(Options()).train
    own = [
        f"{docstring}\n{source}"
        for docstring, source, label in zip(rows.texts_a, rows.texts_b, rows.labels, strict=True)
        if LABELS[int(label)] == "belongs"
    ]
    Path(path).write_text("".join(json.dumps({"text": text}) + "\n" for text in own), encoding="utf-8")
    print(f"{path}: {len(own):,} functions")


if __name__ == "__main__":
    main(sys.argv[1])
