"""The hosts of an attempt end together: whatever becomes of one of them, none goes on and none is left over.

They are as small as they can be: agents with a root each, jobs of a few lines, and a network.
"""

import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.host.conftest import CHECKOUT, INTERPRETERS, Agent
from tests.processes import is_alive
from tests.servers import free_port
from tests.waiting import until

SIZE = 4
SILENCE_S = 5.0
"""The supervisors' own time limits are shorter here than in earnest, the pings (2 s) are not."""
LIMIT_S = 30.0
STEPPING = """
def step(count):
    for number in range(1, count + 1):
        beat("stepping", number)
        if number == 1:
            say("up")
        time.sleep(0.1)
"""


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

    def __init__(self, place: Path, size: int = SIZE) -> None:
        self.agents = [Agent(INTERPRETERS[0], place / f"host-{rank}") for rank in range(size)]
        self.run_dir, self.port = place / "run", free_port()
        self.run_dir.mkdir()
        for agent in self.agents:
            agent.run_dir = self.run_dir
        self.proxy = Proxy(self.port)

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

    def start_all(self, script: str, proxied: int | None = None, **fields: Any) -> None:
        """Wait until all hosts have reached the liveness server, one of them through the proxy if asked for."""
        for rank in sorted(range(SIZE), key=lambda rank: rank != proxied):
            port = self.proxy.port if rank == proxied else self.port
            self.start(rank, script, liveness_port=port, **fields)
        for rank, agent in enumerate(self.agents):
            log = Path(agent.record(rank)["log_path"])
            until(lambda log=log: log.exists() and b"up" in log.read_bytes())  # type: ignore[misc]
        until(lambda: established(self.port) >= SIZE)

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        os.kill(int(self.agents[rank].record(rank)["pid"]), signum)

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
        self.proxy.end()
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
            if os.fsencode(root) in texts and is_alive(int(place.name)):
                found.append(int(place.name))
    return found


def established(port: int) -> int:
    """How many connections to the port there are that have been taken, and all that came by them read."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = [row for row in rows if row[3] == "01" and port in (_port(row[1]), _port(row[2]))]
    is_read = all(row[4].endswith(":00000000") for row in ends)
    return sum(_port(row[1]) == port for row in ends) if is_read else 0


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


LIVE = "step(10**6)"
"""A job that goes on until somebody ends it."""
UNTIL_ENOUGH = """
step(3)
while not os.path.exists(run_dir + "/enough"):
    time.sleep(0.01)
"""
"""A job that ends well when it is told that it is enough."""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Four hosts with agents, all of whose processes are ended after the test."""
    made = Hosts(tmp_path)
    yield made
    made.end_all()


def test_a_killed_process_stops_all_hosts_and_is_blamed_with_its_last_lines(hosts: Hosts) -> None:
    hosts.start_all(LIVE)
    killed = time.monotonic()
    hosts.kill(3)
    entries = hosts.ended()
    assert time.monotonic() - killed < 10
    reason = "stopped because host 3 failed: killed by signal 9 (SIGKILL)"
    assert {entry["reason"] for entry in entries[:3]} == {reason}
    codes = [agent.heartbeat(rank)["exit_code"] for rank, agent in enumerate(hosts.agents)]
    assert codes == [76, 76, 76, None]
    result = hosts.result()
    assert (result["outcome"], result["failed_host"]) == ("failed", 3)
    assert result["error"] == "host 3: killed by signal 9 (SIGKILL)\nup"
    assert result["steps"] >= 1


def test_a_host_that_was_not_started_stops_those_that_were(hosts: Hosts) -> None:
    began = time.monotonic()
    for rank in (0, 2, 3):
        hosts.start(rank, LIVE, assemble_s=3)
    reasons = {entry["reason"] for entry in hosts.ended([0, 2, 3])}
    assert time.monotonic() - began < 15
    assert reasons == {"stopped because only hosts 0, 2, 3 of 4 were started"}
    assert (hosts.result()["outcome"], hosts.result()["failed_host"]) == ("failed", 1)


def test_without_host_0_the_others_end_and_the_result_names_it(hosts: Hosts) -> None:
    (hosts.run_dir / "heartbeats").mkdir()
    earlier = {"attempt": 7, "state": "failed", "time": 1, "message": "of another attempt"}
    (hosts.run_dir / "heartbeats" / "host-9.json").write_text(json.dumps(earlier))
    for rank in (1, 2, 3):
        hosts.start(rank, LIVE, assemble_s=2)
    (reason,) = {entry["reason"] for entry in hosts.ended([1, 2, 3])}
    assert reason.startswith(f"stopped because host 0 was not reached at 127.0.0.1:{hosts.port} within 2 s")
    assert hosts.result()["failed_host"] == 0


@pytest.mark.parametrize("rank", [0, 2])
def test_a_host_whose_supervisor_is_killed_is_missed_and_leaves_nothing(hosts: Hosts, rank: int) -> None:
    hosts.start_all(LIVE)
    killed = time.monotonic()
    os.kill(hosts.agents[rank].record(rank)["supervisor_pid"], signal.SIGKILL)
    entries = hosts.ended()
    assert time.monotonic() - killed < 15
    assert entries[rank]["reason"].startswith("stopped because its supervisor was killed")
    others = [entry["reason"] for entry in entries if entry["process_id"] != rank]
    assert all(f"host {rank} was lost" in reason for reason in others), others
    assert (hosts.result()["outcome"], hosts.result()["failed_host"]) == ("failed", rank)


@pytest.mark.parametrize("how", ["closed", "silent"])
def test_a_host_that_cannot_be_reached_any_more_is_lost_and_stops_by_itself(hosts: Hosts, how: str) -> None:
    hosts.start_all(LIVE, proxied=2)
    cut = time.monotonic()
    hosts.proxy.mode = how
    entries = hosts.ended()
    assert time.monotonic() - cut < 2 * SILENCE_S + 15
    said = {"closed": "its connection ended", "silent": f"it has not been heard of for {SILENCE_S:g} s"}[how]
    assert entries[1]["reason"].startswith(f"stopped because host 2 was lost: {said}")
    assert "host 0" in entries[2]["reason"]
    # Each side is right about the other, and one of them was first.
    assert hosts.result()["failed_host"] in (0, 2)


def test_a_stop_that_was_asked_for_fails_nothing(hosts: Hosts) -> None:
    hosts.start_all(LIVE)
    for rank in (1, 0, 3, 2):
        hosts.agents[rank]("stop", run_id="run-1", grace_s=0)
    hosts.ended()
    assert not (hosts.run_dir / "result.json").exists()


def test_a_port_that_is_taken_fails_the_start_and_starts_nothing(hosts: Hosts) -> None:
    agent = hosts.agents[0]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = agent.refusal("start", **agent.start_request(LIVE, 0, liveness_port=port))
    assert f"port {port} of 127.0.0.1, for the liveness server, is taken" in message
    until(lambda: not left_over(agent.root), 5.0)


HELLO = {"token": "the token", "run_id": "run-1", "attempt": 0, "rank": 2}
WRONG = ({"token": ""}, {"token": None}, {"token": "é"}, {"attempt": 1}, {"rank": 4}, {"rank": "2"})
STRANGE = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"x" * 10000,
    b"\xff\xfe\n",
    b"[]\n",
    b"[" * 4000 + b"\n",
    b'{"stop": {}}\n',
    *(json.dumps({"hello": {**HELLO, **wrong}}).encode() + b'\n{"ended": {}}\n' for wrong in WRONG),
]
NONSENSE = b"""{"ended": {}}
{"ping": 5}
{"left": null}
{}
{"hung": {"step": "x"}}
{"a": 1, "b": 2}
"""


def test_strangers_nonsense_a_cut_connection_and_a_second_start_harm_nothing(hosts: Hosts) -> None:
    hosts.start_all(UNTIL_ENOUGH, proxied=1)
    before = hosts.proxy.connections
    hosts.proxy.mode = "cut"
    until(lambda: hosts.proxy.connections > before)

    with contextlib.ExitStack() as open_sockets:
        strangers = []
        for number in range(100):
            stranger = open_sockets.enter_context(socket.create_connection(("127.0.0.1", hosts.port)))
            stranger.settimeout(15)
            with contextlib.suppress(OSError):
                stranger.sendall(STRANGE[number % len(STRANGE)])
            strangers.append(stranger)
        for stranger in strangers:
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""

    with socket.create_connection(("127.0.0.1", hosts.port)) as again:  # host 2 a second time
        again.settimeout(10)
        again.sendall(json.dumps({"hello": HELLO}).encode() + b"\n" + NONSENSE)
        assert b"ping" in again.recv(1000)
        with contextlib.suppress(ConnectionResetError):
            while again.recv(1000):  # until the host itself, which has lost its place, takes it back
                pass

    assert hosts.start(0, UNTIL_ENOUGH)["already"] is True
    (hosts.run_dir / "enough").touch()
    assert [entry["code"] for entry in hosts.ended()] == [0, 0, 0, 0]
    assert not (hosts.run_dir / "result.json").exists()
    log = (hosts.agents[0].state_dir(0) / "supervisor.log").read_text()
    assert log.count("host 2 said something that is not understood") == NONSENSE.count(b"\n")


HANGS = """
import faulthandler
faulthandler.register(signal.SIGUSR1, file=open(os.environ["RUN_CONTROL_DIR"] + "/stacks.txt", "a"))
def beat_again():
    path = os.environ["RUN_CONTROL_DIR"] + "/heartbeat.json"
    with open(path) as file:
        found = json.load(file)
    with open(path + ".new", "w") as file:
        json.dump(dict(found, time=time.time()), file)
    os.replace(path + ".new", path)
    time.sleep(0.5)
stopped = run_dir + "/stopped"
for number in range(1, 10**6):
    while os.path.exists(stopped) and number > 30:
        beat_again()
    beat("stepping", number)
    if number == 30: say("up")
    time.sleep(0.05)
"""


def test_a_stopped_process_is_found_and_its_run_is_hung_with_the_stacks_of_all(hosts: Hosts) -> None:
    hosts.start_all(HANGS, hang_floor_s=7)
    hosts.kill(2, signal.SIGSTOP)
    (hosts.run_dir / "stopped").touch()
    entries = hosts.ended()
    result = hosts.result()
    assert (result["outcome"], result["failed_host"]) == ("hung", 2)
    assert result["error"].startswith("host 2 stood still at step ")
    assert f"{hosts.run_dir}/stacks/0" in result["error"]
    texts = [(hosts.run_dir / f"stacks/0/host-{rank}.txt").read_text() for rank in range(SIZE)]
    assert all("beat_again" in texts[rank] for rank in (0, 1, 3))
    assert "did not answer SIGUSR1" in texts[2]
    assert "T (stopped)" in texts[2]
    assert entries[0]["reason"].startswith("stopped because the run hung: host 2 stood still")
    beats = [hosts.agents[rank].heartbeat(rank) for rank in range(SIZE)]
    assert {beat["state"] for beat in beats} == {"failed"}
    assert [beat["exit_code"] for beat in beats] == [76, 76, None, 76]
    assert beats[2]["message"].startswith("host 2 stood still at step ")


def test_in_a_bucket_the_supervisors_deliver_heartbeats_logs_and_the_result(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, size=2)
    for folder in ("heartbeats", "logs/0"):
        (hosts.run_dir / folder).mkdir(parents=True)
    for rank, script in enumerate((LIVE, "step(8); sys.exit(3)")):
        request = hosts.agents[rank].start_request("", rank)
        env = {**request["env"], "RUN_DIR": f"file://{hosts.run_dir}", "PYTHONPATH": str(CHECKOUT)}
        log = str(tmp_path / f"host-{rank}.log")
        hosts.start(rank, script, run_dir=None, env=env, log_path=log)
    hosts.ended()
    hosts.end_all()
    assert hosts.result()["error"].startswith("host 1: exit code 3")
    assert hosts.agents[0].heartbeat(0)["exit_code"] == 76
    assert hosts.agents[1].heartbeat(1)["message"] == "exit code 3: up"
    assert [agent.log(rank) for rank, agent in enumerate(hosts.agents)] == ["up\n", "up\n"]
