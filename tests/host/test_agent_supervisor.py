"""The end of a process is always on record, is told to its siblings, and takes them down."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from contracts import run_directory
from host.agent import files


def test_a_killed_process_is_reported_with_its_signal_and_its_last_step(agent: Any) -> None:
    started = agent.start_and_hear('beat("stepping", 41); say("step 41"); live()')
    before = time.time()
    os.kill(started["pid"], signal.SIGKILL)
    ended = agent.ended()
    assert (ended["state"], ended["code"], ended["signal"]) == ("exited", None, 9)
    assert before <= ended["ended"] <= before + 1
    beat = agent.heartbeat()
    assert (beat["state"], beat["step"], beat["exit_code"]) == ("failed", 41, None)
    assert beat["message"] == "killed by signal 9 (SIGKILL)"
    result = agent.result()
    assert (result["outcome"], result["failed_host"], result["steps"]) == ("failed", 0, 41)
    assert result["error"] == "host 0: killed by signal 9 (SIGKILL)\nstep 41"
    assert result["wall_s"] is None
    assert "request" not in result


def test_one_killed_process_takes_its_siblings_down_within_five_seconds(agent: Any, is_running: Any) -> None:
    agent.start_and_hear('beat("stepping", 7); say("up"); live()', 0)
    sibling = agent.start_and_hear('beat("stepping", 7); say("up"); live()', 1)
    killed_at = time.time()
    os.kill(agent.record(0)["pid"], signal.SIGKILL)
    ended = agent.ended(1)
    assert ended["ended"] - killed_at < 5
    assert not is_running(sibling["pid"])
    assert ended["reason"] == "stopped because host 0 failed: killed by signal 9 (SIGKILL)"
    assert agent.heartbeat(1)["exit_code"] == 76
    assert agent.result()["failed_host"] == 0


def test_a_sibling_that_ends_because_its_peer_died_is_not_to_blame(agent: Any) -> None:
    agent.start_and_hear('beat("stepping", 1); say("up"); live()', 0)
    lost_peer = """
say("up")
def others():
    try:
        return json.load(open(run_dir + "/heartbeats/host-0.json"))["state"]
    except (OSError, ValueError, KeyError):
        return ""
while others() != "failed":
    time.sleep(0.005)
sys.exit("lost host 0")
"""
    agent.start_and_hear(lost_peer, 1)
    os.kill(agent.record(0)["pid"], signal.SIGKILL)
    # By itself as a rule; on a machine that is busy for a whole second its supervisor is faster, and that is right too.
    assert agent.ended(1)["code"] in (1, None)
    agent.ended(0)
    assert agent.result()["failed_host"] == 0


def test_who_failed_first_is_to_blame_even_if_it_is_told_last(agent: Any, until: Any) -> None:
    agent.start('say("up"); sys.exit(1)', 1, settle_s=3)
    until((agent.run_dir / "heartbeats" / "host-1.json").exists)
    first = {
        "attempt": 0,
        "state": "failed",
        "time": agent.heartbeat(1)["time"] - 0.1,
        "message": "the first",
    }
    (agent.run_dir / "heartbeats" / "host-0.json").write_text(json.dumps(first))
    agent.ended(1)
    assert agent.result()["error"] == "host 0: the first"


def test_a_failure_of_an_earlier_attempt_stops_nobody(agent: Any) -> None:
    agent.start('beat("failed", 3); sys.exit(1)', 1, attempt=0)
    agent.ended(1)
    agent.start_and_hear('say("up"); time.sleep(1.2)', 0, attempt=1)
    assert agent.ended(0, attempt=1)["reason"] == "exit code 0"


def test_an_exit_code_is_reported_with_the_last_line_and_the_lines_before_it(agent: Any) -> None:
    agent.start('[say("line %d" % n) for n in range(30)]; sys.exit("ValueError: no such vocabulary")')
    agent.ended()
    assert agent.heartbeat()["message"] == "exit code 1: ValueError: no such vocabulary"
    error = agent.result()["error"].splitlines()
    assert error[0] == "host 0: exit code 1: ValueError: no such vocabulary"
    assert error[1:] == [f"line {n}" for n in range(11, 30)] + ["ValueError: no such vocabulary"]
    assert json.loads((agent.state_dir() / "exit.json").read_text())["tail"] == error[1:]


def test_a_job_that_says_all_itself_is_told_in_its_words_alone(agent: Any) -> None:
    last_words = 'beat("failed", 21, message="the loss stays away; lower --learning-rate", says_all=True)'
    agent.start(f'say("Traceback"); {last_words}; say("E1122 gRPC: a peer is gone"); sys.exit(1)')
    agent.ended()
    result = agent.result()
    assert result["error"] == "host 0: the loss stays away; lower --learning-rate"
    assert (result["outcome"], result["steps"]) == ("failed", 21)


def test_a_wrong_request_is_marked_as_one(agent: Any) -> None:
    agent.start('say("--steps: must be positive"); sys.exit(2)')
    agent.ended()
    assert agent.result()["request"] is True


def test_a_good_end_and_a_saved_one_leave_the_reporting_to_the_job(agent: Any) -> None:
    for rank, code in enumerate((0, 75)):
        agent.start(f'beat("done", 9); sys.exit({code})', rank)
        assert agent.ended(rank)["code"] == code
        assert agent.heartbeat(rank)["state"] == "done"
    assert not (agent.run_dir / "result.json").exists()


def test_a_result_that_is_there_is_left_alone(agent: Any) -> None:
    (agent.run_dir / "result.json").write_text('{"outcome": "done"}')
    agent.start("sys.exit(1)")
    agent.ended()
    assert agent.result() == {"outcome": "done"}
    assert list(agent.run_dir.glob(".*")) == []


def test_whatever_a_process_leaves_behind_ends_with_it(agent: Any, is_running: Any, until: Any) -> None:
    leave = """
import subprocess
for options in ({}, {"preexec_fn": lambda: os.setpgid(0, 0)}, {"start_new_session": True}):
    say(subprocess.Popen(["sleep", "600"], **options).pid)
"""
    agent.start(leave)
    agent.ended()
    pids = [int(line) for line in (agent.run_dir / "logs/0/host-0.log").read_text().split()]
    assert len(pids) == 3
    until(lambda: not any(map(is_running, pids)), timeout_s=2)


def test_torn_unreadable_and_odd_heartbeats_stop_nobody(agent: Any) -> None:
    beats = agent.run_dir / "heartbeats"
    beats.mkdir()
    for rank, text in enumerate(
        ['{"attempt": 0, "st', "[]", '{"attempt":0,"state":"failed","time":"x"}', "", "\0"], 1
    ):
        (beats / f"host-{rank}.json").write_text(text)
    (beats / "host-8.json").mkdir()
    (beats / "host-9.json").symlink_to("nowhere")
    agent.start('say("up"); time.sleep(1.2)')
    assert agent.ended()["reason"] == "exit code 0"


def test_a_run_directory_that_vanished_does_not_end_the_supervision(agent: Any) -> None:
    log = agent.scripts / "job.log"
    vanish = 'import shutil; shutil.rmtree(run_dir); say("gone"); live()'
    started = agent.start_and_hear(vanish, log_path=str(log))
    os.kill(started["pid"], signal.SIGKILL)
    ended = agent.ended()
    assert (ended["state"], ended["signal"]) == ("exited", 9)
    assert not agent.run_dir.exists()
    assert "writing heartbeats/host-0.json" in (agent.state_dir() / "supervisor.log").read_text()


def test_the_end_is_on_record_even_when_the_job_has_filled_the_disk(agent: Any, small_disk: Path) -> None:
    agent.root = small_disk / "agent"
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
    agent.start(fill)
    assert agent.ended()["code"] == 5
    assert "No space left" in agent.heartbeat()["message"]


def test_without_room_for_its_record_a_process_is_not_started(agent: Any, small_disk: Path) -> None:
    agent.root = small_disk / "agent"
    agent.root.mkdir()
    (small_disk / "rest").write_bytes(bytes(500 << 10))
    status, message = agent.refusal("start", **agent.start_request('say("up")'))
    assert status == 1
    assert "No space left" in message
    (small_disk / "rest").unlink()
    assert agent.start('say("up")')["already"] is False
    agent.ended()


def test_a_process_outlives_its_supervisor_and_can_still_be_stopped(
    agent: Any, is_running: Any, until: Any
) -> None:
    started = agent.start_and_hear('say("up"); live()')
    os.kill(agent.record()["supervisor_pid"], signal.SIGKILL)
    until(lambda: not agent.status()["supervised"])
    assert agent.status()["state"] == "running"
    (stopped,) = agent("stop", run_id="run-1", grace_s=5)["stopped"]
    assert stopped["how"] == "terminated"
    assert not is_running(started["pid"])
    assert agent.status()["state"] == "exited"


def test_a_process_that_ended_without_a_supervisor_is_lost(agent: Any, until: Any) -> None:
    started = agent.start_and_hear('say("up"); live()')
    os.kill(agent.record()["supervisor_pid"], signal.SIGKILL)
    until(lambda: not agent.status()["supervised"])
    os.kill(started["pid"], signal.SIGKILL)
    until(lambda: agent.status()["state"] == "lost")


def test_the_supervisor_survives_the_signals_of_a_closing_session(agent: Any, until: Any) -> None:
    started = agent.start_and_hear('say("up"); live()')
    supervisor = agent.record()["supervisor_pid"]
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(supervisor, signum)
    until(lambda: (agent.state_dir() / "supervisor.log").read_text().count("not for the supervisor") == 3)
    os.kill(started["pid"], signal.SIGTERM)  # which the job did not inherit as ignored
    assert agent.ended()["signal"] == signal.SIGTERM


BEATS = st.lists(
    st.fixed_dictionaries(
        {
            "rank": st.integers(0, 9),
            "time": st.integers(0, 5),
            "state": st.sampled_from(["failed", "stepping"]),
            "exit_code": st.sampled_from([None, 1, 2, 76]),
        }
    ),
    max_size=6,
)


@given(BEATS)
def test_the_culprit_is_the_first_to_fail_by_itself(beats: list[dict[str, Any]]) -> None:
    blamed = run_directory.first_failure(beats)
    failed = [beat for beat in beats if beat["state"] == "failed"]
    assert (blamed is None) == (not failed)
    if blamed is not None:
        rivals = [beat for beat in failed if beat["exit_code"] != 76] or failed
        assert blamed in rivals
        assert all(blamed["time"] <= beat["time"] for beat in rivals)


def test_a_tail_has_the_last_lines_and_no_endless_one() -> None:
    lines = files.tail(b"a\n" * 50 + b"x" * 9999 + b"\n\xff\n")
    assert len(lines) == 20
    assert lines[-1] == "\N{REPLACEMENT CHARACTER}"
    assert len(lines[-2]) == 2000
