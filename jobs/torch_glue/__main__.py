"""One process of the job: `python -m jobs.torch_glue --epochs 3`, with the RUN_* variables set."""

from jobs.runtime import process
from jobs.torch_glue.config import Config

if __name__ == "__main__":
    process.main(Config, process.import_train("jobs.torch_glue.train"))
