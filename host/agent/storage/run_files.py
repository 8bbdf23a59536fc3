"""Where a supervisor writes its files of a run: on a disk, or in a bucket, by the job's own Python."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import threading

from contracts import atomic, run_directory
from contracts.errors import SUPERSEDED

from ..attempt_process import plain_environment
from ..containers import docker_command
from ..containers.container_start import deliver_arguments, image_environment
from ..containers.docker_command import Container, container_name
from ..protocol import Refused
from .host_files import note, tried

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..protocol import Json


DELIVERY_LIMIT_S = 120.0
LOG_PERIOD_S = 60.0
LOG_LIMIT_BYTES = 8 << 20


class RunFiles:
    """The run directory of one process, as its start request names it. Nothing is raised: what fails is noted.

    dir: where it is a path on this host; None where it is in a bucket, or nowhere.
    """

    def __init__(self, request: Json) -> None:
        self.dir: str | None = request["run_dir"]
        self.url: str = self.dir or request["env"].get("RUN_DIR", "")
        self.request = request
        self.superseded: str | None = None
        """The message once a newer attempt has begun; nothing is written after that."""
        self.is_remote = self.dir is None and "://" in self.url
        self._log_bytes = 0
        self._ended = threading.Event()
        self._delivering = threading.Lock()

    def publish(self, texts: dict[str, str], once: dict[str, str] | None = None) -> bool:
        """Write files, by their names below the run directory; those of `once` unless they are there.

        To a bucket the log goes with them: all in one go, as every one means the start of a Python. The answer is
        whether a disk took all of them; a bucket's client has tried again itself.
        """
        once = once or {}
        if self.is_remote and self.superseded is None:
            self._deliver({**texts, **once}, list(once))
        elif self.dir is not None:
            written = [self._write(name, text, os.replace) for name, text in texts.items()]
            return all(written + [self._write(name, text, os.link) for name, text in once.items()])
        return True

    def look(self) -> str | None:
        """The message if a newer attempt has begun, or None: from the disk, or from the last delivery to a bucket."""
        attempt = self.request["attempt"]
        newer = run_directory.token(attempt + 1)
        if self.dir is not None and os.path.exists(os.path.join(self.dir, newer)):
            self.superseded = f"attempt {attempt + 1} of this run has begun since; attempt {attempt} ends"
        return self.superseded

    def remove(self, name: str) -> None:
        directory = self.dir
        if directory is not None and self.look() is None:
            tried(f"removing {name}", lambda: atomic.remove(os.path.join(directory, name)))

    def keep_log(self) -> None:
        """Deliver the log to a bucket every now and then, as long as it grows."""
        if self.is_remote:
            threading.Thread(target=self._renew_log, name="log", daemon=True).start()

    def end_log(self) -> None:
        self._ended.set()

    def _renew_log(self) -> None:
        while not self._ended.wait(LOG_PERIOD_S):
            size = 0
            with contextlib.suppress(OSError):
                size = os.path.getsize(self.request["log_path"])
            if size != self._log_bytes:
                self._log_bytes = size
                self._deliver({}, [])

    def _write(self, name: str, text: str, replace: Callable[[str, str], None]) -> bool:
        """Fenced: see contracts.fencing."""
        temporary_name = run_directory.unfinished(self.request["attempt"], name)

        def put_if_newest(temporary_path: str, path: str) -> None:
            if self.look() is not None:
                note(f"{name} not written: {self.superseded}")
                return
            try:
                replace(temporary_path, path)
            except FileNotFoundError:
                if self.look() is None:  # or else the newer attempt has removed it
                    raise

        def write() -> None:
            for folder in (os.path.dirname(temporary_name), os.path.dirname(name)):
                self._make_parents(folder)
            path, beside_path = (
                os.path.join(self.dir or "", file_name) for file_name in (name, temporary_name)
            )
            with contextlib.suppress(FileExistsError):
                atomic.write(path, text, replace=put_if_newest, temporary_path=beside_path)

        return tried(f"writing {name}", write)

    def _make_parents(self, folder: str) -> None:
        """Make parent folders, but not the run directory itself: it may have been removed on purpose."""
        path = self.dir or ""
        for part in folder.split("/") if folder else ():
            path = os.path.join(path, part)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)

    def _deliver(self, texts: dict[str, str], unless_there: list[str]) -> None:
        # Not with RUN_CONTROL_DIR, by which a process is known as one of the job's, and is ended with it.
        try:
            work = delivery(self.request, self.url)
        except Refused as refusal:
            note(f"delivering to {self.url}: {refusal.message}")
            return
        files: list[Json] = [{"name": name, "text": text} for name, text in texts.items()]
        if os.path.exists(self.request["log_path"]):
            name = run_directory.log(self.request["attempt"], self.request["process_id"])
            files.append({"name": name, "path": self.request["log_path"], "limit_bytes": LOG_LIMIT_BYTES})
        try:
            with self._delivering:
                done = subprocess.run(
                    work.argv,
                    input=json.dumps(
                        {"files": files, "unless_there": unless_there, "attempt": self.request["attempt"]}
                    ).encode(),
                    cwd=work.cwd,
                    env=work.environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    timeout=DELIVERY_LIMIT_S,
                    check=False,
                )
        except (OSError, subprocess.TimeoutExpired) as error:
            note(f"delivering to {self.url}: {error}")
            work.clear()
            return
        if done.returncode == SUPERSEDED:
            self.superseded = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        elif done.returncode:
            note(f"delivering to {self.url}: {done.stderr.decode(errors='replace')[-2000:].strip()}")


MODULE = ["-P", "-m", "jobs.runtime.storage.deliver"]
_numbers = itertools.count()


class Delivery:
    """A program that reads from stdin what is to be written; `clear` ends what is left of one that took too long."""

    def __init__(
        self, argv: list[str], cwd: str, environment: dict[str, str], container: Container | None
    ) -> None:
        self.argv, self.cwd, self.environment = argv, cwd, environment
        self._container = container

    def clear(self) -> None:
        if self._container is not None:
            self._container.remove()


def delivery(request: Json, url: str) -> Delivery:
    """The program for a start request's process, bare or in a container of the same image."""
    from ..proc import user_name

    argv = [request["argv"][0], *MODULE, url]
    if request["container"] is None:
        return Delivery(argv, request["cwd"], {**plain_environment(), **request["env"]}, None)
    docker = docker_command.required_program()
    environment = image_environment(request["env"], os.environ, user_name())
    process = container_name(request["run_id"], request["attempt"], request["process_id"])
    name = f"{process}-deliver-{os.getpid()}-{next(_numbers)}"
    return Delivery(
        [docker, *deliver_arguments(request, name, os.getuid(), os.getgid(), argv, environment)],
        "/",
        {**docker_command.client_environment(os.environ), **environment},
        Container(name, docker),
    )
