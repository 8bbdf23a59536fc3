"""Which ranks of an own command have joined their group, as their sockets show: whatever the framework, the ranks meet
at rank 0's port, and stay connected to it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping

import psutil

from contracts import run_directory
from contracts.durations import spoken
from contracts.ranks import Spec
from jobs.runtime.process import Run

LOOK_PERIOD_S = 0.5
MOST_NAMED = 8


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
        for rank, pid in self._pids.items():
            if rank not in self._joined_s and _meets(pid, self._ports):
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


def _meets(pid: int, ports: Collection[int]) -> bool:
    """Whether a process, or one that it has started, listens on one of these ports or is connected to it."""
    with contextlib.suppress(psutil.Error):  # it ended
        process = psutil.Process(pid)
        return any(_is_at(candidate, ports) for candidate in (process, *process.children(recursive=True)))
    return False


def _is_at(process: psutil.Process, ports: Collection[int]) -> bool:
    with contextlib.suppress(psutil.Error):
        for socket in process.net_connections("tcp"):
            if socket.status == psutil.CONN_LISTEN and socket.laddr.port in ports:
                return True
            if socket.status == psutil.CONN_ESTABLISHED and socket.raddr.port in ports:
                return True
    return False
