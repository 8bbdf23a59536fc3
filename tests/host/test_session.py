"""A session: one process of a host answers line by line, and brings its agent along where it is missing."""

from __future__ import annotations

import base64
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.ssh.agent_session import agent_code

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

    def heard(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

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


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    made: list[Session] = []

    def begin(root: Path | str = tmp_path / "root", **more: Any) -> Session:
        made.append(Session(root, **more))
        return made[-1]

    yield begin
    for session in made:
        session.process.kill()
        session.process.communicate()


def test_a_session_brings_its_agent_once_and_answers_line_by_line(
    any_agent: Any, sessions: Callable[..., Session]
) -> None:
    first = sessions(any_agent.root, python=any_agent.python)
    first.send({"version": 1, "root": str(any_agent.root), "verb": "status"})
    assert first.heard() == {"need": SHA256}
    first.send(BRING)
    assert first.heard() == {"version": 1, "ok": True, "processes": []}
    assert first.ask("list", path=str(any_agent.root / "agents"))["names"] == [SHA256]
    assert first.end() == (0, "")
    second = sessions(any_agent.root, python=any_agent.python)
    second.send({"version": 1, "root": str(any_agent.root), "verb": "status"})
    assert second.heard()["ok"] is True
    assert second.end() == (0, "")


def test_requests_that_are_sent_before_the_first_answer_are_answered_in_order(
    sessions: Callable[..., Session],
) -> None:
    session = sessions()
    session.ask("status")
    for number in range(20):
        session.send(
            {"version": 1, "root": session.root, "verb": "list", "path": f"/no/{number}", "x": number}
        )
        session.send(b"not json\n")
    answers = [session.heard()["ok"] for _ in range(40)]
    assert answers == [True, False] * 20
    assert session.end() == (0, "")


@pytest.mark.parametrize(
    "line", [b"\n", b"[1]\n", b"\xff\n", b"{}\n", b'{"verb": ["x"]}\n', b"[" * 99999 + b"\n"]
)
def test_a_bad_line_is_an_error_and_not_the_end(sessions: Callable[..., Session], line: bytes) -> None:
    session = sessions()
    session.ask("status")
    session.send(line)
    answer = session.heard()
    assert answer["ok"] is False
    assert answer["error"]["remedy"] and "bug" not in answer["error"]["message"]
    assert session.ask("status")["ok"] is True


def test_a_request_whose_end_never_came_is_not_carried_out(
    sessions: Callable[..., Session], tmp_path: Path
) -> None:
    session = sessions()
    session.ask("status")
    target = tmp_path / "file"
    whole = {"version": 1, "root": session.root, "verb": "write", "path": str(target), "text": "x"}
    session.send(json.dumps(whole).encode())
    assert session.end() == (0, "")
    assert not target.exists()


def test_a_launcher_that_goes_away_before_the_answer_leaves_no_complaint(
    sessions: Callable[..., Session],
) -> None:
    session = sessions()
    session.ask("status")
    assert session.process.stdout is not None
    session.process.stdout.close()
    session.send({"version": 1, "root": session.root, "verb": "status"})
    assert session.process.wait(20) == 0
    assert session.process.stderr is not None
    assert session.process.stderr.read() == b""


@pytest.mark.parametrize("archive", [b"other", b"", ARCHIVE[:-1]], ids=["other", "empty", "torn"])
def test_an_agent_that_did_not_arrive_whole_is_never_run(
    sessions: Callable[..., Session], archive: bytes
) -> None:
    session = sessions()
    session.send({"version": 1, "root": session.root, "verb": "status"})
    assert session.heard() == {"need": SHA256}
    session.send({"archive_base64": base64.b64encode(archive).decode()})
    assert "sha256" in session.heard()["error"]["message"]
    assert session.end() == (1, "")
    assert not Path(session.root, "agents", SHA256).exists()


def test_a_launcher_that_goes_away_while_it_brings_the_agent_leaves_nothing(
    sessions: Callable[..., Session],
) -> None:
    session = sessions()
    session.send({"version": 1, "root": session.root, "verb": "status"})
    assert session.heard() == {"need": SHA256}
    session.send(json.dumps(BRING).encode()[:999])
    assert session.end() == (0, "")
    assert not Path(session.root).exists()


def test_many_first_sessions_at_once_all_begin(sessions: Callable[..., Session]) -> None:
    begun = [sessions() for _ in range(6)]
    for session in begun:
        session.send({"version": 1, "root": session.root, "verb": "status"})
    for session in begun:
        if session.heard() == {"need": SHA256}:
            session.send(BRING)
            assert session.heard()["ok"] is True
    assert os.listdir(Path(begun[0].root, "agents")) == [SHA256]


def test_what_a_killed_unpacking_left_is_cleared_away(
    sessions: Callable[..., Session], tmp_path: Path
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = tmp_path / "root" / "agents" / f".{SHA256}.{ended.pid}"
    left.mkdir(parents=True)
    assert sessions().ask("status")["ok"] is True
    assert not left.exists()


@pytest.mark.skipif(not TOO_OLD, reason="no Python older than 3.10 is found here")
def test_an_interpreter_too_old_for_the_agent_is_named(sessions: Callable[..., Session]) -> None:
    session = sessions(python=str(TOO_OLD[0]))
    error = session.heard()["error"]
    assert "the agent needs 3.10 or later" in error["message"] and error["remedy"]
    assert session.end() == (1, "")


def test_a_root_that_cannot_be_written_is_named(sessions: Callable[..., Session]) -> None:
    session = sessions("/proc/no")
    session.send({"version": 1, "root": "/proc/no", "verb": "status"})
    assert session.heard() == {"need": SHA256}
    session.send(BRING)
    error = session.heard()["error"]
    assert "/proc/no" in error["message"] and error["remedy"]
    assert session.end() == (1, "")


def test_a_home_directory_that_nobody_knows_is_refused(sessions: Callable[..., Session]) -> None:
    session = sessions("~no-such-user/x")
    assert "knows no such directory" in session.heard()["error"]["message"]


def test_a_damaged_agent_is_named_with_its_folder(sessions: Callable[..., Session]) -> None:
    session = sessions()
    session.ask("status")
    session.end()
    folder = Path(session.root, "agents", SHA256)
    for broken in ("process.py", "protocol.py"):
        (folder / "host" / "agent" / broken).write_text("")
        again = sessions()
        assert again.ask("stop", run_id="a", grace_s=0)["error"]["remedy"].endswith(f"rm -r {folder}")


def test_on_a_full_disk_runs_can_still_be_looked_at_and_stopped(
    sessions: Callable[..., Session], small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("asks", [False, True])
def test_an_idle_session_ends_by_itself(sessions: Callable[..., Session], asks: bool) -> None:
    sessions().ask("status")
    idle = sessions(loader=changed(LOADER, "IDLE_LIMIT_S = 900", "IDLE_LIMIT_S = 1"))
    if asks:
        idle.ask("status")
    assert idle.process.wait(20) == -signal.SIGALRM


def test_an_unpacking_that_was_killed_is_never_taken_for_an_agent(sessions: Callable[..., Session]) -> None:
    killed = sessions(loader=changed(LOADER, "os.rename(beside, folder)", "os.kill(os.getpid(), 9)"))
    killed.send({"version": 1, "root": killed.root, "verb": "status"})
    assert killed.heard() == {"need": SHA256}
    killed.send(BRING)
    assert killed.process.wait(20) == -signal.SIGKILL
    agents = Path(killed.root, "agents")
    assert [path.name for path in agents.iterdir()] == [f".{SHA256}.{killed.process.pid}"]
    assert sessions().ask("status")["ok"] is True
    assert os.listdir(agents) == [SHA256]


def changed(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)
