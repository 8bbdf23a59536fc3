from jobs.jax_hello import config, train
from jobs.runtime import process

if __name__ == "__main__":
    process.main(config.Config, train.train)
