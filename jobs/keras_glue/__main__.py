"""One process of the job: `python -m jobs.keras_glue --epochs 3`, with the RUN_* variables set."""

from __future__ import annotations

import os

from jobs.keras_glue.config import Config
from jobs.runtime import process


def train(run: process.Run, config: Config) -> process.Final:
    os.environ["KERAS_BACKEND"] = "jax"  # which Keras reads once, when it is imported
    # Imported when the group has formed: options are checked before JAX and Keras are loaded.
    from jobs.keras_glue.train import train

    return train(run, config)


if __name__ == "__main__":
    process.main(Config, train)
