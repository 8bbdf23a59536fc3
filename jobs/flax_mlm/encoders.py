"""Encoding with all cores: one process a core, asked in turn, so that answers come in the order of the batches.

Processes and not the library's own threads: making numbers of its answers holds Python's lock for 12 ms a million
characters, which take a core 216 ms to encode, and reading for 5: from some 13 cores on more of them would wait. One
process reads the corpus and writes the result, and hands text to the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import jobs
from jobs.flax_mlm import encode
from jobs.flax_mlm.batches import Batch
from jobs.flax_mlm.encode import Dtype, Encoded, Encoder

MOST_PROCESSES = 16
"""This one and two more held 80 MiB together (bench/tokenise.py, a vocabulary of 8,192), so all stay below 1 GB; by
the 5 ms a million characters that reading takes, one reader could feed about forty."""
BYTES_PER_PROCESS = 16 << 20
"""Text for less than this is encoded sooner than another process has started."""
PIPE_BYTES = 1 << 20
"""Room for a batch on its way to a process and for its answer: the largest that Linux gives everybody."""
END_LIMIT_S = 10.0


def processes_for(text_bytes: int, cores: int) -> int:
    """How many processes encode a corpus of `text_bytes`; 0: this one does it by itself."""
    count = min(cores, MOST_PROCESSES, text_bytes // BYTES_PER_PROCESS)
    return count if count > 1 else 0


def encoded(
    batches: Iterable[Batch], tokenizer: Path, dtype: Dtype, *, processes: int
) -> Iterator[tuple[Batch, Encoded]]:
    """Each batch with its tokens, in order. An error of `batches` is raised when those before it have come.

    Raises:
        RuntimeError: one of the processes ended.
    """
    if processes == 0:
        encoder = Encoder(tokenizer, dtype)
        return ((batch, encoder.encode(batch)) for batch in batches)
    return _by_processes(batches, tokenizer, dtype, processes)


def _by_processes(
    batches: Iterable[Batch], tokenizer: Path, dtype: Dtype, count: int
) -> Iterator[tuple[Batch, Encoded]]:
    # Bounded by the pipes: whoever asks waits until a process has taken its last batch but one.
    asked: queue.SimpleQueue[Batch | BaseException | None] = queue.SimpleQueue()
    workers = [_start(tokenizer, dtype) for _ in range(count)]
    asking = threading.Thread(
        target=_ask, args=(batches, workers, asked), name="read the corpus", daemon=True
    )
    asking.start()
    try:
        number = 0
        while (next_one := asked.get()) is not None:
            if isinstance(next_one, BaseException):
                raise next_one
            yield next_one, _answer(workers[number % count])
            number += 1
    finally:
        _end(workers)
        asking.join(END_LIMIT_S)


def _ask(
    batches: Iterable[Batch],
    workers: list[subprocess.Popen[bytes]],
    asked: queue.SimpleQueue[Batch | BaseException | None],
) -> None:
    try:
        for number, batch in enumerate(batches):
            asked.put(batch)  # first, so that whoever waits for its answer sees the end of a process
            pipe = workers[number % len(workers)].stdin
            assert pipe is not None
            pipe.write(encode.question(batch))
            pipe.flush()
        asked.put(None)
    except BaseException as error:  # raised again by who reads the answers
        asked.put(error)


def _start(tokenizer: Path, dtype: Dtype) -> subprocess.Popen[bytes]:
    found = [str(Path(jobs.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(found),
        "TOKENIZERS_PARALLELISM": "false",
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", encode.__name__, str(tokenizer.absolute()), dtype],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environ,
    )
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # the system's limit is reached: slower, and right all the same
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return process


def _answer(worker: subprocess.Popen[bytes]) -> Encoded:
    assert worker.stdout is not None
    try:
        return encode.read_answer(worker.stdout)
    except EOFError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(END_LIMIT_S)
        raise RuntimeError(
            f"a process that tokenises ended with {worker.returncode} (-9: the memory is full, or somebody killed "
            "it); what is done is kept: start the run again"
        ) from None


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        worker.kill()  # it holds nothing that could be lost
    for worker in workers:
        worker.wait(END_LIMIT_S)
        for pipe in (worker.stdin, worker.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what had not gone out has nobody to go to
                pipe.close()
