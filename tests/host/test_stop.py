"""A stop gives time for a checkpoint, then frees everything, and says which of the two it was."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

SAVES = """
def save(*_):
    say("saving %s" % os.path.exists(os.environ["RUN_CONTROL_DIR"] + "/stop-requested"))
    time.sleep(0.5)
    say("saved")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
say("up")
live()
"""
STUBBORN = 'signal.signal(signal.SIGTERM, signal.SIG_IGN); say("up"); live()'


def log_of(agent: Any, process_id: int = 0) -> str:
    return str((agent.run_dir / f"logs/0/host-{process_id}.log").read_text())


def test_a_job_that_saves_gets_the_time_for_it_and_knows_that_the_stop_was_wanted(agent: Any) -> None:
    agent.start_and_hear(SAVES)
    (stopped,) = agent("stop", run_id="run-1", grace_s=20)["stopped"]
    assert (stopped["how"], stopped["code"], stopped["signal"]) == ("exited by itself", 75, None)
    assert log_of(agent) == "up\nsaving True\nsaved\n"


def test_a_job_that_ignores_the_stop_is_killed_when_its_time_is_up(agent: Any, is_running: Any) -> None:
    started = agent.start_and_hear(STUBBORN)
    before = time.monotonic()
    (stopped,) = agent("stop", run_id="run-1", grace_s=0.5)["stopped"]
    assert 0.5 < time.monotonic() - before < 5
    assert (stopped["how"], stopped["signal"]) == ("killed", 9)
    assert not is_running(started["pid"])


def test_a_wanted_stop_is_never_told_as_a_failure(agent: Any) -> None:
    agent.start_and_hear(STUBBORN)
    agent("stop", run_id="run-1", grace_s=0)
    agent.ended()
    assert agent.heartbeat()["state"] == "stopped"
    assert not (agent.run_dir / "result.json").exists()


def test_a_second_stop_finds_nothing_running(agent: Any) -> None:
    agent.start_and_hear('say("up"); live()')
    assert [one["how"] for one in agent("stop", run_id="run-1", grace_s=5)["stopped"]] == ["terminated"]
    assert [one["how"] for one in agent("stop", run_id="run-1", grace_s=5)["stopped"]] == ["not running"]
    assert agent("stop", run_id="run-9", grace_s=5)["stopped"] == []


def test_two_stops_at_once_send_one_sigterm(agent: Any) -> None:
    agent.start_and_hear(SAVES)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: agent("stop", run_id="run-1", grace_s=20), range(3)))
    assert {answer["stopped"][0]["code"] for answer in answers} == {75}
    assert log_of(agent).count("saving") == 1


def test_the_children_of_a_job_live_until_it_has_saved(agent: Any, is_running: Any, until: Any) -> None:
    parent = """
import subprocess
child = subprocess.Popen(["sleep", "600"])
def save(*_):
    time.sleep(0.3)
    say("child %d %s" % (child.pid, child.poll()))
    os._exit(75)
signal.signal(signal.SIGTERM, save)
say("up")
live()
"""
    agent.start_and_hear(parent)
    agent("stop", run_id="run-1", grace_s=20)
    _, pid, code = log_of(agent).splitlines()[1].split()
    assert code == "None"
    until(lambda: not is_running(int(pid)))


def test_a_stop_reaches_every_process_of_the_attempts_asked_for(agent: Any) -> None:
    agent.start_and_hear('say("up"); live()', 0)
    agent.start_and_hear('say("up"); live()', 1)
    agent.start_and_hear('say("up"); live()', 0, attempt=1)
    stopped = agent("stop", run_id="run-1", attempt=0, grace_s=5)["stopped"]
    assert [(one["process_id"], one["how"]) for one in stopped] == [(0, "terminated"), (1, "terminated")]
    assert agent.status(0, attempt=1)["state"] == "running"


@pytest.mark.parametrize("job", [SAVES, STUBBORN])
def test_what_is_left_of_a_lost_process_is_cleared_away(
    agent: Any, is_running: Any, until: Any, job: str
) -> None:
    agent.start_and_hear('import subprocess; say(subprocess.Popen(["sleep", "600"]).pid); live()')
    grandchild = int(log_of(agent))
    os.kill(agent.record()["supervisor_pid"], signal.SIGKILL)
    until(lambda: not agent.status()["supervised"])
    os.kill(agent.record()["pid"], signal.SIGKILL)
    until(lambda: agent.status()["state"] == "lost")
    assert is_running(grandchild)
    agent("stop", run_id="run-1", grace_s=0)
    assert not is_running(grandchild)


def test_a_full_disk_keeps_no_job_from_being_stopped(agent: Any, small_disk: Path) -> None:
    agent.root = small_disk / "agent"
    agent.start_and_hear(SAVES)
    room = os.statvfs(small_disk)
    (small_disk / "rest").write_bytes(bytes(room.f_bfree * room.f_frsize))
    assert agent.status()["state"] == "running"
    (stopped,) = agent("stop", run_id="run-1", grace_s=20)["stopped"]
    assert (stopped["how"], stopped["code"]) == ("exited by itself", 75)
    assert log_of(agent).count("saving") == 1


def test_a_stop_that_cannot_be_written_down_is_sent_all_the_same(agent: Any) -> None:
    agent.start_and_hear(SAVES)
    (agent.state_dir() / "stop-requested").mkdir()  # stands for a disk on which nothing can be made any more
    (stopped,) = agent("stop", run_id="run-1", grace_s=20)["stopped"]
    assert stopped["code"] == 75


def test_a_frozen_process_can_be_stopped(agent: Any, is_running: Any) -> None:
    started = agent.start_and_hear('say("up"); live()')
    os.kill(started["pid"], signal.SIGSTOP)
    (stopped,) = agent("stop", run_id="run-1", grace_s=0.2)["stopped"]
    assert stopped["how"] == "killed"
    assert not is_running(started["pid"])
