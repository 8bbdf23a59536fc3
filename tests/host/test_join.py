"""The wait for a process to join answers as soon as it has, or never will, and not much later than it was told to."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ONE: dict[str, Any] = {"run_id": "run-1", "attempt": 0, "process_id": 0}
LOCAL = """
def here(state, step=0):
    path = os.environ["RUN_CONTROL_DIR"] + "/heartbeat.json"
    with open(path + ".new", "w") as file:
        json.dump(dict(rank=rank, attempt=attempt, state=state, step=step, time=time.time()), file)
    os.replace(path + ".new", path)
"""
JOINS = LOCAL + 'here("starting"); say("up"); time.sleep(0.5); here("joined"); live()'


def test_a_process_that_joins_is_told_with_its_heartbeat(agent: Any) -> None:
    agent.start(JOINS)
    answer = agent("join", **ONE, limit_s=20)
    assert answer["state"] == "joined"
    assert answer["beat"]["state"] == "joined"
    assert answer["process"]["state"] == "running"
    assert agent.status()["beat"]["state"] == "joined"


def test_a_process_that_is_further_already_is_told_at_once(agent: Any) -> None:
    agent.start_and_hear(LOCAL + 'here("stepping", 7); say("up"); live()')
    answer = agent("join", **ONE, limit_s=20)
    assert (answer["state"], answer["beat"]["step"]) == ("stepping", 7)


def test_a_process_that_ends_before_it_has_joined_is_told_with_its_last_lines(agent: Any) -> None:
    agent.start(LOCAL + 'here("starting"); say("no TPU here"); sys.exit(3)')
    before = time.monotonic()
    answer = agent("join", **ONE, limit_s=60)
    assert time.monotonic() - before < 30
    assert (answer["process"]["state"], answer["process"]["code"]) == ("exited", 3)
    assert answer["process"]["tail"] == ["no TPU here"]


def test_a_process_that_dies_without_a_word_is_told_with_the_signal(agent: Any) -> None:
    agent.start("os.kill(os.getpid(), 9)")
    answer = agent("join", **ONE, limit_s=20)
    assert answer["state"] in ("exited", "failed")  # the supervisor may have said already that it failed
    assert (answer["process"]["state"], answer["process"]["signal"]) == ("exited", 9)


def test_a_process_that_says_it_is_done_is_waited_for(agent: Any) -> None:
    agent.start(LOCAL + 'here("done"); say("up"); time.sleep(0.5)')
    answer = agent("join", **ONE, limit_s=20)
    assert (answer["state"], answer["process"]["state"], answer["process"]["code"]) == ("done", "exited", 0)


def test_a_process_that_does_not_join_in_time_is_told_as_starting(agent: Any) -> None:
    agent.start_and_hear('say("up"); live()')
    before = time.monotonic()
    answer = agent("join", **ONE, limit_s=0.3)
    assert 0.3 <= time.monotonic() - before < 5
    assert (answer["state"], answer["process"]["state"]) == ("starting", "running")


def test_a_process_that_was_never_started_is_not_waited_for(agent: Any) -> None:
    status, message = agent.refusal("join", **ONE, limit_s=60)
    assert status == 1
    assert "was never started" in message


def test_a_wait_that_nobody_listens_to_any_more_ends(agent: Any) -> None:
    agent.start_and_hear('say("up"); live()')
    body = {"version": 1, "root": str(agent.root), **ONE, "limit_s": 100}
    main = Path(__file__).parents[2] / "host" / "agent" / "__main__.py"
    with subprocess.Popen(
        [sys.executable, "-S", "-E", str(main), "join"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as waiting:  # fmt: skip
        assert waiting.stdin is not None and waiting.stdout is not None
        waiting.stdin.write(json.dumps(body).encode())
        waiting.stdin.close()  # the end of the input alone is no reason to stop waiting
        try:
            waiting.wait(0.5)
        except subprocess.TimeoutExpired:
            waiting.stdout.close()
        else:
            raise AssertionError("it did not wait")
        waiting.wait(10)
