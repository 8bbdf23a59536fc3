"""Requests and responses: whatever comes in, one JSON object goes out, with the exit status that fits it."""

from __future__ import annotations

import ast
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host.agent import protocol as module

ONE: dict[str, Any] = {"run_id": "run-1", "attempt": 0, "process_id": 0}
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
    return {
        "preflight": {
            "python": sys.executable,
            "modules": [],
            "platform": "cpu",
            "run_dir": None,
            "cache_dir": root + "/cache",
            "min_free_bytes": 1,
            "port": None,
            "time": 0,
            "max_clock_offset_s": 1,
            "bundle": None,
            "proc_root": root,
        },
        "stage": {"sha256": "0" * 64, "archive_base64": None},
        "start": {
            **ONE,
            "argv": ["/nonexistent/program"],
            "env": {},
            "cwd": root,
            "log_path": root + "/log",
            "run_dir": None,
            "num_processes": 1,
            "cpus": None,
        },
        "status": {"run_id": None},
        "stop": {"run_id": "run-1", "grace_s": 0},
        "logs": {**ONE, "offset": 0, "limit_bytes": 100},
        "stacks": {**ONE, "timeout_s": 0},
    }


VERBS = sorted(requests(""))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), verb=st.sampled_from([verb for verb in VERBS if verb not in ("preflight", "start")]))
def test_no_request_makes_a_bug_show(data: st.DataObject, verb: str) -> None:
    with tempfile.TemporaryDirectory() as root:
        request = {"version": 1, "root": root, **requests(root)[verb]}
        name = data.draw(st.sampled_from(sorted(request)) | st.text())
        request[name] = data.draw(JUNK)
        response, status = module.respond(verb, json.dumps(request).encode())
    assert json.loads(json.dumps(response))["version"] == 1
    assert response["ok"] is (status == 0)
    if status:
        assert set(response["error"]) == {"message", "remedy"}
        assert "bug" not in response["error"]["message"]


@settings(max_examples=25, deadline=None)
@given(data=st.data(), verb=st.sampled_from(["preflight", "start"]))
def test_no_request_that_starts_programs_makes_a_bug_show(data: st.DataObject, verb: str) -> None:
    with tempfile.TemporaryDirectory() as root:
        request = {"version": 1, "root": root, **requests(root)[verb]}
        name = data.draw(st.sampled_from(sorted(set(request) - {"argv", "python"})))
        request[name] = data.draw(JUNK)
        response, _ = module.respond(verb, json.dumps(request).encode())
    assert response["ok"] or "bug" not in response["error"]["message"]


@settings(max_examples=200, deadline=None)
@given(
    verb=st.sampled_from(VERBS) | st.text(),
    body=st.binary() | JUNK.map(lambda value: json.dumps(value).encode()),
)
def test_what_is_no_request_is_refused(verb: str, body: bytes) -> None:
    response, status = module.respond(verb, body)
    assert (response["ok"], status) == (False, 2)


@pytest.mark.parametrize(
    "path", ["/tmp/a\0b", "/tmp/\ud800", "relative", "", "~nobody-of-that-name/x"], ids=ascii
)
def test_a_path_that_no_host_can_have_is_refused(agent: Any, path: str) -> None:
    assert agent.refusal("status", root=path)[0] == 2


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b'{"version": 1, "root": NaN}',
        b'{"version": 1' + b"0" * 9999 + b"}",
        b"[]",
    ],
)
def test_what_is_not_json_is_refused_on_every_python(any_agent: Any, body: bytes) -> None:
    status, out, err = any_agent.raw("status", body)
    assert (status, json.loads(out)["ok"], err) == (2, False, "")


def test_an_unknown_verb_is_answered_with_the_known_ones(agent: Any) -> None:
    status, response = agent.ask("launch")
    assert status == 2
    assert all(verb in response["error"]["remedy"] for verb in VERBS)


def test_another_version_is_refused_and_both_are_named(agent: Any) -> None:
    status, message = agent.refusal("status", version=7)
    assert status == 2
    assert "version 7" in message and "version 1" in message


def test_all_mistakes_of_a_request_are_named_at_once(agent: Any) -> None:
    status, message = agent.refusal("logs", run_id="../x", attempt=-1, process_id=True, offset=0)
    assert status == 2
    for mistake in ('run_id is "../x"', "attempt is -1", "process_id is true", "limit_bytes is missing"):
        assert mistake in message


def test_a_wrong_environment_is_not_repeated_in_the_message(agent: Any) -> None:
    message = agent.refusal("start", **{**agent.start_request(""), "env": {"A=B": "hunter2"}})[1]
    assert "env" in message and "hunter2" not in message


def test_a_bug_is_told_without_a_traceback_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(request: object) -> dict[str, object]:
        raise KeyError("oh")

    monkeypatch.setattr("host.agent.process.status", broken)
    response, status = module.respond("status", json.dumps({"version": 1, "root": str(tmp_path)}).encode())
    assert (response["ok"], status) == (False, 1)
    assert "KeyError" in response["error"]["message"]
    captured = capsys.readouterr()
    assert "Traceback" in captured.err and captured.out == ""


def test_a_root_that_cannot_be_made_is_a_failure_not_a_wrong_request(agent: Any) -> None:
    agent.root.write_text("a file")
    status, message = agent.refusal("start", **agent.start_request(""))
    assert status == 1
    assert str(agent.root) in message


def test_every_verb_works_on_every_python(any_agent: Any, until: Any) -> None:
    agent = any_agent
    checks = agent("preflight", **requests(str(agent.root))["preflight"])
    assert checks["facts"]["agent_sha256"]
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
    (stopped,) = agent("stop", run_id="run-1", grace_s=10)["stopped"]
    assert (stopped["how"], stopped["code"]) == ("exited by itself", 75)
    assert agent.ended()["reason"] == "exit code 75"
    assert not (agent.run_dir / "result.json").exists()


def test_the_agent_imports_only_the_standard_library_and_the_contracts() -> None:
    names = set()
    for path in Path(module.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module or "")
    assert {name.partition(".")[0] for name in names} <= {*sys.stdlib_module_names, "contracts"}
