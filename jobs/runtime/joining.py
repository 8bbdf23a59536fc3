"""Which ranks of an own command have joined their group, as their sockets show: whatever the framework, the ranks meet
at rank 0's port, and stay connected to it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping

from contracts import run_directory
from contracts.durations import spoken
from contracts.ranks import Spec
from jobs.runtime.process import Run

LOOK_PERIOD_S = 0.5
MOST_NAMED = 8
ESTABLISHED, LISTENING = "01", "0A"


class Joining:
    """Looks for the sockets of this host's ranks, which have `pids` by their numbers; the heartbeat says who joined."""

    def __init__(self, run: Run, spec: Spec, pids: Mapping[int, int]) -> None:
        self._run, self._pids, self._size = run, pids, spec.ranks.size
        # TensorFlow's ranks meet at the first of their own ports, all others at the coordinator's.
        self._ports = {int(run.environment.coordinator.rpartition(":")[2]), spec.ranks.ports[0][0]}
        self._joined_s: dict[int, float] = {}
        self._looked_s = float("-inf")

    def look(self) -> None:
        now_s = time.monotonic()
        if (
            now_s - self._looked_s < LOOK_PERIOD_S
            or len(self._joined_s) == len(self._pids)
            or self._size == 1
        ):
            return
        self._looked_s = now_s
        meeting = set(sockets_at(self._ports))
        if not meeting:
            return
        parents = dict(_parents())
        for rank, pid in self._pids.items():
            if rank not in self._joined_s and any(
                meeting.intersection(_open_files(each)) for each in descendants(pid, parents)
            ):
                self._joined_s[rank] = now_s
                self._run.heartbeat.joined = sorted(self._joined_s)

    def absent(self, failed: int) -> str:
        """The ranks that had not joined when rank `failed` ended, in words; "" where that is not known."""
        joined = set(self._joined_s)
        names = [
            run_directory.heartbeat(index)
            for index in range(self._run.environment.hosts)
            if index != self._run.environment.host
        ]
        with contextlib.suppress(Exception):  # a bucket's library raises kinds of its own
            for beat in self._run.directory.read_jsons(names) if names else ():
                if beat is not None and beat.get("attempt") == self._run.environment.attempt:
                    joined.update(rank for rank in beat.get("joined") or () if isinstance(rank, int))
        missing = sorted(set(range(self._size)) - joined - {failed})
        if 0 in missing:
            return f"rank 0 was not yet at {self._run.environment.coordinator}, where the ranks meet,"
        if not missing:
            return ""
        ranks = ", ".join(map(str, missing[:MOST_NAMED])) + (", …" if len(missing) > MOST_NAMED else "")
        return f"rank{'s' * (len(missing) > 1)} {ranks} had not joined"

    def waited(self, failed: int) -> str:
        """How long rank `failed` was there before it ended, in words; "" where it never joined."""
        since_s = self._joined_s.get(failed)
        return "" if since_s is None else spoken(time.monotonic() - since_s)


def sockets_at(ports: set[int]) -> Iterator[str]:
    """The sockets, as links in /proc/PID/fd name them, that listen on one of these ports or are connected to it."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{table}", encoding="ascii") as file:
            for row in map(str.split, file.readlines()[1:]):
                local_port, remote_port = (int(address.rpartition(":")[2], 16) for address in row[1:3])
                if (row[3] == LISTENING and local_port in ports) or (
                    row[3] == ESTABLISHED and remote_port in ports
                ):
                    yield f"socket:[{row[9]}]"


def descendants(pid: int, parents: Mapping[int, int]) -> list[int]:
    """`pid`, and the processes that it and those have started. parents: of each process."""
    processes = [pid]
    for process in processes:
        processes += [child for child, parent in parents.items() if parent == process]
    return processes


def _parents() -> Iterator[tuple[int, int]]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
            yield int(name), int(file.read().rpartition(b")")[2].split()[1])


def _open_files(pid: int) -> list[str]:
    targets: list[str] = []
    with contextlib.suppress(OSError):  # it ended
        folder = f"/proc/{pid}/fd"
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                targets.append(os.readlink(f"{folder}/{name}"))
    return targets
