"""One process of the job: `python -m jobs.flax_mlm --steps 2000`, with the RUN_* variables set."""

from jobs.flax_mlm.config import Config
from jobs.runtime import process

if __name__ == "__main__":
    process.main(Config, process.import_train("jobs.flax_mlm.train"))
