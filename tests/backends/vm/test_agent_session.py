"""Sessions with an agent: brought once, one process for many questions, and no question asked twice."""

import hashlib
import json
import os
import signal
import time
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest

from backends.vm import agent_session as sessions
from backends.vm.agent_session import AgentCode, agent_code, archive
from backends.vm.connection import Ssh
from backends.vm.transport import SshTransport
from launch.hosts import Completed, HostError
from tests.backends.vm.conftest import Server
from tests.processes import all_end

STAND_IN = """
import json, os, sys, time
def serve(first, requests, answers, idle_limit_s):
    line = first
    while line:
        request = json.loads(line)
        with open(os.path.expanduser("~/asked"), "a") as asked:
            asked.write(request["verb"] + "\\n")
        if request["verb"] == "sleep":
            time.sleep(request["s"])
        if request["verb"] == "end":
            print("Segmentation fault", file=sys.stderr)
            sys.exit(9)
        if request["verb"] == "noise":
            sys.stderr.write("x" * 1_000_000)
        answers.write(json.dumps({"ok": True, "pid": os.getpid(), "text": "y" * request.get("y", 0)}) + "\\n")
        answers.flush()
        line = requests.readline()
    return 0
"""


@pytest.fixture
def server(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> Server:
    """A host, to which an agent goes that does what these tests need; the loader is the real one."""
    code = code_of({"host/agent/protocol.py": STAND_IN.encode()})
    monkeypatch.setattr(sessions, "agent_code", lambda: code)
    return serve()


def code_of(files: dict[str, bytes]) -> AgentCode:
    packed = archive(files)
    answer = json.dumps({"archive_base64": b64encode(packed).decode()}).encode() + b"\n"
    return AgentCode(loader=agent_code().loader, sha256=hashlib.sha256(packed).hexdigest(), answer=answer)


@pytest.fixture
def host(server: Server, ssh: Ssh) -> SshTransport:
    return SshTransport(server.access, ssh)


def ask(host: SshTransport, verb: str, timeout_s: float = 60, **request: Any) -> Completed:
    text = json.dumps({"version": 1, **request})
    return host.ask(verb, text, timeout_s=timeout_s).result(90)


def pid_of(answer: Completed) -> int:
    assert answer.exit_code == 0, answer
    pid: int = json.loads(answer.stdout)["pid"]
    return pid


def test_the_real_agent_is_brought_once_and_answers(serve: Callable[..., Server], ssh: Ssh) -> None:
    server = serve()
    host = SshTransport(server.access, ssh)
    root = "~/.cache/tpu-stack/agent"
    for _ in range(2):
        done = ask(host, "list", root=root, path=str(server.home))
        assert json.loads(done.stdout)["names"] == [".cache"]
    assert host.round_trips == 3
    [found] = (server.home / ".cache/tpu-stack/agent/agents").iterdir()
    assert found.name == agent_code().sha256
    with Ssh() as again:
        second = SshTransport(server.access, again)
        ask(second, "list", root=root, path="/nowhere")
        assert second.round_trips == 1


def test_one_process_answers_one_question_after_the_other_and_four_answer_those_that_come_at_once(
    host: SshTransport, server: Server
) -> None:
    assert len({pid_of(ask(host, "echo")) for _ in range(3)}) == 1
    pending = [host.ask("sleep", '{"s": 1}', timeout_s=60) for _ in range(6)]
    pids = [pid_of(each.result(60)) for each in pending]
    assert len(set(pids)) == 4
    assert server.logins() == 1


def test_a_question_without_an_answer_in_time_ends_its_session_alone(host: SshTransport) -> None:
    first = pid_of(ask(host, "echo"))
    before_s = time.monotonic()
    assert ask(host, "sleep", timeout_s=0.5, s=3).exit_code is None
    assert time.monotonic() - before_s < 3
    assert pid_of(ask(host, "echo")) != first
    assert all_end([first])


def test_an_agent_that_ends_is_told_with_its_last_words_and_no_session_that_ended_is_used(
    host: SshTransport, server: Server
) -> None:
    assert ask(host, "end") == Completed(exit_code=9, stdout="", stderr="Segmentation fault\n")
    assert (server.home / "asked").read_text() == "end\n"
    first = pid_of(ask(host, "echo"))
    os.kill(first, signal.SIGKILL)
    assert all_end([first])
    host.begin(["true"], "", timeout_s=30).result(30)
    assert pid_of(ask(host, "echo")) != first


def test_a_connection_that_is_lost_while_the_agent_is_asked_is_an_error_and_the_next_call_connects_anew(
    host: SshTransport, server: Server
) -> None:
    pid_of(ask(host, "echo"))
    future = host.ask("sleep", '{"s": 5}', timeout_s=60)
    until_s = time.monotonic() + 30
    while "sleep" not in (server.home / "asked").read_text():
        assert time.monotonic() < until_s
        time.sleep(0.02)
    server.cut()
    with pytest.raises(HostError, match="the connection was lost while the agent was asked"):
        future.result(30)
    pid_of(ask(host, "echo"))
    assert (server.home / "asked").read_text().split() == ["echo", "sleep", "echo"]


def test_long_questions_and_answers_pass_and_endless_ones_are_refused(
    host: SshTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):  # nor is it held up by what it says aside
        pid_of(ask(host, "noise"))
    done = ask(host, "echo", y=3_000_000, x="z" * 3_000_000)
    assert len(json.loads(done.stdout)["text"]) == 3_000_000
    monkeypatch.setattr(sessions, "LONGEST_ANSWER_BYTES", 1_000_000)
    with pytest.raises(HostError, match="the agent's answer is longer than"):
        ask(host, "echo", y=3_000_000)
    pid_of(ask(host, "echo"))


def test_a_host_without_python_or_a_place_for_the_agent_is_said(
    host: SshTransport, ssh: Ssh, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = SshTransport(host.access, ssh, agent_root="/proc/nowhere")
    answer = json.loads(elsewhere.ask("echo", "{}", timeout_s=60).result(60).stdout)  # of the loader
    assert answer["ok"] is False
    assert "/proc/nowhere" in answer["error"]["message"]
    monkeypatch.setattr(sessions, "PYTHON", "no-such-python")
    with pytest.raises(HostError, match="host-0: no-such-python is not there → install it"):
        ask(host, "echo")
