"""Removes all that carries a rehearsal's label, also when the process that made it is gone, however that ended.

    python -m rehearsal.machines.guardian NAME      waits on its standard input

The input is a pipe from the maker: "done" means that all is removed, an end without that word that the maker died.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docker
import docker.errors
import requests

from rehearsal.machines.docker_engine import LABEL, MachinesError, asking, connect
from rehearsal.machines.servers import forget_images

ROOT = Path(__file__).resolve().parents[2]
READY = b"ready"
DONE = b"done"
START_LIMIT_S = 60
END_LIMIT_S = 10
TAKE_OVER_LIMIT_S = 600
TRIES = 5
PAUSE_S = 10
REMOVAL_LIMIT_S = 90
AGAIN_S = 0.5
AT_ONCE = 8


class Guardian:
    """The maker's end of the pipe. The other process is in a session of its own, which no Ctrl-C reaches."""

    def __init__(self, rehearsal: str) -> None:
        """Returns when it watches. Raises MachinesError."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rehearsal.machines.guardian", rehearsal],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        heard, _, _ = select.select([self._process.stdout], [], [], START_LIMIT_S)
        if not heard or self._process.stdout.readline().strip() != READY:
            self._process.kill()
            self._process.communicate()
            raise MachinesError(
                "the guardian, which removes a rehearsal whose maker has died, does not start; try"
                f" `{sys.executable} -m rehearsal.machines.guardian {rehearsal}` in {ROOT}"
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def dismiss(self) -> None:
        """End the guardian after everything was removed. Raises MachinesError if it has died before."""
        self._end(DONE, END_LIMIT_S)

    def take_over(self) -> None:
        """Have the guardian remove what is left, as if the maker had died. Raises MachinesError if it cannot."""
        self._end(b"", TAKE_OVER_LIMIT_S)

    def _end(self, word: bytes, limit_s: float) -> None:
        try:
            self._process.communicate(word, timeout=limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        if self._process.returncode != 0:
            raise MachinesError(f"the guardian of the rehearsal ended with {self._process.returncode}")


def remove_everything(rehearsal: str, client: docker.DockerClient | None = None) -> list[str]:
    """Remove everything that carries the label, and return the names. Works from any process, and may be repeated.

    A container that was requested just before may appear later, so this ends when a second look finds nothing.
    Raises MachinesError, with what is left, after 90 s.
    """
    own = client or connect()
    try:
        return _remove(own, rehearsal)
    finally:
        if client is None:
            own.close()


def left(client: docker.DockerClient, rehearsal: str) -> list[tuple[str, str]]:
    """Kind and name of everything that carries the rehearsal's label."""
    only = {"label": f"{LABEL}={rehearsal}"}
    containers = [
        ("container", container["Names"][0].lstrip("/"))
        for container in client.api.containers(all=True, filters=only)
    ]
    volumes = [("volume", volume["Name"]) for volume in client.api.volumes(filters=only)["Volumes"] or []]
    networks = [("network", network["Name"]) for network in client.api.networks(filters=only)]
    return containers + volumes + networks


def rehearsals(client: docker.DockerClient) -> dict[str, bool]:
    """The names of all rehearsals that have a container or network, and whether a guardian watches them here."""
    only = {"label": LABEL}
    found = [*client.api.containers(all=True, filters=only), *client.api.networks(filters=only)]
    guarded = {words[-1] for words in commands_of(__name__)}
    return {name: name in guarded for name in sorted({each["Labels"][LABEL] for each in found})}


def commands_of(module: str) -> list[list[str]]:
    """The command lines, from the module's name on, of this machine's processes that run it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            words = path.read_text(errors="surrogateescape").rstrip("\0").split("\0")
            if words[1:3] == ["-m", module]:
                found.append(words[2:])
    return found


def _remove(client: docker.DockerClient, rehearsal: str) -> list[str]:
    with asking(f"the images that rehearsal {rehearsal} pushed"):
        removed = forget_images(client, rehearsal)
    until = time.monotonic() + REMOVAL_LIMIT_S
    clear = 0
    refused = ""
    while clear < 2:
        with asking(f"looking for what rehearsal {rehearsal} left"):
            remaining = left(client, rehearsal)
        if remaining and time.monotonic() > until:  # what goes slowly has gone, whenever a look finds nothing
            names = ", ".join(f"{kind} {name}" for kind, name in remaining)
            raise MachinesError(
                f"after {REMOVAL_LIMIT_S} s there is still {names} ({refused}); is Docker well?"
            )
        clear = 0 if remaining else clear + 1
        for kind, same_kind in itertools.groupby(
            remaining, operator.itemgetter(0)
        ):  # volumes after their containers
            alike = [name for _, name in same_kind]
            with ThreadPoolExecutor(AT_ONCE) as threads:
                answers = threads.map(functools.partial(_remove_one, client, kind), alike)
                refused = next(filter(None, answers), refused)
            removed += [name for name in alike if name not in removed]
        if clear < 2:
            time.sleep(AGAIN_S)
    return removed


def _remove_one(client: docker.DockerClient, kind: str, name: str) -> str:
    """Why it could not be removed; empty where it was, or where another did."""
    try:
        if kind == "container":
            client.api.remove_container(name, force=True, v=True)
        elif kind == "volume":
            client.api.remove_volume(name, force=True)
        else:
            client.api.remove_network(name)
    except docker.errors.NotFound:
        return ""
    except (docker.errors.APIError, requests.RequestException) as error:
        return str(error)  # in use for a moment yet, or being removed: the next round sees
    return ""


def main(rehearsal: str) -> int:
    # What ends the maker's whole group or terminal must not end this before its work is done.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    sys.stdout.buffer.write(READY + b"\n")
    sys.stdout.buffer.flush()
    if sys.stdin.buffer.read() == DONE:
        return 0
    for left in reversed(range(TRIES)):
        try:
            remove_everything(rehearsal)
            return 0
        except MachinesError as problem:  # Docker is being started again, say
            print(f"rehearsal {rehearsal}: {problem}", file=sys.stderr)
            if left:
                time.sleep(PAUSE_S)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
