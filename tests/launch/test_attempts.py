"""What the first pod of a run decides before an attempt, on run directories as attempts leave them."""

import calendar
import time
from pathlib import Path
from typing import Any

import pytest

from contracts import fencing
from contracts.errors import Superseded
from contracts.run_directory import RunDirectory
from launch.attempts import End, Limits, attempt_cause, begin, end_of_run

STARTED = "2026-11-23T12:00:00Z"
START_S = float(calendar.timegm(time.strptime(STARTED, "%Y-%m-%dT%H:%M:%SZ")))
LIMITS: dict[str, Any] = {
    "restarts": 10,
    "budget_s": None,
    "budget_reason": "its budget is spent",
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


def test_where_the_time_of_the_last_attempt_went_is_on_record(tmp_path: Path) -> None:
    timing = {"parts": {"start": 4.0, "compute": 26.0}, "open": "compute", "from_step": 0, "saved_step": 10}
    beat = {"rank": 0, "state": "stepping", "time": START_S + 30, "step": 13, "timing": timing}
    directory = a_run(tmp_path, begun(0), beats=(beat,), saved=(10,))
    begin(directory, REQUEST, START_S + 60)
    first, second = attempts(directory)
    assert first["timing"] == {**timing, "step": 13}
    assert "timing" not in second


@pytest.mark.parametrize(
    ("result", "beats", "outcome", "wall_s"),
    [
        ({"outcome": "failed", "time": START_S + 9}, (), "failed", 9.0),
        ({"outcome": "hung", "wall_s": 7.0}, (), "hung", 7.0),
        ({"outcome": "preempted", "wall_s": 7.0}, (), "preempted", 7.0),
        # One process failed and nobody wrote a result; all at once gone; gone before the first heartbeat.
        (None, ({"state": "stepping", "time": START_S}, {"state": "failed", "time": START_S + 31}), "failed", 31.0),
        (None, ({"state": "stepping", "time": START_S + 30},), "lost", 30.0),
        (None, (), "lost", None),
    ],
)  # fmt: skip
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
    cause = {"failed": "preempted" if result else "failed"}.get(outcome, outcome)
    assert first == begun(0, outcome=outcome, cause=cause, wall_s=wall_s)
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
    checkpoint: int | None, cause: str = "failed", outcome: str = "", wall_s: float | None = 10.0
) -> dict[str, Any]:
    told = {"cause": cause, "outcome": outcome or cause}
    return {"attempt": 3, "checkpoint": checkpoint, "wall_s": wall_s, **told}


def failed(reason: str) -> End:
    return End(code=1, reason=reason, outcome="failed", error=reason)


LOST = {"error": "host 1: lost"}
TOO_LATE = (
    "not all of its pods were there by 2026-11-23T12:00:00Z, long after --wait was over; launch it again"
)
TWICE = "it failed twice from the checkpoint of step 5, with no new checkpoint between: host 1: lost"
FROM_START = "it failed twice from the start, with no new checkpoint between: host 1: lost"
OUTAGES = "given up after 24 outages in a row: host 1: lost"
NO_MORE = "it failed: host 1: lost"
ENDS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any] | None, int | None, End | None]] = {
    # limits, attempts, result of the last one, newest checkpoint, end
    "nothing has begun": ({}, [], None, None, None),
    "its time to begin is over": ({"begin_by_s": START_S}, [], None, None, failed(TOO_LATE)),
    "what has begun in time goes on later": ({"begin_by_s": START_S}, [ended(None, "lost")], None, 5, None),
    "done": ({}, [ended(None, "done")], {"outcome": "done"}, 5, End(code=0, reason="it is done")),
    "stopped": ({}, [ended(None, "stopped")], {"reason": "by somebody"}, 5, End(code=130, reason="by somebody")),
    "a program error after a new checkpoint": ({}, [ended(5), ended(5), ended(7)], LOST, 9, None),
    "a program error twice at the start": ({}, [ended(None), ended(None)], LOST, None, failed(FROM_START)),
    "no restarts are left": ({"restarts": 1}, [ended(5), ended(7)], LOST, 9, failed(NO_MORE)),
    "lost pods take no restart": ({"restarts": 0}, [ended(5, "preempted", "failed")], LOST, 5, None),
    "a wrong request": ({}, [ended(None, "wrong request", "failed")], {"exit_code": 2, **LOST}, 5,
                        End(code=2, reason="host 1: lost")),
    "a budget that is left": ({"budget_s": 21.0}, [ended(None), ended(5)], None, 6, None),
    "a budget that is spent": ({"budget_s": 20.5}, [ended(None), ended(5)], None, 6,
                               End(code=130, reason="its budget is spent", outcome="stopped")),
    "done with the last of its budget": ({"budget_s": 10.0}, [ended(None, "done")], {"outcome": "done"}, 6,
                                         End(code=0, reason="it is done")),
    "a budget that its pods have found spent": ({"budget_s": 100.0}, [ended(None, "over budget", "stopped")],
                                                {"out_of_budget": True, "reason": "spent"}, 5,
                                                End(code=130, reason="spent")),
    "it failed twice and saved nothing": ({}, [ended(None), ended(5, "hung"), ended(5)], LOST, 5, failed(TWICE)),
    "it failed twice, and saved between": ({}, [ended(None), ended(5)], LOST, 10, None),
    "an attempt that was preempted between counts for nothing": ({}, [ended(5, "preempted"), ended(5)], LOST, 5, None),
    "an outage between counts for nothing": ({}, [ended(5, "outside", "failed"), ended(5)], LOST, 5, None),
    "outages": ({}, [ended(5, "outside", "failed")] * 24, LOST, 5, None),
    "too many outages": ({}, [ended(5, "outside", "failed")] * 25, LOST, 5, failed(OUTAGES)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "result", "cause"),
    [
        ("done", {}, "done"),
        ("preempted", {}, "preempted"),
        ("hung", {"exit_code": None}, "hung"),
        ("stopped", {}, "stopped"),
        ("stopped", {"out_of_budget": True}, "over budget"),
        ("failed", {"exit_code": 1}, "failed"),
        ("failed", {"exit_code": 2}, "wrong request"),
        ("failed", {"exit_code": 7}, "failed"),
        ("failed", {"exit_code": 69}, "outside"),
        ("failed", {"exit_code": 76}, "preempted"),
        ("failed", {"exit_code": None}, "preempted"),
        ("failed", {"exit_code": 137}, "failed"),
        ("failed", None, "failed"),
        ("lost", None, "lost"),
    ],
)
def test_an_attempt_on_pods_ends_for_the_causes_of_the_policy_and_a_lost_pod_is_the_cluster_s_affair(
    outcome: Any, result: dict[str, Any] | None, cause: str
) -> None:
    assert attempt_cause(outcome, result) == cause


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


def test_a_process_that_is_done_does_not_come_back_to_one_that_was_lost(tmp_path: Path) -> None:
    beats = ({"state": "stepping"}, {"state": "done"})
    lost = {"outcome": "failed", "error": "host 0: out of memory", "failed_host": 0}
    directory = a_run(tmp_path, begun(0), beats=beats, saved=(5,), result=lost)
    before = directory.read_text("run.json")
    assert begin(directory, looking(), START_S) == begin(directory, looking(0), START_S) == {}
    assert directory.read_text("run.json") == before, "who only looks begins nothing"
    found = begin(directory, looking(1), START_S)
    result = directory.read_json("result.json")
    assert found["over"] == 1 and result is not None
    assert (result["outcome"], result["steps"], result["failed_host"]) == ("failed", 5, 0)
    assert result["error"] == f"{found['reason']}\nhost 0: out of memory"


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


def test_a_run_that_is_given_up_says_why_and_a_new_launch_counts_its_own_attempts(tmp_path: Path) -> None:
    crash = {"outcome": "failed", "exit_code": 1, "error": "host 1: lost\nKeyError: 'x'", "failed_host": 1}
    directory = a_run(tmp_path, begun(0, 5, cause="failed"), begun(1, 5), result=crash, saved=(5,))
    assert begin(directory, REQUEST, START_S) == {"over": 1, "reason": TWICE}
    result = directory.read_json("result.json")
    assert result is not None
    assert (result["outcome"], result["failed_host"], result["steps"]) == ("failed", 1, 5)
    assert result["error"] == f"{TWICE}\nKeyError: 'x'"
    directory.write_json("result.json", {"attempt": 1, **crash})
    assert begin(directory, {**REQUEST, "first": 1}, START_S) == {"attempt": 2, "budget_s": None}


def test_a_run_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    found = begin(RunDirectory(str(tmp_path / "no")), REQUEST, START_S)
    assert found == {"over": 1, "reason": f"{tmp_path}/no/run.json is not there"}


def test_of_two_pods_that_begin_at_once_one_does_and_the_next_to_come_goes_on_from_there(
    tmp_path: Path,
) -> None:
    directory = a_run(tmp_path, made_ready(0))
    fencing.take(directory, 0, launch=0)
    other = {**REQUEST, "pod": "name-0-other"}
    assert begin(directory, REQUEST, START_S)["attempt"] == 0
    # As one that has read run.json before that: what it wrote would take the place of the first's.
    directory.write_json("run.json", {"run_id": "r", "attempts": [made_ready(0)]})
    assert begin(directory, other, START_S)["attempt"] == 1
    with pytest.raises(Superseded):
        directory.for_attempt(0).require_newest()
    assert [each["attempt"] for each in attempts(directory)] == [0, 1]


def test_a_pod_that_is_overtaken_while_it_begins_an_attempt_leaves_run_json_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, saved = a_run(tmp_path, begun(0)), RunDirectory.checkpoint_steps
    answers: list[int] = []

    def overtaken(self: RunDirectory) -> list[int]:
        monkeypatch.setattr(RunDirectory, "checkpoint_steps", saved)
        answers.append(begin(directory, {**REQUEST, "pod": "name-0-other"}, START_S)["attempt"])
        return saved(self)

    monkeypatch.setattr(RunDirectory, "checkpoint_steps", overtaken)
    with pytest.raises(Superseded):
        begin(directory, REQUEST, START_S)
    assert answers == [1]
    assert [each.get("pod") for each in attempts(directory)] == ["name-0-0", "name-0-other"]


def test_a_token_that_a_lost_pod_has_taken_is_not_used_again(tmp_path: Path) -> None:
    directory = a_run(tmp_path, begun(0), result={"outcome": "preempted"})
    fencing.take(directory, 1, launch=0)
    assert begin(directory, REQUEST, START_S)["attempt"] == 2
    assert [each["outcome"] for each in attempts(directory)] == ["preempted", None]


def test_pods_of_an_earlier_launch_begin_nothing_beside_a_later_one(tmp_path: Path) -> None:
    directory = a_run(tmp_path, begun(0), made_ready(1))
    fencing.take(directory, 1, launch=1)
    before = (tmp_path / "run.json").read_bytes()
    for request in (REQUEST, looking(1)):
        assert begin(directory, request, START_S) == {
            "over": 130,
            "reason": "attempt 1 of this run has been launched since",
        }
    assert (tmp_path / "run.json").read_bytes() == before
