"""One process of the job: `python -m jobs.flax_mlm --steps 2000`, with the RUN_* variables set."""

from __future__ import annotations

from jobs.flax_mlm.config import Config
from jobs.runtime import process


def train(run: process.Run, config: Config) -> process.Final:
    # Imported when the group has formed: options are checked before JAX and Flax are loaded.
    from jobs.flax_mlm.train import train

    return train(run, config)


if __name__ == "__main__":
    process.main(Config, train)
