"""What the first pod of a run decides before an attempt, on run directories as attempts leave them."""

from __future__ import annotations

import calendar
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from contracts import run_directory
from contracts.run_directory import RunDirectory
from jobs.runtime.attempts import End, Limits, begin, end_of_run

STARTED = "2026-11-23T12:00:00Z"
START_S = float(calendar.timegm(time.strptime(STARTED, "%Y-%m-%dT%H:%M:%SZ")))
LIMITS: dict[str, Any] = {
    "budget_s": None,
    "budget_reason": "its budget is spent",
    "needs_progress": True,
    "begin_by_s": None,
}
REQUEST: dict[str, Any] = {"first": 0, "pod": "name-0-abcde", "limits": LIMITS}


def looking(*missing: int, **limits: Any) -> dict[str, Any]:
    return {**REQUEST, "limits": {**LIMITS, **limits}, "missing": list(missing)}


def begun(number: int, checkpoint: int | None = None, **more: Any) -> dict[str, Any]:
    return {"attempt": number, "started": STARTED, "processes": 2, "outcome": None} | (
        {"pod": f"name-0-{number}", "checkpoint": checkpoint} | more
    )


def made_ready(number: int) -> dict[str, Any]:
    return {"attempt": number, "started": STARTED, "processes": 2, "outcome": None}


def a_run(
    folder: Path,
    *attempts: dict[str, Any],
    result: dict[str, Any] | None = None,
    beats: tuple[dict[str, Any], ...] = (),
    saved: tuple[int, ...] = (),
) -> RunDirectory:
    directory = RunDirectory(str(folder))
    directory.write_json("run.json", {"run_id": "r", "attempts": list(attempts)})
    if result is not None:
        directory.write_json("result.json", {"attempt": attempts[-1]["attempt"], **result})
    for rank, beat in enumerate(beats):
        directory.write_json(f"heartbeats/host-{rank}.json", {"attempt": attempts[-1]["attempt"], **beat})
    for step in saved:
        (folder / "checkpoints" / str(step)).mkdir(parents=True)
    return directory


def attempts(directory: RunDirectory) -> list[dict[str, Any]]:
    found = directory.read_json("run.json")
    assert found is not None
    return list(found["attempts"])


def test_the_attempt_that_the_launcher_made_ready_is_begun_as_it_is(tmp_path: Path) -> None:
    directory = a_run(tmp_path, begun(0, outcome="failed", wall_s=5.0), made_ready(1))
    assert begin(directory, {**REQUEST, "first": 1}, START_S + 60) == {"attempt": 1, "budget_s": None}
    assert attempts(directory)[1] == {
        **made_ready(1),
        "started": "2026-11-23T12:01:00Z",
        "pod": "name-0-abcde",
        "checkpoint": None,
    }


@pytest.mark.parametrize(
    ("result", "beats", "outcome", "wall_s"),
    [
        pytest.param({"outcome": "failed", "time": START_S + 9}, (), "failed", 9.0, id="its result says it"),
        pytest.param({"outcome": "hung", "wall_s": 7.0}, (), "hung", 7.0, id="hung"),
        pytest.param({"outcome": "preempted", "wall_s": 7.0}, (), "preempted", 7.0, id="preempted"),
        pytest.param(
            None,
            ({"state": "stepping", "time": START_S + 30}, {"state": "failed", "time": START_S + 31}),
            "failed",
            31.0,
            id="one process failed and nobody wrote a result",
        ),
        pytest.param(
            None, ({"state": "stepping", "time": START_S + 30},), "lost", 30.0, id="all at once gone"
        ),
        pytest.param(None, (), "lost", None, id="before its first heartbeat"),
    ],
)
def test_the_next_attempt_follows_and_the_last_one_s_end_is_on_record(
    tmp_path: Path,
    result: dict[str, Any] | None,
    beats: tuple[dict[str, Any], ...],
    outcome: str,
    wall_s: Any,
) -> None:
    directory = a_run(tmp_path, begun(0), result=result, beats=beats, saved=(5, 10))
    assert begin(directory, REQUEST, START_S + 60) == {"attempt": 1, "budget_s": None}
    first, second = attempts(directory)
    assert first == begun(0, outcome=outcome, wall_s=wall_s)
    assert second == {
        **begun(1, checkpoint=10, started="2026-11-23T12:01:00Z"),
        "pod": "name-0-abcde",
    }
    assert directory.read_json("result.json") is None


def test_a_run_that_is_done_is_not_begun_again(tmp_path: Path) -> None:
    directory = a_run(tmp_path, begun(0), result={"outcome": "done", "wall_s": 5.0})
    assert begin(directory, REQUEST, START_S)["over"] == 0
    assert begin(directory, looking(), START_S)["over"] == 0
    assert [each["outcome"] for each in attempts(directory)] == ["done"]
    assert directory.read_json("result.json") is not None


def ended(
    checkpoint: int | None, outcome: str = "failed", wall_s: float | None = 10.0, **more: Any
) -> dict[str, Any]:
    return {"checkpoint": checkpoint, "outcome": outcome, "wall_s": wall_s, **more}


FIVE_TIMES_THREE = [ended(5)] * 3
SINCE_5 = "given up after 3 attempts: the last checkpoint is still that of step 5"
SINCE_START = "given up after 3 attempts: there is no checkpoint"
LOST = {"error": "host 1: lost"}
TOO_LATE = (
    "not all of its pods were there by 2026-11-23T12:00:00Z, long after --wait was over; launch it again"
)
ENDS: dict[
    str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any] | None, int | None, End | None]
] = {
    # limits, attempts, result of the last one, newest checkpoint, end
    "nothing has begun": ({}, [], None, None, None),
    "it may still begin": ({"begin_by_s": START_S + 60}, [], None, None, None),
    "its time to begin is over": (
        {"begin_by_s": START_S},
        [],
        None,
        None,
        End(code=1, reason=TOO_LATE, outcome="failed", error=TOO_LATE),
    ),
    "what has begun in time goes on later": ({"begin_by_s": START_S}, [ended(None, "lost")], None, 5, None),
    "done": ({}, [ended(None, "done")], {"outcome": "done"}, 5, End(code=0, reason="the run is done")),
    "a program error": ({}, [ended(None)], {"exit_code": 1, **LOST}, 5, End(code=1, reason="host 1: lost")),
    "a wrong request": ({}, [ended(None)], {"exit_code": 2, **LOST}, 5, End(code=2, reason="host 1: lost")),
    "another code": ({}, [ended(None)], {"exit_code": 7, **LOST}, 5, End(code=1, reason="host 1: lost")),
    "an outage": ({}, [ended(None)], {"exit_code": 69, **LOST}, 5, None),
    "a lost peer": ({}, [ended(None)], {"exit_code": 76, **LOST}, 5, None),
    "a signal": ({}, [ended(None)], {"exit_code": 137, **LOST}, 5, None),
    "an end that nobody knows": ({}, [ended(None)], None, 5, None),
    "preempted": ({}, [ended(None, "preempted")], {"exit_code": None}, 5, None),
    "a budget that is left": ({"budget_s": 21.0}, [ended(None), ended(5)], None, 6, None),
    "a budget that is spent": (
        {"budget_s": 20.5},
        [ended(None), ended(5)],
        None,
        6,
        End(code=130, reason="its budget is spent", outcome="stopped"),
    ),
    "a budget that its pods have found spent": (
        {"budget_s": 100.0},
        [ended(None, "stopped")],
        {"out_of_budget": True, "reason": "spent"},
        5,
        End(code=130, reason="spent"),
    ),
    "three attempts that saved nothing new": (
        {},
        [ended(None), *FIVE_TIMES_THREE],
        LOST,
        5,
        End(code=1, reason=SINCE_5, outcome="failed", error=f"{SINCE_5}\nthe last of them: host 1: lost"),
    ),
    "three attempts that saved nothing at all": (
        {},
        [ended(None, "lost")] * 3,
        None,
        None,
        End(
            code=1,
            reason=SINCE_START,
            outcome="failed",
            error=f"{SINCE_START}\nthe last of them: nothing is known of its end",
        ),
    ),
    "the last one has saved": ({}, FIVE_TIMES_THREE, LOST, 10, None),
    "only two": ({}, FIVE_TIMES_THREE[1:], LOST, 5, None),
    "it never saves": ({"needs_progress": False}, FIVE_TIMES_THREE, LOST, 5, None),
    "one of them was an outage": ({}, [ended(5), ended(5, was_outage=True), ended(5)], LOST, 5, None),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_run_goes_on_for_as_long_as_that_can_be_of_use(case: str) -> None:
    limits, attempts_, result, newest, end = ENDS[case]
    assert end_of_run(Limits(**{**LIMITS, **limits}), attempts_, result, newest, START_S + 1) == end


def test_an_attempt_that_may_not_begin_is_put_on_record(tmp_path: Path) -> None:
    late = {**REQUEST, "first": 1, "limits": {**LIMITS, "begin_by_s": START_S}}
    directory = a_run(tmp_path, begun(0, outcome="stopped"), made_ready(1), saved=(5,))
    # Whoever waits for others leaves it time: the first pod may be beginning.
    assert begin(directory, looking(1, begin_by_s=START_S) | {"first": 1}, START_S + 3600) == {}
    assert begin(directory, looking(1, begin_by_s=START_S) | {"first": 1}, START_S + 3601)["over"] == 1
    directory.remove("result.json")
    assert begin(directory, late, START_S + 1) == {"over": 1, "reason": TOO_LATE}
    result = directory.read_json("result.json")
    assert result is not None
    assert (result["outcome"], result["attempt"], result["steps"]) == ("failed", 1, 5)
    assert attempts(directory)[1] == made_ready(1)


def test_an_outage_is_noted_with_its_attempt(tmp_path: Path) -> None:
    directory = a_run(tmp_path, begun(0), result={"outcome": "failed", "exit_code": 69}, saved=(5,))
    assert begin(directory, REQUEST, START_S) == {"attempt": 1, "budget_s": None}
    assert attempts(directory)[0]["was_outage"] and "was_outage" not in attempts(directory)[1]


def test_a_process_that_is_done_does_not_come_back_to_one_that_was_lost(tmp_path: Path) -> None:
    beats = ({"state": "stepping"}, {"state": "done"})
    lost = {"outcome": "failed", "error": "host 0: out of memory", "failed_host": 0}
    directory = a_run(tmp_path, begun(0), beats=beats, saved=(5,), result=lost)
    assert begin(directory, looking(0), START_S) == {}
    found = begin(directory, looking(1), START_S)
    result = directory.read_json("result.json")
    assert found["over"] == 1 and result is not None
    assert (result["outcome"], result["steps"], result["failed_host"]) == ("failed", 5, 0)
    assert result["error"] == f"{found['reason']}\nhost 0: out of memory"


def test_who_only_looks_begins_nothing(tmp_path: Path) -> None:
    directory = a_run(tmp_path, begun(0), result={"outcome": "failed"})
    before = directory.read_text("run.json")
    assert begin(directory, looking(), START_S) == {}
    assert directory.read_text("run.json") == before


def test_a_budget_lasts_for_all_attempts_of_the_job(tmp_path: Path) -> None:
    request = {**REQUEST, "limits": {**LIMITS, "budget_s": 100}, "first": 1}
    earlier = begun(0, outcome="failed", wall_s=1000.0)  # of another launch, which the budget has left out
    directory = a_run(tmp_path, earlier, begun(1), result={"outcome": "preempted", "wall_s": 30.5})
    assert begin(directory, request, START_S) == {"attempt": 2, "budget_s": 69}
    directory.write_json("result.json", {"attempt": 2, "outcome": "preempted", "wall_s": 69.5})
    assert begin(directory, request, START_S) == {"over": 130, "reason": "its budget is spent"}
    result = directory.read_json("result.json")
    assert result is not None
    assert (result["outcome"], result["out_of_budget"], result["attempt"]) == ("stopped", True, 2)
    # Whoever comes later is told the same.
    assert begin(directory, request, START_S)["over"] == 130
    assert len(attempts(directory)) == 3


def test_three_attempts_that_saved_nothing_new_are_enough(tmp_path: Path) -> None:
    before = [begun(0, checkpoint=None), begun(1, checkpoint=5), begun(2, checkpoint=5)]
    directory = a_run(
        tmp_path,
        *before,
        begun(3, checkpoint=5),
        result={"outcome": "failed", "error": "host 1: lost", "failed_host": 1},
        saved=(5,),
    )
    reason = "given up after 3 attempts: the last checkpoint is still that of step 5"
    assert begin(directory, REQUEST, START_S) == {"over": 1, "reason": reason}
    result = directory.read_json("result.json")
    assert result is not None
    assert (result["outcome"], result["failed_host"], result["steps"]) == ("failed", 1, 5)
    assert result["error"] == f"{reason}\nthe last of them: host 1: lost"


def test_a_new_launch_counts_its_own_attempts_only(tmp_path: Path) -> None:
    before = [begun(number, checkpoint=5) for number in range(4)]
    directory = a_run(tmp_path, *before, result={"outcome": "failed"}, saved=(5,))
    assert begin(directory, {**REQUEST, "first": 2}, START_S) == {"attempt": 4, "budget_s": None}


def test_a_run_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    found = begin(RunDirectory(str(tmp_path / "no")), REQUEST, START_S)
    assert found == {"over": 1, "reason": f"{tmp_path}/no/run.json is not there"}


def test_it_is_a_program_that_answers_in_json(tmp_path: Path) -> None:
    directory = a_run(tmp_path, made_ready(0))
    command = [sys.executable, "-P", "-m", "jobs.runtime.attempts", directory.url]
    done = subprocess.run(command, input=json.dumps(REQUEST), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"attempt": 0, "budget_s": None}
    assert run_directory.RUN in [path.name for path in tmp_path.iterdir()]
