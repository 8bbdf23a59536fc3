"""One process of the job: `python -m jobs.tf_squad --epochs 3`, with the RUN_* variables set."""

from jobs.runtime import process
from jobs.tf_squad.config import Config

if __name__ == "__main__":
    process.main(Config, process.import_train("jobs.tf_squad.train"))
