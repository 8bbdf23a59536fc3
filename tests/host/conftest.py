"""The agent as the launching side meets it: a session of one interpreter, JSON in, JSON out, its own root."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import free_port
from tests.waiting import until

CHECKOUT = Path(__file__).parents[2]
AGENT = CHECKOUT / "host" / "agent" / "__main__.py"
SESSION = """
import sys
sys.path[0] = sys.argv[1]
from host.agent.protocol import serve
serve(sys.stdin.buffer.readline(), sys.stdin.buffer, sys.stdout, 600)
"""
ONE: dict[str, Any] = {"run_id": "run-1", "attempt": 0, "process_id": 0}
JOB = r"""
import json, os, signal, sys, time
run_dir = os.environ["RUN_DIR"]
rank, attempt = int(os.environ["RUN_PROCESS_ID"]), int(os.environ["RUN_ATTEMPT"])
def beat(state, step=0, **more):
    text = json.dumps(dict(rank=rank, attempt=attempt, state=state, step=step, time=time.time(),
                           step_time=time.time(), pid=os.getpid(), **{"message": None, **more}))
    for path in (run_dir + "/heartbeats/host-%d.json" % rank, os.environ["RUN_CONTROL_DIR"] + "/heartbeat.json"):
        if "://" not in path:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path + ".new", "w") as file:
                file.write(text)
            os.replace(path + ".new", path)
def say(text):
    os.write(1, ("%s\n" % (text,)).encode())  # as a signal's handler may say something too, at any moment
def live():
    while True:
        time.sleep(60)
"""


def interpreters() -> list[str]:
    """The oldest Python from 3.10 on that is found here, the system's own, and the one that runs the tests."""
    pyenv = sorted(Path.home().glob(".pyenv/versions/3.*/bin/python"))
    found: dict[tuple[int, ...], str] = {}
    for candidate in [*(shutil.which(f"python3.{minor}") for minor in range(10, 12)), *map(str, pyenv)]:
        if candidate is None:
            continue
        probe = [candidate, "-S", "-E", "-c", "import sys; print(*sys.version_info[:2], sys.executable)"]
        said = subprocess.run(probe, capture_output=True, text=True, check=False).stdout.split()
        if len(said) == 3 and (int(said[0]), int(said[1])) >= (3, 10):
            found.setdefault((int(said[0]), int(said[1])), said[2])
    oldest = [found[min(found)]] if found else []
    system = ["/usr/bin/python3"] if os.path.exists("/usr/bin/python3") else []
    return list(dict.fromkeys([*oldest, *system, sys.executable]))


INTERPRETERS = interpreters()


class Agent:
    """One host's agent. Each thread has a session of its own, which ends when the environment has changed."""

    def __init__(self, python: str, root: Path) -> None:
        self.python, self.root, self.run_dir = python, root / "agent", root / "run"
        self.run_dir.mkdir(parents=True)
        self.scripts = root
        self.run_id, self.run_ids = "run-1", set[str]()
        self._ports: dict[tuple[str, int], int] = {}
        self._sessions: dict[tuple[int, frozenset[tuple[str, str]]], subprocess.Popen[bytes]] = {}

    def _session(self) -> subprocess.Popen[bytes]:
        key = threading.get_ident(), frozenset(os.environ.items())
        if key not in self._sessions:
            with (self.scripts / "agent.stderr").open("ab") as complaints:
                self._sessions[key] = subprocess.Popen(
                    [self.python, "-S", "-E", "-c", SESSION, str(CHECKOUT)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=complaints,
                )
        return self._sessions[key]

    def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        request = {"version": 1, "root": str(self.root), "verb": verb, **fields}
        session = self._session()
        assert session.stdin is not None and session.stdout is not None
        session.stdin.write(json.dumps(request).encode() + b"\n")
        session.stdin.flush()
        return dict(json.loads(session.stdout.readline()))

    def __call__(self, verb: str, **fields: Any) -> dict[str, Any]:
        response = self.ask(verb, **fields)
        assert response["ok"] is True, response
        return response

    def refusal(self, verb: str, **fields: Any) -> str:
        """The message of a request that must not succeed."""
        response = self.ask(verb, **fields)
        assert response["ok"] is False, response
        assert response["error"]["remedy"]
        return str(response["error"]["message"])

    def killed(self, verb: str, request: dict[str, Any], after_s: float) -> None:
        """Ask an agent of its own, which is killed so many seconds later."""
        body = json.dumps({"version": 1, "root": str(self.root), **request}).encode()
        command = [self.python, "-S", "-E", str(AGENT), verb]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as asked:
            assert asked.stdin is not None
            asked.stdin.write(body)
            asked.stdin.close()
            time.sleep(after_s)
            asked.kill()

    def start_request(self, script: str, process_id: int = 0, **fields: Any) -> dict[str, Any]:
        attempt = fields.get("attempt", 0)
        run_id = fields.get("run_id", self.run_id)
        path = self.scripts / f"job-{attempt}-{process_id}.py"
        path.write_text(JOB + script)
        ranks = {"RUN_PROCESS_ID": str(process_id), "RUN_ATTEMPT": str(attempt)}
        request: dict[str, Any] = {
            "run_id": run_id,
            "attempt": attempt,
            "process_id": process_id,
            "argv": [sys.executable, "-S", "-E", str(path)],
            "env": {"RUN_DIR": str(self.run_dir), **ranks},
            "cwd": str(self.scripts),
            "log_path": str(self.run_dir / "logs" / str(attempt) / f"host-{process_id}.log"),
            "run_dir": str(self.run_dir),
            "num_processes": 1,
            "cpus": None,
            "liveness_host": "127.0.0.1",
            "liveness_port": self._ports.setdefault((run_id, attempt), free_port()),
            "liveness_token": "the token",
            **fields,
        }
        self.run_ids.add(run_id)
        return request

    def start(self, script: str, process_id: int = 0, **fields: Any) -> dict[str, Any]:
        return self("start", **self.start_request(script, process_id, **fields))

    def start_and_hear(self, script: str, process_id: int = 0, **fields: Any) -> dict[str, Any]:
        """Start a job and wait until its first line is in the log: then its preparations are done."""
        request = self.start_request(script, process_id, **fields)
        started = self("start", **request)
        log = Path(request["log_path"])
        until(lambda: log.exists() and log.stat().st_size > 0)
        return started

    def status(self, process_id: int = 0, **fields: Any) -> dict[str, Any]:
        fields = {"run_id": self.run_id, "attempt": 0, **fields}
        (found,) = self("status", process_id=process_id, **fields)["processes"]
        return dict(found)

    def ended(self, process_id: int = 0, **fields: Any) -> dict[str, Any]:
        """The status of a process once it and its supervisor have finished."""
        until(lambda: self.status(process_id, **fields)["state"] in ("exited", "lost"))
        until(lambda: not self.status(process_id, **fields)["supervised"])
        return self.status(process_id, **fields)

    def stop(self, grace_s: float = 20) -> dict[str, Any]:
        """How its only process was stopped."""
        (stopped,) = self("stop", run_id=self.run_id, grace_s=grace_s)["stopped"]
        return dict(stopped)

    def state_dir(self, process_id: int = 0, attempt: int = 0) -> Path:
        return self.root / "runs" / self.run_id / f"{attempt}-{process_id}"

    def record(self, process_id: int = 0) -> dict[str, Any]:
        return dict(json.loads((self.state_dir(process_id) / "process.json").read_text()))

    def log(self, process_id: int = 0) -> str:
        return (self.run_dir / f"logs/0/host-{process_id}.log").read_text()

    def heartbeat(self, process_id: int = 0) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "heartbeats" / f"host-{process_id}.json").read_text()))

    def result(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "result.json").read_text()))

    def end_all(self) -> None:
        for run_id in self.run_ids:
            self.ask("stop", run_id=run_id, grace_s=0)
        for path in self.root.glob("runs/*/*/process.json"):
            record = json.loads(path.read_text())
            if f"{path.parent}".encode() in cmdline(record["supervisor_pid"]):
                os.kill(record["supervisor_pid"], signal.SIGKILL)
        for session in self._sessions.values():
            session.communicate()
        complaints = self.scripts / "agent.stderr"
        assert not complaints.exists() or complaints.read_text() == ""


def cut_off(agent: Agent) -> None:
    """Kill the supervisor of process 0 and its guard, as when the host's power fails, but not the process."""
    supervisor = agent.record()["supervisor_pid"]
    words = f"_supervise\0{agent.state_dir()}".encode()

    def both() -> list[int]:
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if words in cmdline(int(path.name))]

    until(lambda: len(both()) == 2)  # the guard comes a moment after the process
    for pid in sorted(both(), key=lambda pid: pid == supervisor):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not agent.status()["supervised"])


def good_preflight(root: Path | str, **fields: Any) -> dict[str, Any]:
    """A request that does nothing outside `root`."""
    usual = {"python": sys.executable, "modules": ["json"], "platform": "cpu", "port": None, "lockfiles": []}
    places = {"run_dir": None, "cache_dir": f"{root}/cache", "min_free_bytes": 1, "bundle": None}
    return {**usual, **places, "time": 0, "max_clock_offset_s": 10, **fields}


class Host:
    """Preflights of one agent, with everything in order unless a test says otherwise."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent

    def response(self, **fields: Any) -> dict[str, Any]:
        usual = good_preflight(self.agent.root, run_dir=str(self.agent.run_dir), time=time.time())
        return dict(self.agent("preflight", **{**usual, **fields}))

    def checks(self, name: str, **fields: Any) -> list[dict[str, Any]]:
        return [check for check in self.response(**fields)["checks"] if check["name"] == name]

    def finding(self, name: str, **fields: Any) -> tuple[bool, str]:
        (found,) = self.checks(name, **fields)
        assert found["ok"] or found["remedy"]
        return found["ok"], found["message"]


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    """The agent on the oldest interpreter there is."""
    made = Agent(INTERPRETERS[0], tmp_path)
    yield made
    made.end_all()


@pytest.fixture(params=INTERPRETERS)
def any_agent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Agent]:
    """The agent on each of the interpreters."""
    made = Agent(request.param, tmp_path)
    yield made
    made.end_all()


@pytest.fixture
def host(agent: Any) -> Host:
    return Host(agent)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 512 KiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(mount)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no `mount` on this machine")
    if done.returncode:
        pytest.skip(f"this user may not mount a small disk: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)
