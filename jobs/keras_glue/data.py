"""The rows of keras_glue are those of jobs/glue."""

from __future__ import annotations

from pathlib import Path

from jobs.glue import pretrained
from jobs.keras_glue.config import COMPUTES, Config


def problems(config: Config, cache_dir: Path) -> list[str]:
    """What is wrong with the data, and with the model of --init-from; called before anything is started."""
    return pretrained.problems(config, cache_dir, COMPUTES)
