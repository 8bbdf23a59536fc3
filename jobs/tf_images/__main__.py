"""One process of the job: `python -m jobs.tf_images --epochs 3`, with the RUN_* variables set."""

from __future__ import annotations

from jobs.runtime import process
from jobs.tf_images.config import Config


def train(run: process.Run, config: Config) -> process.Final:
    # Imported when the group has formed: options are checked before TensorFlow is loaded.
    from jobs.tf_images.train import train

    return train(run, config)


if __name__ == "__main__":
    process.main(Config, train)
