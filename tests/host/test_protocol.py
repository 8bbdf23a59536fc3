"""Requests and sessions: whatever comes in, a line of JSON goes out, and an agent that is missing is brought whole."""

import base64
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.vm.agent_session import agent_code
from host.agent import protocol
from tests.host.conftest import AGENT, CHECKOUT, INTERPRETERS, ONE, good_preflight

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text().filter(lambda text: text[:1] not in "/~"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def requests(root: str) -> dict[str, dict[str, Any]]:
    """A good request of every verb that does nothing outside `root`."""
    what: dict[str, Any] = {
        "argv": ["/nonexistent/program"],
        "env": {},
        "cwd": root,
        "log_path": f"{root}/log",
        "cpus": None,
    }
    liveness = {"liveness_host": "127.0.0.1", "liveness_port": 1, "liveness_token": "t"}
    return {
        "preflight": good_preflight(root),
        "stage": {"sha256": "0" * 64, "archive_base64": None},
        "start": {**ONE, "process_id": 1, "num_processes": 2, "run_dir": None, **what, **liveness},
        "status": {"run_id": None},
        "stop": {"run_id": "run-1", "grace_s": 0},
        "logs": {**ONE, "offset": 0, "limit_bytes": 100},
        "stacks": {**ONE, "timeout_s": 0},
    }


VERBS = sorted(requests(""))


# A preflight forks, and this process may have threads of JAX by now.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@settings(max_examples=120)
@given(data=st.data(), verb=st.sampled_from(VERBS))
def test_no_request_makes_a_bug_show(data: st.DataObject, verb: str) -> None:
    with tempfile.TemporaryDirectory() as root:
        request = {"version": 1, "root": root, **requests(root)[verb]}
        # Programs that would be run stay as they are.
        name = data.draw(st.sampled_from(sorted(set(request) - {"argv", "python"})) | st.text())
        request[name] = data.draw(JUNK)
        response, status = protocol.respond(verb, json.dumps(request).encode())
    assert json.loads(json.dumps(response))["version"] == 1
    assert response["ok"] is (status == 0)
    if status:
        assert set(response["error"]) == {"message", "remedy"}
        assert "bug" not in response["error"]["message"]


@given(
    verb=st.sampled_from(VERBS) | st.text(),
    body=st.binary() | JUNK.map(lambda value: json.dumps(value).encode()),
)
def test_what_is_no_request_is_refused(verb: str, body: bytes) -> None:
    response, status = protocol.respond(verb, body)
    assert (response["ok"], status) == (False, 2)


@pytest.mark.parametrize(
    ("verb", "fields", "said"),
    [
        *(("status", {"root": root}, "root is") for root in ("/a\0b", "/\ud800", "relative", "")),
        ("status", {"root": "~nobody-of-that-name/x"}, "knows no such home"),
        ("status", {"version": 7}, "version 7, this agent speaks version 1"),
        ("launch", {}, "'launch' is not a verb"),
        ("logs", {**ONE, "run_id": "../x"}, 'run_id is "../x"'),
        ("logs", {"attempt": -1, "process_id": True, "run_id": "a"}, "attempt is -1; it must be"),
        ("logs", {"attempt": -1, "process_id": True, "run_id": "a"}, "process_id is true"),
        ("logs", {"attempt": -1, "process_id": True, "run_id": "a"}, "limit_bytes is missing"),
        ("start", {**requests("/")["start"], "env": {"A=B": "hunter2"}}, "env is an object"),
    ],
)
def test_a_wrong_request_is_told_with_all_that_is_wrong(verb: str, fields: dict[str, Any], said: str) -> None:
    body = json.dumps({"version": 1, "root": "/r", **fields}).encode()
    response, status = protocol.respond(verb, body)
    assert (response["ok"], status) == (False, 2)
    assert said in response["error"]["message"]
    assert "hunter2" not in str(response)
    if verb == "launch":
        assert all(known in response["error"]["remedy"] for known in VERBS)


def test_a_bug_is_told_without_a_traceback_on_stdout_and_a_root_that_cannot_be_made_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(request: object) -> dict[str, object]:
        raise KeyError("oh")

    (tmp_path / "root").write_text("a file")
    request = {"version": 1, "root": f"{tmp_path}/root", **requests(str(tmp_path))["start"]}
    response, status = protocol.respond("start", json.dumps(request).encode())
    assert (status, capsys.readouterr().err) == (1, "")
    assert f"{tmp_path}/root" in response["error"]["message"]
    monkeypatch.setattr("host.agent.attempt_process.status", broken)
    response, status = protocol.respond("status", json.dumps({"version": 1, "root": str(tmp_path)}).encode())
    assert (response["ok"], status) == (False, 1)
    assert "KeyError" in response["error"]["message"]
    captured = capsys.readouterr()
    assert "Traceback" in captured.err and captured.out == ""


def test_every_verb_and_a_request_by_hand_work_on_every_python(any_agent: Any) -> None:
    agent = any_agent

    def by_hand(body: str) -> tuple[int, dict[str, Any]]:
        command = [agent.python, "-S", "-E", str(AGENT), "status"]
        done = subprocess.run(command, input=body, capture_output=True, text=True, check=False)
        assert done.stderr == ""
        return done.returncode, json.loads(done.stdout)

    nothing = {"version": 1, "ok": True, "processes": []}
    assert by_hand(json.dumps({"version": 1, "root": str(agent.root)})) == (0, nothing)
    for body in ("", "[" * 100_000, '{"version": 1, "root": NaN}', '{"version": 1' + "0" * 9999 + "}", "[]"):
        status, response = by_hand(body)
        assert (status, response["ok"]) == (2, False)
    assert agent("preflight", **good_preflight(agent.root))["facts"]["free_ports"]
    assert agent("stage", **requests("")["stage"])["present"] is False
    job = """
import faulthandler
stacks = open(os.environ["RUN_CONTROL_DIR"] + "/stacks.txt", "w")
faulthandler.register(signal.SIGUSR1, file=stacks)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
say("ready")
live()
"""
    agent.start_and_hear(job)
    assert agent.status()["state"] == "running"
    assert "in live" in agent("stacks", **ONE, timeout_s=10)["text"]
    assert agent("logs", **ONE, offset=0, limit_bytes=100)["text"] == "ready\n"
    stopped = agent.stop(10)
    assert (stopped["how"], stopped["code"]) == ("exited by itself", 75)
    assert agent.ended()["reason"] == "exit code 75"
    assert not (agent.run_dir / "result.json").exists()


def test_a_status_loads_nothing_that_takes_long_to_load() -> None:
    """The agent starts on every host for every launch; each of these is a fifth of its start or more."""
    program = "import sys, host.agent.protocol, host.agent.attempt_process; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    heavy = {"typing", "dataclasses", "subprocess", "socket", "selectors", "threading", "hashlib", "zipfile"}
    assert heavy & set(done.stdout.split()) == set()


LOADER = agent_code().loader
ARCHIVE = base64.b64decode(json.loads(agent_code().answer)["archive_base64"])
SHA256 = agent_code().sha256
TOO_OLD = [path for path in sorted(Path.home().glob(".pyenv/versions/3.[6-9].*/bin/python")) if path.exists()]
BRING = {"archive_base64": base64.b64encode(ARCHIVE).decode()}


class Session:
    """One session of `python` with the agent under `root`; the command is what a launcher sends."""

    def __init__(self, root: Path | str, python: str = sys.executable, loader: str = LOADER) -> None:
        command = [python, "-S", "-E", "-c", loader, str(root), SHA256]
        self.root = str(root)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def send(self, value: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(value if isinstance(value, bytes) else json.dumps(value).encode() + b"\n")
        self.process.stdin.flush()

    def send_status(self) -> None:
        self.send({"version": 1, "root": self.root, "verb": "status"})

    def heard(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def needs(self) -> None:
        """Ask for something, and be asked for the agent."""
        self.send_status()
        assert self.heard() == {"need": SHA256}

    def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        self.send({"version": 1, "root": self.root, "verb": verb, **fields})
        answer = self.heard()
        if answer == {"need": SHA256}:
            self.send(BRING)
            answer = self.heard()
        return answer

    def end(self) -> tuple[int, str]:
        """Exit code and stderr, once its input has ended."""
        _, complaint = self.process.communicate(timeout=20)
        return self.process.returncode, complaint.decode()


Begin = Callable[..., Session]


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[Begin]:
    made: list[Session] = []

    def begin(root: Path | str = tmp_path / "root", **more: Any) -> Session:
        made.append(Session(root, **more))
        return made[-1]

    yield begin
    for session in made:
        session.process.kill()
        session.process.communicate()


@pytest.mark.parametrize("python", INTERPRETERS)
def test_a_session_brings_its_agent_once_and_answers_in_order(
    sessions: Begin, python: str, tmp_path: Path
) -> None:
    first = sessions(python=python)
    first.needs()
    first.send(BRING)
    assert first.heard() == {"version": 1, "ok": True, "processes": []}
    assert first.ask("list", path=f"{first.root}/agents")["names"] == [SHA256]
    assert first.end() == (0, "")
    session = sessions(python=python)
    bad = [b"\n", b"[1]\n", b"\xff\n", b"{}\n", b'{"verb": ["x"]}\n', b"[" * 99999 + b"\n", b"not json\n"]
    for line in bad:
        session.send_status()
        session.send(line)
    for _ in bad:
        assert session.heard()["ok"] is True
        answer = session.heard()
        assert answer["ok"] is False
        assert answer["error"]["remedy"] and "bug" not in answer["error"]["message"]
    target = tmp_path / "file"
    whole = {"version": 1, "root": session.root, "verb": "write", "path": str(target), "text": "x"}
    session.send(json.dumps(whole).encode())  # its line never ends
    assert session.end() == (0, "")
    assert not target.exists()


def test_a_launcher_that_goes_away_before_the_answer_leaves_no_complaint(sessions: Begin) -> None:
    session = sessions()
    session.ask("status")
    assert session.process.stdout is not None
    session.process.stdout.close()
    session.send_status()
    assert session.process.wait(20) == 0
    assert session.process.stderr is not None
    assert session.process.stderr.read() == b""


def test_an_agent_that_did_not_arrive_whole_is_never_run_and_leaves_nothing(sessions: Begin) -> None:
    for archive in (b"other", ARCHIVE[:-1]):
        session = sessions()
        session.needs()
        session.send({"archive_base64": base64.b64encode(archive).decode()})
        assert "sha256" in session.heard()["error"]["message"]
        assert session.end() == (1, "")
    gone = sessions()
    gone.needs()
    gone.send(json.dumps(BRING).encode()[:999])
    assert gone.end() == (0, "")
    assert not Path(gone.root, "agents", SHA256).exists()


def test_first_sessions_at_once_begin_and_clear_away_a_killed_one(sessions: Begin, tmp_path: Path) -> None:
    killed = sessions(loader=changed(LOADER, "os.rename(temporary, folder)", "os.kill(os.getpid(), 9)"))
    killed.needs()
    killed.send(BRING)
    assert killed.process.wait(20) == -signal.SIGKILL
    agents = Path(killed.root, "agents")
    assert [path.name for path in agents.iterdir()] == [f".{SHA256}.{killed.process.pid}"]
    begun = [sessions() for _ in range(6)]
    for session in begun:
        session.send_status()
    for session in begun:
        if session.heard() == {"need": SHA256}:
            session.send(BRING)
            assert session.heard()["ok"] is True
    assert os.listdir(agents) == [SHA256]


@pytest.mark.skipif(not TOO_OLD, reason="no Python older than 3.10 is found here")
def test_an_interpreter_too_old_for_the_agent_is_named(sessions: Begin) -> None:
    session = sessions(python=str(TOO_OLD[0]))
    error = session.heard()["error"]
    assert "the agent needs 3.10 or later" in error["message"] and error["remedy"]
    assert session.end() == (1, "")


def test_a_root_that_cannot_be_written_or_known_and_a_damaged_agent_are_named(sessions: Begin) -> None:
    session = sessions("/proc/no")
    session.needs()
    session.send(BRING)
    error = session.heard()["error"]
    assert "/proc/no" in error["message"] and error["remedy"]
    assert session.end() == (1, "")
    assert "knows no such directory" in sessions("~no-such-user/x").heard()["error"]["message"]
    session = sessions()
    session.ask("status")
    session.end()
    folder = Path(session.root, "agents", SHA256)
    for broken in ("attempt_process.py", "protocol.py"):
        (folder / "host" / "agent" / broken).write_text("")
        assert sessions().ask("stop", run_id="a", grace_s=0)["error"]["remedy"].endswith(f"rm -r {folder}")


def test_on_a_full_disk_runs_can_still_be_looked_at_and_stopped(sessions: Begin, small_disk: Path) -> None:
    (small_disk / "rest").write_bytes(bytes(512 << 10))
    session = sessions(small_disk / "root")
    in_memory = Path(f"/dev/shm/tpu-stack-{os.getuid()}/agents/{SHA256}")
    made = in_memory if in_memory.parents[1].exists() else in_memory.parents[1]
    try:
        assert session.ask("status") == {"version": 1, "ok": True, "processes": []}
        assert session.ask("stop", run_id="run-1", grace_s=0)["stopped"] == []
        assert stat.S_IMODE(in_memory.parents[1].stat().st_mode) == 0o700
        refused = session.ask("write", path=str(small_disk / "file"), text="x")
        assert "No space left" in refused["error"]["message"]
    finally:
        subprocess.run(["rm", "-r", str(made)], check=True)


def test_an_idle_session_ends_by_itself(sessions: Begin) -> None:
    hurried = changed(LOADER, "IDLE_LIMIT_S = 900", "IDLE_LIMIT_S = 1")
    sessions().ask("status")
    before, after = sessions(loader=hurried), sessions(loader=hurried)
    after.ask("status")
    for idle in (before, after):
        assert idle.process.wait(20) == -signal.SIGALRM


def changed(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)
