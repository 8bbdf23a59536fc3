"""A supervisor puts the end of its process on record everywhere, whatever the end was, and leaves nothing behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from contracts import fencing
from contracts.run_directory import RunDirectory
from host.agent import supervisor
from host.agent.attempt_process import Process, exit_record
from host.agent.proc import NO_MEMORY, oom_kills
from host.agent.storage import run_files
from host.agent.storage.run_files import RunFiles
from jobs.runtime.storage.bucket_files import files_of
from tests.host.conftest import CHECKOUT, cut_off
from tests.processes import is_alive
from tests.waiting import until

SEGFAULT = "os.kill(os.getpid(), signal.SIGSEGV)"
TAKEN = "port 99 is taken on this host; end the process that has it, or use another port"
LINES = "\n".join(f"line {n}" for n in range(11, 30))


@pytest.mark.parametrize(
    ("script", "code", "message", "error", "steps"),
    [
        (
            'beat("stepping", 41); say("step 41"); os.kill(os.getpid(), signal.SIGKILL)',
            None,
            "killed by signal 9 (SIGKILL)",
            "host 0: killed by signal 9 (SIGKILL)\nstep 41",
            41,
        ),
        (
            '[say("line %d" % n) for n in range(30)]; sys.exit("ValueError: no such vocabulary")',
            1,
            "exit code 1: ValueError: no such vocabulary",
            f"host 0: exit code 1: ValueError: no such vocabulary\n{LINES}",
            0,
        ),
        (  # what it says itself needs no exit code before it
            'say("Traceback"); beat("failed", 21, message="ValueError: no"); say("ValueError: no"); sys.exit(1)',
            1,
            "ValueError: no",
            "host 0: ValueError: no\nTraceback",
            21,
        ),
        (  # a job that says all itself is told in its words only
            'say("Traceback"); beat("failed", 21, message="lower it", says_all=True, warnings=["a"]); sys.exit(1)',
            1,
            "lower it",
            "host 0: lower it",
            21,
        ),
        (  # far above the stack traces of its threads
            f'say("Error in bind: Address already in use\\nport: 99" + "\\nstack" * 90); {SEGFAULT}',
            None,
            f"killed by signal 11 (SIGSEGV): {TAKEN}",
            f"host 0: killed by signal 11 (SIGSEGV): {TAKEN}",
            0,
        ),
        (
            'say("--steps: must be positive"); sys.exit(2)',
            2,
            "exit code 2: --steps: must be positive",
            "host 0: exit code 2: --steps: must be positive",
            0,
        ),
    ],
    ids=["killed", "failed", "own-words", "says-all", "recognised", "wrong-request"],
)
def test_a_bad_end_is_told_in_status_heartbeat_and_result(
    agent: Any, script: str, code: int | None, message: str, error: str, steps: int
) -> None:
    began = time.time()
    agent.start(script)
    ended, beat, result = agent.ended(), agent.heartbeat(), agent.result()
    assert result.get("warnings", []) == beat["warnings"]
    assert (ended["state"], ended["code"]) == ("exited", code)
    assert (ended["signal"] is None) == (code is not None)
    assert began <= ended["ended"] <= time.time()
    assert (beat["state"], beat["message"], beat["exit_code"]) == ("failed", message, code)
    assert beat["step"] == steps
    assert (result["outcome"], result["failed_host"], result["steps"]) == ("failed", 0, steps)
    assert (result["error"], result["wall_s"], result.get("request")) == (error, None, code == 2 or None)
    assert json.loads((agent.state_dir() / "exit.json").read_text())["code"] == code


def test_a_result_that_is_there_and_odd_heartbeats_beside_it_are_left_alone(agent: Any) -> None:
    beats = agent.run_dir / "heartbeats"
    beats.mkdir()
    odd = ['{"attempt": 0, "st', "[]", '{"attempt":0,"state":"failed","time":"x"}', "", "\0"]
    for rank, text in enumerate(odd, 1):
        (beats / f"host-{rank}.json").write_text(text)
    (beats / "host-8.json").mkdir()
    (beats / "host-9.json").symlink_to("nowhere")
    (agent.run_dir / "result.json").write_text('{"outcome": "done"}')
    agent.start("sys.exit(1)")
    assert agent.ended()["reason"] == "exit code 1"
    assert agent.result() == {"outcome": "done"}
    assert agent.heartbeat()["state"] == "failed"
    assert [path for path in agent.run_dir.glob(".*/**/*") if path.is_file()] == []


def test_whatever_a_process_leaves_behind_ends_with_it(agent: Any) -> None:
    leave = """
import subprocess
for options in ({}, {"preexec_fn": lambda: os.setpgid(0, 0)}, {"start_new_session": True}):
    say(subprocess.Popen(["sleep", "600"], **options).pid)
"""
    agent.start(leave)
    agent.ended()
    pids = [int(line) for line in agent.log().split()]
    assert len(pids) == 3
    until(lambda: not any(map(is_alive, pids)), limit_s=2)


def test_a_run_directory_that_vanished_does_not_end_the_supervision(agent: Any) -> None:
    log = agent.scripts / "job.log"
    vanish = 'import shutil; shutil.rmtree(run_dir); say("gone"); live()'
    started = agent.start_and_hear(vanish, log_path=str(log))
    os.kill(started["pid"], signal.SIGKILL)
    ended = agent.ended()
    assert (ended["state"], ended["signal"]) == ("exited", 9)
    assert not agent.run_dir.exists()
    assert "writing heartbeats/host-0.json" in (agent.state_dir() / "supervisor.log").read_text()


def test_a_full_disk_refuses_a_start_and_hides_no_end(agent: Any, small_disk: Path) -> None:
    agent.root = small_disk / "agent"
    agent.root.mkdir()
    (small_disk / "rest").write_bytes(bytes(500 << 10))
    fill = """
say("filling")
with open(os.environ["RUN_CONTROL_DIR"] + "/full", "wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)):
            pass
    except OSError as error:
        say(error)
sys.exit(5)
"""
    assert "No space left" in agent.refusal("start", **agent.start_request(fill))
    (small_disk / "rest").unlink()
    assert agent.start(fill)["already"] is False
    assert agent.ended()["code"] == 5
    assert f"the disk is full: {agent.root}/runs/" in agent.heartbeat()["message"]


def test_a_result_that_a_full_disk_refused_is_written_once_there_is_room(
    agent: Any, small_disk: Path
) -> None:
    agent.run_dir = small_disk / "run"
    agent.run_dir.mkdir()
    rest = small_disk / "rest"
    agent.start_and_hear(
        f"""
say("filling")
with open({str(rest)!r}, "wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)):
            pass
    except OSError:
        sys.exit(5)
"""
    )
    log = agent.state_dir() / "supervisor.log"
    until(lambda: log.read_text().count("writing result.json") >= 2)
    assert not (agent.run_dir / "result.json").exists()
    rest.unlink()
    until((agent.run_dir / "result.json").exists)
    assert agent.result()["error"] == "host 0: exit code 5: filling"
    assert agent.ended()["code"] == 5


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_process_without_supervisor_and_guard_is_stopped_whole(agent: Any, is_killed: bool) -> None:
    started = agent.start_and_hear('import subprocess; say(subprocess.Popen(["sleep", "600"]).pid); live()')
    grandchild = int(agent.log())
    cut_off(agent)
    assert (agent.status()["state"], agent.status()["supervised"]) == ("running", False)
    if is_killed:
        os.kill(started["pid"], signal.SIGKILL)
        until(lambda: agent.status()["state"] == "lost")
    assert is_alive(grandchild)
    assert agent.stop(5)["how"] == ("killed" if is_killed else "terminated")
    assert not is_alive(started["pid"]) and not is_alive(grandchild)
    assert agent.status()["state"] == ("lost" if is_killed else "exited")


def test_a_process_whose_supervisor_is_killed_is_ended_and_reported(agent: Any) -> None:
    started = agent.start_and_hear('beat("stepping", 3); say("up"); live()')
    os.killpg(agent.record()["supervisor_pid"], signal.SIGKILL)  # its whole session: the guard is in another
    until(lambda: agent.status()["state"] == "exited")
    assert not is_alive(started["pid"])
    until((agent.run_dir / "result.json").exists)
    assert agent.result()["error"] == "host 0: its supervisor was killed\nup"


def test_the_supervisor_survives_the_signals_of_a_closing_session(agent: Any) -> None:
    started = agent.start_and_hear('say("up"); live()')
    supervisor = agent.record()["supervisor_pid"]
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(supervisor, signum)
    until(lambda: (agent.state_dir() / "supervisor.log").read_text().count("not for the supervisor") == 3)
    os.kill(started["pid"], signal.SIGTERM)  # which the job did not inherit as ignored
    assert agent.ended()["signal"] == signal.SIGTERM


GUARDED = """
import os, signal, socket, sys
from host.agent.supervisor import start_guard
listener = socket.create_server(("127.0.0.1", 0))
start_guard(lambda: sys.stdin.readline(), [listener.fileno()])
print(listener.getsockname()[1], flush=True)
os.killpg(0, signal.SIGKILL)
"""


def test_a_guard_holds_no_port_of_its_supervisor() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", GUARDED],
        cwd=CHECKOUT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as supervisor:
        assert supervisor.stdout is not None and supervisor.stdin is not None
        port = int(supervisor.stdout.readline())
        assert supervisor.wait(20) == -signal.SIGKILL
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        supervisor.stdin.close()  # the guard ends, and with it the last who has the output open
        assert supervisor.stdout.read() == ""


def start_request(tmp_path: Path, **fields: Any) -> dict[str, Any]:
    """The part of a start request that says where the files of a run are: behind a URL, as in a bucket."""
    bucket = tmp_path / "bucket"
    (bucket / "logs" / "0").mkdir(parents=True)
    return {
        "run_dir": None,
        "env": {"RUN_DIR": f"file://{bucket}", "PYTHONPATH": str(CHECKOUT)},
        "argv": [sys.executable],
        "cwd": str(tmp_path),
        "log_path": str(tmp_path / "log"),
        "attempt": 0,
        "process_id": 1,
        "container": None,
        **fields,
    }


def test_a_bucket_gets_but_the_log_once_a_newer_attempt_has_begun_and_the_supervisor_learns_of_that(
    tmp_path: Path,
) -> None:
    files = RunFiles(start_request(tmp_path))
    (tmp_path / "log").write_text("one\n")
    fencing.take(RunDirectory(files.url, files_of(files.url)), 1, launch=1)
    assert files.look() is None
    files.publish({"beat.json": "{}"}, {"result.json": "{}"})
    assert files.look() == "attempt 1 of this run has begun since; attempt 0 ends"
    found = {path.name for path in (tmp_path / "bucket").rglob("*.*") if path.is_file()}
    assert found == {"host-1.log", "1.json"}


def test_a_bucket_gets_the_log_and_the_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, starts = subprocess.run, []

    def counted(*given: Any, **more: Any) -> Any:
        starts.append(given)
        return run(*given, **more)

    monkeypatch.setattr(subprocess, "run", counted)
    monkeypatch.setattr(run_files, "LOG_PERIOD_S", 0.05)
    files = RunFiles(start_request(tmp_path))
    log, delivered = tmp_path / "log", tmp_path / "bucket/logs/0/host-1.log"
    log.write_text("one\n")
    files.keep_log()
    until(lambda: delivered.exists() and delivered.read_text() == "one\n")
    delivered.unlink()
    before = len(starts)
    (tmp_path / "bucket" / "result.json").write_text("the job's own")
    files.publish({"beat.json": "{}"}, {"result.json": "the agent's", "first.json": "{}"})
    files.end_log()
    assert len(starts) == before + 1
    texts = {path.name: path.read_text() for path in (tmp_path / "bucket").rglob("*.*") if path.is_file()}
    own = {"beat.json": "{}", "result.json": "the job's own", "first.json": "{}"}
    assert texts == {**own, "host-1.log": "one\n"}


@pytest.mark.parametrize(
    ("wrong", "is_noted"),
    [
        ({"argv": ["/no/such/python"]}, True),
        ({"argv": ["/bin/false"]}, True),
        ({"run_dir": "/proc/no/such/place"}, True),
        ({"env": {}}, False),  # a run without a directory misses nothing
    ],
)
def test_what_cannot_be_written_is_noted_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: dict[str, Any], is_noted: bool
) -> None:
    RunFiles(start_request(tmp_path, **wrong)).publish({"beat.json": "{}"}, {"result.json": "{}"})
    assert bool(capsys.readouterr().err) == is_noted


SPENT = "its budget of 5.00 USD is spent"
BUDGET = {"budget_s": 1, "budget_reason": SPENT}


def test_a_run_that_has_spent_its_budget_is_stopped_with_the_reason_whatever_its_job_says(agent: Any) -> None:
    ends = "signal.signal(signal.SIGTERM, lambda *_: (beat('stepping', 7), os._exit(9))); live()"
    agent.start(ends, run_dir=str(agent.run_dir), **BUDGET)
    ended = agent.ended()
    assert 0.9 < ended["ended"] - ended["started"] < 4
    assert agent.heartbeat()["state"] == "stopped"
    result = agent.result()
    assert (result["outcome"], result["out_of_budget"], result["reason"]) == ("stopped", True, SPENT)

    # A job that saves writes its own result, which is left as it is.
    (agent.run_dir / "result.json").unlink()
    saves = """
def save(*_):
    reason = open(os.environ["RUN_CONTROL_DIR"] + "/stop-reason").read()
    assert os.path.exists(os.environ["RUN_CONTROL_DIR"] + "/stop-requested")
    json.dump({"outcome": "stopped", "reason": reason, "steps": 3}, open(run_dir + "/result.json", "w"))
    os._exit(75)
signal.signal(signal.SIGTERM, save); live()
"""
    agent.start(saves, attempt=1, **BUDGET)
    assert agent.ended(attempt=1)["code"] == 75
    assert agent.result() == {"outcome": "stopped", "reason": SPENT, "steps": 3}


def test_the_budget_tells_process_0_first_and_kills_what_does_not_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(supervisor, "ask_to_stop", lambda process: asked.append(process.process_id))
    monkeypatch.setattr(Process, "kill", lambda process: asked.append("killed"))
    looks = {}
    for rank in (0, 1):
        process = Process(str(tmp_path), "run-1", 0, rank)
        Path(process.dir).mkdir(parents=True)
        began_s = time.monotonic()
        budget = supervisor.Budget(process, BUDGET)
        for after_s in (0, 1.1, 2, 31.1, 122, 152):
            budget.look(began_s + after_s)
            looks[rank, after_s] = list(asked)
        asked.clear()
    assert [len(looks[0, after_s]) for after_s in (0, 1.1, 31.1, 122, 152)] == [0, 1, 1, 2, 2]
    assert [len(looks[1, after_s]) for after_s in (2, 31.1, 122, 152)] == [0, 1, 1, 2]
    without = supervisor.Budget(process, {"budget_s": None, "budget_reason": None})
    without.look(float("1e12"))
    assert not asked


def test_a_run_saves_and_leaves_as_if_preempted_before_its_slice_is_taken_back(agent: Any) -> None:
    saves = "signal.signal(signal.SIGTERM, lambda *_: (beat('saving', 7), os._exit(75))); live()"
    ends_s = time.time() + supervisor.SLICE_END_NOTICE_S + 1
    agent.start(saves, run_dir=str(agent.run_dir), slice_ends_s=ends_s)
    ended = agent.ended()
    assert ended["code"] == 75
    assert ends_s - supervisor.SLICE_END_NOTICE_S <= ended["ended"]
    assert ended["ended"] - ended["started"] < 5
    assert not (agent.run_dir / "result.json").exists(), "the job's own, which says preempted, stays"


def test_processes_killed_for_want_of_memory_are_counted_in_the_own_control_group(tmp_path: Path) -> None:
    proc, group = tmp_path / "cgroup", tmp_path / "kubepods" / "pod1"
    proc.write_text("1:name=systemd:/x\n0::/kubepods/pod1\n")
    assert oom_kills(str(proc), str(tmp_path)) == 0, "no such group"
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert oom_kills(str(proc), str(tmp_path)) == 1, "of version 1"
    group.mkdir(parents=True)
    (group / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert oom_kills(str(proc), str(tmp_path)) == 2


@pytest.mark.parametrize(
    ("ended", "order", "kills", "is_told"),
    [
        ({"code": None, "signal": 9}, None, 3, True),
        ({"code": 137, "signal": None}, None, 3, True),
        ({"code": 1, "signal": None}, None, 2, False),
        ({"code": 0, "signal": None}, None, 3, False),
        ({"code": None, "signal": 9}, {"outcome": "failed"}, 3, False),
    ],
)
def test_an_end_is_for_want_of_memory_where_the_kernel_killed_meanwhile_and_nobody_else_ended_it(
    ended: dict[str, Any],
    order: dict[str, Any] | None,
    kills: int,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "oom_kills", lambda: kills)
    assert supervisor.lacked_memory(ended, order, 2) is is_told


@pytest.mark.parametrize(
    ("code", "says_all", "words", "message"),
    [
        (1, True, NO_MEMORY, "lower it"),
        (1, False, NO_MEMORY, f"exit code 1: {NO_MEMORY}"),
        (None, False, None, "killed by signal 9 (SIGKILL): lower it"),
    ],
)
def test_what_a_process_said_of_its_end_is_not_lost(
    code: int | None, says_all: bool, words: str | None, message: str, tmp_path: Path
) -> None:
    process = Process(str(tmp_path), "r", 0, 0)
    process.record = {"pid": 1}
    Path(process.dir).mkdir(parents=True)
    said = {"state": "failed", "message": "lower it", "says_all": says_all, "step": 3, "time": 1.0}
    Path(process.beat_path).write_text(json.dumps(said))
    signum = None if code else 9
    ended = {"code": code, "signal": signum, "time": 1.0, "words": words}
    record = exit_record(code, signum, 1.0, supervisor.end_cause(ended), [])
    assert supervisor.process_ending(process, None, record, ended, None)["beat"]["message"] == message
