"""A run as whoever resumes it finds it, and what of its metrics does not depend on the clock."""

import json
import shutil
from pathlib import Path
from typing import Any

from jobs.runtime.process import Run


def go_back(whole: Run, run: Run, step: int, *, is_evaluated: bool = False) -> None:
    """Give `run` what `whole` had saved and written down after `step`. is_evaluated: the evaluation after it too."""
    for saved in Path(whole.directory.path("checkpoints")).iterdir():
        if int(saved.name) <= step:
            shutil.copytree(saved, run.directory.path(f"checkpoints/{saved.name}"))
    lines = [line for line in whole.directory.read_metrics() if line["step"] <= step]
    kept = [line for line in lines if line["step"] < step or is_evaluated or "loss" in line]
    run.directory.write_text("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))


def lines_of(run: Run) -> list[dict[str, Any]]:
    names = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "eval_score", "accuracy", "f1")
    return [{name: line[name] for name in names if name in line} for line in run.directory.read_metrics()]
