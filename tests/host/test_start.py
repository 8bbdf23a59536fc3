"""A process is started once, in its own session, with the environment it was promised."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from host.agent import proc

AGENT = Path(proc.__file__).parent / "__main__.py"


def test_two_starts_at_once_start_one_process(agent: Any) -> None:
    request = agent.start_request('say("up"); live()')
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: agent("start", **request), range(4)))
    assert len({answer["pid"] for answer in answers}) == 1
    assert sorted(answer["already"] for answer in answers) == [False, True, True, True]


def test_a_second_start_of_an_ended_process_starts_nothing(agent: Any) -> None:
    first = agent.start('say("once")')
    agent.ended()
    second = agent.start('say("once")')
    assert second == {**first, "already": True}
    assert (agent.run_dir / "logs/0/host-0.log").read_text() == "once\n"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"argv": ["/nonexistent/program"]}, "no such executable: '/nonexistent/program'"),
        ({"argv": ["/"]}, "no such executable: '/'"),
        ({"cwd": "/nonexistent"}, "/nonexistent is not a directory"),
        ({"log_path": "/proc/no-log"}, "/proc/no-log cannot be written"),
        ({"cpus": [60000]}, "cpus [60000] are not all on this host"),
    ],
)
def test_a_start_that_came_to_nothing_can_be_tried_again(
    agent: Any, wrong: dict[str, Any], said: str
) -> None:
    request = agent.start_request('say("up")')
    status, message = agent.refusal("start", **{**request, **wrong})
    assert status == 1
    assert said in message
    assert agent("status")["processes"] == []
    assert agent("start", **request)["already"] is False


def test_a_start_that_was_killed_half_way_can_be_tried_again(agent: Any) -> None:
    agent.state_dir().mkdir(parents=True)
    (agent.state_dir() / "process.json.half").touch()
    assert agent.status()["state"] == "lost"
    assert agent.start('say("up")')["already"] is False


def test_a_job_sees_its_environment_and_nothing_of_the_agent_s_own_run(
    agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN_COORDINATOR", "of another run")
    monkeypatch.setenv("KEPT", "yes")
    agent.start("say(json.dumps(dict(os.environ)))")
    agent.ended()
    seen = json.loads((agent.run_dir / "logs/0/host-0.log").read_text())
    assert seen["RUN_CONTROL_DIR"] == str(agent.state_dir())
    assert seen["KEPT"] == "yes"
    assert {name for name in seen if name.startswith("RUN_")} == {
        "RUN_CONTROL_DIR",
        "RUN_DIR",
        "RUN_PROCESS_ID",
        "RUN_ATTEMPT",
    }


def test_no_secret_of_the_environment_is_left_on_the_disk(agent: Any) -> None:
    request = agent.start_request('say("up"); live()')
    request["env"]["TOKEN"] = "hunter2"
    agent("start", **request)
    files = [path for path in agent.root.rglob("*") if path.is_file()]
    assert files
    assert not any(b"hunter2" in path.read_bytes() for path in files)


def test_a_job_is_in_a_session_of_its_own_with_no_descriptor_but_the_log(agent: Any) -> None:
    started = agent.start_and_hear(
        'say(json.dumps([os.getsid(0), os.getpgid(0), sorted(os.listdir("/proc/self/fd"))]))'
    )
    agent.ended()
    session, group, descriptors = json.loads((agent.run_dir / "logs/0/host-0.log").read_text())
    assert session == group == started["pid"] == started["pgid"]
    assert descriptors == ["0", "1", "2", "3"]  # 3 is the listing's own


def test_a_caller_that_waits_for_the_end_of_the_output_is_not_kept(agent: Any) -> None:
    request = agent.start_request('say("up"); live()')
    body = json.dumps({"version": 1, "root": str(agent.root), **request})
    command = f"{sys.executable} -S -E {AGENT} start | cat"
    done = subprocess.run(
        ["bash", "-c", command], input=body, capture_output=True, text=True, timeout=10, check=True
    )
    assert json.loads(done.stdout)["ok"]


def test_a_job_gets_the_cpus_that_were_asked_for(agent: Any) -> None:
    cpu = max(os.sched_getaffinity(0))
    agent.start("say(sorted(os.sched_getaffinity(0)))", cpus=[cpu])
    agent.ended()
    assert (agent.run_dir / "logs/0/host-0.log").read_text() == f"[{cpu}]\n"


def test_a_later_process_of_the_same_number_is_not_taken_for_the_job(agent: Any) -> None:
    agent.start_and_hear('say("up"); live()')
    record = agent.record()
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as stranger:
        try:
            moved = {**record, "pid": stranger.pid, "pgid": stranger.pid, "supervisor_pid": stranger.pid}
            (agent.state_dir() / "process.json").write_text(json.dumps(moved))
            assert agent.status()["state"] == "lost"
            agent("stop", run_id="run-1", grace_s=0)
            status, message = agent.refusal("stacks", run_id="run-1", attempt=0, process_id=0, timeout_s=0)
            assert (status, "is not running" in message) == (1, True)
            assert stranger.poll() is None
        finally:
            stranger.kill()
            os.kill(record["supervisor_pid"], signal.SIGKILL)


def test_status_tells_all_runs_or_the_one_asked_for(agent: Any) -> None:
    agent.start('say("up")', 0)
    agent.start('say("up")', 1)
    agent.start('say("up")', 0, run_id="run-2", attempt=3)
    told = [(one["run_id"], one["attempt"], one["process_id"]) for one in agent("status")["processes"]]
    assert told == [("run-1", 0, 0), ("run-1", 0, 1), ("run-2", 3, 0)]
    assert len(agent("status", run_id="run-1", process_id=1)["processes"]) == 1
    assert agent("status", run_id="run-9")["processes"] == []


def test_a_stat_line_is_read_whatever_the_program_is_called() -> None:
    text = "12 (a) R 1 (b) c) S 1 12 12 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 777 0"
    assert proc.parse_stat(text) == ("S", 777)


def test_a_handler_is_seen_in_the_mask_of_caught_signals() -> None:
    assert proc.catches("Name:\tx\nSigCgt:\t0000000000000200\n", signal.SIGUSR1)
    assert not proc.catches("Name:\tx\nSigCgt:\t0000000000000100\n", signal.SIGUSR1)
    assert not proc.catches("", signal.SIGUSR1)


def test_the_agent_is_a_package_that_a_host_can_run_from_anywhere(tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    for package in ("host", "contracts"):
        shutil.copytree(AGENT.parents[2] / package, copy / package)
    body = json.dumps({"version": 1, "root": "~/agent"})
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(copy / "host" / "agent" / "__main__.py"), "status"],
        input=body,
        capture_output=True,
        text=True,
        check=True,
        env={"HOME": str(tmp_path)},
    )
    assert json.loads(done.stdout)["processes"] == []
