"""This machine as a host: commands are its processes, files are copied on its disk, each verb starts an agent."""

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
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from contracts.atomic import atomic_path
from launch.hosts import PIECE_BYTES, Completed, Count, Show, in_thread


@dataclasses.dataclass(frozen=True)
class LocalTransport:
    """This machine as a host: a command is a process of its own, apart from the launcher's terminal."""

    def begin(self, argv: Sequence[str], stdin: str, *, timeout_s: float) -> Future[Completed]:
        def run() -> Completed:
            process = _LocalProcess(argv, subprocess.PIPE if stdin else subprocess.DEVNULL)
            try:
                outputs = process.popen.communicate(stdin.encode() if stdin else None, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                outputs, code = (b"", f"not done within {timeout_s:g} s".encode()), None
            else:
                code = process.popen.returncode
            finally:
                process.end()
                process.close()
            stdout, stderr = (text.decode(errors="replace") for text in outputs)
            return Completed(exit_code=code, stdout=stdout, stderr=stderr)

        return in_thread(run)

    def stream(self, argv: Sequence[str], show: Show, *, timeout_s: float | None) -> Future[int | None]:
        try:
            process = _LocalProcess(argv, subprocess.DEVNULL)
        except OSError as error:
            failed: Future[int | None] = Future()
            failed.set_exception(error)
            return failed
        try:
            future = in_thread(functools.partial(process.follow, show, timeout_s))
            future.add_done_callback(lambda done: process.end() if done.cancelled() else None)
            return future
        except BaseException:
            # An interrupt while the thread starts: nobody has the future that would end the process.
            process.end()
            raise

    def put(self, source: Path, target: str, progress: Count | None = None) -> None:  # noqa: ARG002 - it is too quick
        _copy(source, Path(target).expanduser())

    def get(self, source: str, target: Path, progress: Count | None = None) -> None:  # noqa: ARG002
        _copy(Path(source).expanduser(), target)

    def forward(self, remote_host: str, remote_port: int) -> contextlib.AbstractContextManager[int]:  # noqa: ARG002
        return contextlib.nullcontext(remote_port)  # the host's ports are this machine's


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
        # So that none but its own group is ever killed: the number is free once reaped.
        self.ended = threading.Lock()

    def follow(self, show: Show, timeout_s: float | None) -> int | None:
        """Hand out the output until it ends; return the exit code, or None after `timeout_s`."""
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


@dataclasses.dataclass(frozen=True)
class ProcessLink:
    """An agent that is started anew for every verb. command: how it is started."""

    transport: LocalTransport
    command: tuple[str, ...]
    knows_all = True

    def ask(self, verb: str, request: str, *, timeout_s: float) -> Future[Completed]:
        return self.transport.begin([*self.command, verb], request, timeout_s=timeout_s)


def _copy(source: Path, target: Path) -> None:
    with atomic_path(target) as fresh:
        if source.is_dir():
            copy_folder(source, fresh, follow_links=False)
        else:
            _copy_file(str(source), str(fresh))


MOST_NAMED = 5


def copy_folder(source: Path, target: Path, *, follow_links: bool) -> None:
    """Copy what is in a folder of this machine to another, which may be there. follow_links: copy what links lead to.

    Raises:
        OSError: something in it cannot be copied; all other files were.
    """
    ignore = _refuse_circles if follow_links else None
    try:
        shutil.copytree(
            source, target, not follow_links, ignore, copy_function=_copy_file, dirs_exist_ok=True
        )
    except shutil.Error as error:  # of each file that could not be copied: from, to, why
        reasons = [*dict.fromkeys(str(reason) for _, _, reason in error.args[0])]
        more = f"; and {len(reasons) - MOST_NAMED} more" if len(reasons) > MOST_NAMED else ""
        raise OSError("; ".join(reasons[:MOST_NAMED]) + more) from None


def _refuse_circles(folder: str, names: list[str]) -> set[str]:
    above = {os.path.realpath(path) for path in (Path(folder), *Path(folder).parents)}
    for path in (os.path.join(folder, name) for name in names):
        if os.path.islink(path) and os.path.realpath(path) in above:
            raise OSError(f"{path} is a link that leads in a circle")
    return set()


def _copy_file(source: str, target: str) -> str:
    if os.path.exists(source) and not os.path.isfile(source):  # reading of a pipe or a device may never end
        raise OSError(f"{source} is neither a file nor a folder nor a link")
    return shutil.copy2(source, target)
