from jobs.runtime import process
from jobs.serve import config, serve

if __name__ == "__main__":
    process.main(config.Config, serve.serve)
