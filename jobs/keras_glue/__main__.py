"""One process of the job: `python -m jobs.keras_glue --epochs 3`, with the RUN_* variables set."""

import os

from jobs.keras_glue.config import Config
from jobs.runtime import process

if __name__ == "__main__":
    os.environ["KERAS_BACKEND"] = "jax"  # which Keras reads once, when it is imported
    process.main(Config, process.import_train("jobs.keras_glue.train"))
