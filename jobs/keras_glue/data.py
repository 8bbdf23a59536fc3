"""The rows of keras_glue are those of jobs/glue."""

from __future__ import annotations

from pathlib import Path

from jobs.glue import data
from jobs.glue.pretrained import open_pretrained, settings_of
from jobs.keras_glue.config import Config, unfit


def problems(config: Config, cache_dir: Path) -> list[str]:
    """What is wrong with the data, and with the model of --init-from; called before anything is started."""
    found = data.problems(config, cache_dir)
    if not found and config.init_from is not None:
        folder = open_pretrained(config, config.init_from, cache_dir, lambda _: None)
        found += [f"--init-from {config.init_from}: {each}" for each in unfit(settings_of(folder))]
    return found
