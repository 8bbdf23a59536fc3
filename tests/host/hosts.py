"""The hosts of one attempt, as small as they can be: agents with a root each, jobs of a few lines, and a network."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

from tests.host.conftest import INTERPRETERS, Agent, is_running, until

SIZE = 4
SILENCE_S = 5.0
"""The supervisors' own time limits are shorter here than in earnest, the pings (2 s) are not."""
LIMIT_S = 30.0
STEPPING = """
def beat(state, step, **more):
    path = os.environ["RUN_CONTROL_DIR"] + "/heartbeat.json"
    with open(path + ".new", "w") as file:
        json.dump(dict(rank=rank, attempt=attempt, state=state, step=step, time=time.time(),
                       step_time=time.time(), pid=os.getpid(), message=None, **more), file)
    os.replace(path + ".new", path)
def step(count):
    for number in range(1, count + 1):
        beat("stepping", number)
        if number == 1:
            say("up")
        time.sleep(0.1)
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Proxy:
    """The network between a host and the liveness server.

    mode: open; silent (nothing passes); cut (once, then open); closed.
    """

    def __init__(self, to_port: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        self.mode, self.connections = "open", 0
        self._to_port, self._far_end = to_port, dict[socket.socket, socket.socket]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with self.listener:
            while not self._ended.is_set() and self.mode != "closed":
                if self.mode == "cut":
                    self._cut()
                    self.mode = "open"
                if self.mode == "silent":
                    self._ended.wait(0.05)
                    continue
                for ready in select.select([self.listener, *self._far_end], [], [], 0.05)[0]:
                    with contextlib.suppress(OSError):
                        self._pass(ready)
            self._cut()

    def _pass(self, ready: socket.socket) -> None:
        if ready is self.listener:
            near = self.listener.accept()[0]
            try:
                far = socket.create_connection(("127.0.0.1", self._to_port))
            except OSError:
                near.close()
                return
            self._far_end.update({near: far, far: near})
            self.connections += 1
        elif ready in self._far_end:
            data = ready.recv(65536)
            self._far_end[ready].sendall(data) if data else self._cut()

    def _cut(self) -> None:
        for sock in self._far_end:
            sock.close()
        self._far_end.clear()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


class Hosts:
    """The hosts of one attempt, each with an agent and a root of its own, and a run directory that they share."""

    def __init__(self, place: Path, run_dir: Path, size: int = SIZE) -> None:
        self.agents = [Agent(INTERPRETERS[0], place / f"host-{rank}") for rank in range(size)]
        self.run_dir, self.port = run_dir, free_port()
        run_dir.mkdir(exist_ok=True)
        for agent in self.agents:
            agent.run_dir = run_dir
        self.proxies: list[Proxy] = []

    def proxy(self) -> Proxy:
        self.proxies.append(Proxy(self.port))
        return self.proxies[-1]

    def start(self, rank: int, script: str, **fields: Any) -> dict[str, Any]:
        liveness = {
            "num_processes": len(self.agents),
            "liveness_host": "127.0.0.1",
            "liveness_port": self.port,
            "liveness_token": "the token",
            "assemble_s": 10,
            "silence_s": SILENCE_S,
        }
        return self.agents[rank].start(STEPPING + script, rank, **{**liveness, **fields})

    def up(self, rank: int) -> None:
        log = Path(self.agents[rank].record(rank)["log_path"])
        until(lambda: log.exists() and b"up" in log.read_bytes())

    def start_all(self, *scripts: str, **fields: Any) -> None:
        """The first script on the first host and so on; the last one on all hosts that are left."""
        for rank in range(len(self.agents)):
            self.start(rank, scripts[min(rank, len(scripts) - 1)], **fields)
        for rank in range(len(self.agents)):
            self.up(rank)

    def connect(self) -> None:
        """Wait until all hosts have reached the liveness server."""
        until(lambda: established(self.port) >= len(self.agents))

    def enough(self) -> None:
        (self.run_dir / "enough").touch()

    def pid(self, rank: int) -> int:
        return int(self.agents[rank].record(rank)["pid"])

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> float:
        os.kill(self.pid(rank), signum)
        return time.monotonic()

    def ended(self, ranks: list[int] | None = None) -> list[dict[str, Any]]:
        """How each process ended, when nothing of any is left: neither itself nor a supervisor or guard."""
        found = []
        for rank in range(len(self.agents)) if ranks is None else ranks:
            agent = self.agents[rank]
            until(lambda agent=agent: not left_over(agent.root), LIMIT_S)  # type: ignore[misc]
            found.append(agent.status(rank))
        assert {entry["state"] for entry in found} == {"exited"}
        return found

    def end_all(self) -> None:
        for proxy in self.proxies:
            proxy.end()
        for agent in self.agents:
            agent.end_all()

    def result(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "result.json").read_text()))


def left_over(root: Path) -> list[int]:
    """What belongs to a host: a job's processes, by their environment, a supervisor and its guard, by their command."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            texts = (place / "environ").read_bytes() + (place / "cmdline").read_bytes()
            if os.fsencode(root) in texts and is_running(int(place.name)):
                found.append(int(place.name))
    return found


def established(port: int) -> int:
    """How many connections to the port there are."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "01" and int(row[1].rpartition(":")[2], 16) == port for row in rows)


LIVE = "step(10**6)"
"""A job that goes on until somebody ends it."""
UNTIL_ENOUGH = """
step(3)
while not os.path.exists(run_dir + "/enough"):
    time.sleep(0.01)
"""
"""A job that ends well when it is told that it is enough."""
