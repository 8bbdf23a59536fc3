"""The rows of keras_glue are those of jobs/glue."""

from __future__ import annotations

from pathlib import Path

from jobs.glue import pretrained
from jobs.glue.pretrained import open_pretrained, read_settings
from jobs.keras_glue.config import Config, unfit


def problems(config: Config, cache_dir: Path) -> list[str]:
    """What is wrong with the data, and with the model of --init-from; called before anything is started."""
    messages = pretrained.problems(config, cache_dir)
    if not messages and config.init_from is not None:
        folder = open_pretrained(config, config.init_from, cache_dir, lambda _: None)
        messages += [f"--init-from {config.init_from}: {message}" for message in unfit(read_settings(folder))]
    return messages
