"""The server as a job: from the export to its last answer."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

from contracts.errors import JobFailed, RequestError
from contracts.run_directory import SERVING
from jobs.runtime import prediction, preemption, process
from jobs.runtime.prediction import Predictor
from jobs.serve.config import Config
from jobs.serve.data import local_copy
from jobs.serve.server import Server, batch_shapes, warm

LOOK_S = 0.5
STUCK_S = 5.0
"""A batch that takes longer than this is no progress; the hang limit counts from then on."""


def load(config: Config, cache_dir: str) -> Predictor:
    """Load the export that the options name.

    Raises:
        RequestError: it does not exist, or is not an export of the job.
    """
    folder = local_copy(config, Path(cache_dir))
    try:
        return prediction.load(config.job, folder, Path(cache_dir))
    except ModuleNotFoundError as error:
        raise RequestError(f"--job {config.job}: cannot be served here ({error})") from None


def serve(run: process.Run, config: Config) -> process.Final:
    """Serve until SIGTERM, which ends what is under way first."""
    run.prepare("loading the model")
    predictor = load(config, run.environment.cache_dir)
    shapes = batch_shapes(config, predictor)
    run.prepare(f"compiling for {len(shapes.all)} shapes of batches")
    warm(predictor, shapes, run.heartbeat.tick)
    stopped = threading.Event()
    preemption.watch.claim()  # from here on SIGTERM is answered here, and nothing is to be saved
    signal.signal(signal.SIGTERM, lambda _number, _frame: stopped.set())
    token = None if config.token_file is None else read_token(config.token_file)
    server = Server(predictor, config, shapes, name=config.run, token=token)
    address, port = server.start()
    example, second = predictor.example
    run.directory.write_json(
        SERVING,
        {
            "address": address,
            "port": port,
            "task": predictor.task,
            "takes": predictor.takes,
            "example": {"inputs": [example], **({"second": second} if second else {})}
            if isinstance(example, str)
            else None,
        },
    )
    run.heartbeat.hangs_at_floor = True
    run.heartbeat.say(None)
    run.say(f"serving {config.run} ({predictor.task}) on {address}:{port}")
    figures = server.figures
    while not stopped.wait(LOOK_S):
        if (failure := server.failure) is not None:
            raise JobFailed(failure)
        if server.stuck_s < STUCK_S:
            run.heartbeat.step(max(1, figures.requests))
    run.say("stopping: what is under way is answered first")
    server.stop()
    run.say(
        f"answered {figures.requests:,} requests with {figures.rows:,} rows in {figures.batches:,} batches"
    )
    return {
        "steps": figures.requests,
        "requests": figures.requests,
        "rows": figures.rows,
        "batches": figures.batches,
    }


def read_token(path: str) -> str:
    """Return the token in a file: its last word, which may stand behind a header's name.

    Raises:
        RequestError: there is none.
    """
    try:
        token = (Path(path).read_text().split() or [""])[-1]
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--token-file {path}: cannot be read ({error})") from None
    if len(token) < 16 or not token.isascii() or not token.isprintable():
        raise RequestError(f"--token-file {path}: must hold a token of 16 ASCII characters or more")
    return token
