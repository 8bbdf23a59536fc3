"""How a command gets to a host: one interface, here for this machine's own processes; `launch.ssh` has the other."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import selectors
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Literal, Protocol

from launch.beside import beside

Stream = Literal["out", "err"]
Show = Callable[[Stream, bytes], None]
"""Is handed a command's output in pieces, as it comes. It may block: what is not taken is not read from the host."""

PIECE_BYTES = 64 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completed:
    """What a command came to. `exit_code` is None where it did not end in time, -N where signal N killed it."""

    exit_code: int | None
    stdout: str
    stderr: str


class Transport(Protocol):
    """One host, as a launcher sees it. Arguments are lists; quoting is the transport's own business.

    Every call may raise, or its Future may hold, OSError or `launch.errors.HostError`: the host cannot be reached,
    or has no such command or file.
    """

    def begin(self, argv: Sequence[str], stdin: str, *, timeout_s: float) -> Future[Completed]:
        """Start a command and come back at once. The output is kept in memory: for short answers."""
        ...

    def stream(self, argv: Sequence[str], show: Show, *, timeout_s: float | None) -> Future[int | None]:
        """Start a command and hand out its output as it comes; the exit code (None: its time was over).

        Cancelling the Future ends the command on the host.
        """
        ...

    def put(self, source: Path, target: str) -> None:
        """Copy a file or a folder with all that is in it to `target` on the host, under a new name first."""
        ...

    def get(self, source: str, target: Path) -> None:
        """Copy a file or a folder of the host to `target` on this machine."""
        ...


@dataclasses.dataclass(frozen=True)
class LocalTransport:
    """This machine as a host: a command is a process of its own, apart from the launcher's terminal."""

    def begin(self, argv: Sequence[str], stdin: str, *, timeout_s: float) -> Future[Completed]:
        def run() -> Completed:
            process = _LocalProcess(argv, subprocess.PIPE if stdin else subprocess.DEVNULL)
            try:
                said = process.popen.communicate(stdin.encode() if stdin else None, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                said, code = (b"", f"not done within {timeout_s:g} s".encode()), None
            else:
                code = process.popen.returncode
            finally:
                process.end()
                process.close()
            stdout, stderr = (text.decode(errors="replace") for text in said)
            return Completed(exit_code=code, stdout=stdout, stderr=stderr)

        future: Future[Completed] = Future()
        threading.Thread(target=_carry_out, args=(run, future), daemon=True).start()
        return future

    def stream(self, argv: Sequence[str], show: Show, *, timeout_s: float | None) -> Future[int | None]:
        future: Future[int | None] = Future()
        try:
            process = _LocalProcess(argv, subprocess.DEVNULL)
        except OSError as error:
            future.set_exception(error)
            return future
        future.add_done_callback(lambda done: process.end() if done.cancelled() else None)
        follow = functools.partial(process.follow, show, timeout_s)
        threading.Thread(target=_carry_out, args=(follow, future), daemon=True).start()
        return future

    def put(self, source: Path, target: str) -> None:
        _copy(source, Path(target).expanduser())

    def get(self, source: str, target: Path) -> None:
        _copy(Path(source).expanduser(), target)


class _LocalProcess:
    """A process and what it started, in a session of their own."""

    def __init__(self, argv: Sequence[str], stdin: int) -> None:
        self.popen = subprocess.Popen(
            list(argv),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the launcher's terminal is not meant for the host
        )
        self.ended = (
            threading.Lock()
        )  # so that none but its own group is ever killed: the number is free once reaped

    def follow(self, show: Show, timeout_s: float | None) -> int | None:
        """Hand out the output until it ends; the exit code, or None where `timeout_s` were over."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            with selectors.DefaultSelector() as selector:
                for stream, pipe in (("out", self.popen.stdout), ("err", self.popen.stderr)):
                    assert pipe is not None
                    selector.register(pipe, selectors.EVENT_READ, stream)
                while selector.get_map():
                    ready = selector.select(None if until_s is None else max(0.0, until_s - time.monotonic()))
                    if not ready:
                        return None
                    for key, _ in ready:
                        if data := os.read(key.fd, PIECE_BYTES):
                            show(key.data, data)
                        else:
                            selector.unregister(key.fileobj)
            return self._exit_code(until_s)
        finally:
            self.end()
            self.close()

    def _exit_code(self, until_s: float | None) -> int | None:
        while until_s is None or time.monotonic() < until_s:
            with self.ended, contextlib.suppress(subprocess.TimeoutExpired):
                return self.popen.wait(0.05)
        return None

    def end(self) -> None:
        """Kill it and what it started, unless it has ended."""
        with self.ended:
            if self.popen.returncode is None:
                os.killpg(self.popen.pid, signal.SIGKILL)
                self.popen.wait()

    def close(self) -> None:
        for pipe in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            if pipe is not None:
                pipe.close()


def _carry_out[T](work: Callable[[], T], future: Future[T]) -> None:
    """Into `future` goes what comes of it; one that was cancelled meanwhile wants none."""
    try:
        result = work()
    except BaseException as error:
        with contextlib.suppress(InvalidStateError):
            future.set_exception(error)
    else:
        with contextlib.suppress(InvalidStateError):
            future.set_result(result)


def _copy(source: Path, target: Path) -> None:
    with beside(target) as fresh:
        if source.is_dir():
            shutil.copytree(source, fresh, symlinks=True)
        else:
            shutil.copy(source, fresh)
