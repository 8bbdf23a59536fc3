"""Faults in the middle of training: the run stops everywhere, or is not disturbed, and ends with the losses that it
would have had."""

from __future__ import annotations

import time

import pytest

from contracts.run_directory import State
from launch import runs
from launch.runs import Run
from launch.target import Target
from tests.rehearsal.faults import faults
from tests.rehearsal.faults.faults import Fault, nightly_but, ready
from tests.rehearsal.faults.pair import NAMES, Pair, read, until
from tests.runs.lab import Losses, losses, result

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STOP_LIMIT_S = 60.0
FAULT_AT_STEP = 25
FEWEST_BEATS = 5
HUNG_LIMIT_S = 90.0
SAVING = ("--checkpoint-every", "2")
"""Of a run that does little else."""
TRAINING_CASES = {
    "host-1-killed": (faults.KILLED, NAMES[1]),
    "host-0-killed": (faults.KILLED, NAMES[0]),
    "host-1-cut-off": (faults.CUT_OFF, NAMES[1]),
    "disk-full": (faults.DISK_FULL, NAMES[1]),
    "share-full": (faults.SHARE_FULL, NAMES[1]),
    "mount-missing": (faults.SHARE_MISSING, NAMES[0]),
}
CHECKPOINT_CASES = {
    "host-1-killed": (faults.KILLED, NAMES[1]),
    "share-full": (faults.SHARE_FULL, NAMES[0]),
}
EACH_TIME = {"host-0-killed"}


def mended_and_gone_on(pair: Pair, run_id: str) -> tuple[State, Losses]:
    """The hosts are whole again: what had become of the run, and its losses after it was resumed if it needed that."""
    with pair.target() as target:
        run = runs.find(target.runs, run_id)
        state, run = pair.finish(target, run)
        pair.until_clean()
        if state != "done":
            began_s = time.monotonic()
            print(f"{run_id}: {state}: {(run.current_result() or {}).get('error')}")
            resumed = pair.launch(target, resume=run)
            print(f"joined again {time.monotonic() - began_s:.1f} s after the resume was asked for")
            after, run = pair.finish(target, resumed, pair.end_limit_s)
            assert after == "done", run.result
        return state, losses(run)


def disturbed(pair: Pair, fault: Fault, host: str, *more: str, saving: bool = False) -> str:
    """A run that met the fault, and has come to an end on all hosts that still can be asked."""
    with ready(pair, fault, host) as happens:
        with pair.target() as target:
            run = pair.launch(target, *more)
            pair.reach(run, FAULT_AT_STEP)
            if saving:
                until(lambda: pair.state(target, run) == "saving", "a checkpoint is being written", 60.0, 0.0)
            with pair.frozen():
                happens()
            began_s = time.monotonic()
        others = [name for name in NAMES if name != host]
        print(f"{others}: clean after {pair.until_clean(*others):.1f} s")
        assert time.monotonic() - began_s < STOP_LIMIT_S
    return run.run_id


@pytest.mark.parametrize(("fault", "host"), nightly_but(EACH_TIME, TRAINING_CASES))
def test_a_run_whose_host_fails_stops_everywhere_and_goes_on_with_the_same_losses(
    pair: Pair, right_losses: Losses, fault: Fault, host: str
) -> None:
    state, found = mended_and_gone_on(pair, disturbed(pair, fault, host))
    assert state in ("failed", "lost", "done")
    assert found == right_losses


@pytest.mark.parametrize(("fault", "host"), nightly_but({"share-full"}, CHECKPOINT_CASES))
def test_a_fault_in_a_checkpoint_leaves_one_to_go_on_from_with_the_same_losses(
    pair: Pair, right_losses: Losses, fault: Fault, host: str
) -> None:
    state, found = mended_and_gone_on(pair, disturbed(pair, fault, host, *SAVING, saving=True))
    assert state in ("failed", "lost", "done")
    assert found == right_losses


def test_a_wedged_process_is_found_its_stacks_are_saved_and_nothing_of_the_run_is_left(pair: Pair) -> None:
    with pair.target() as target:
        # Long enough to learn how long a step takes, and without what is given more time than a step: a checkpoint,
        # and an evaluation, after which the best one is kept.
        more = ("--steps", "100000", "--checkpoint-every", "100000", "--eval-every", "100000")
        run = pair.launch(target, *more)
        until(lambda: beats(target, run) >= FEWEST_BEATS, "its steps have been seen to come", 60.0, 0.3)
        pair.faults.wedge(NAMES[1])
        began_s = time.monotonic()
        until(lambda: read(run).current_result() is not None, "the run has a result", HUNG_LIMIT_S, 0.3)
        print(f"hung: stopped after {time.monotonic() - began_s:.1f} s")
        state, run = pair.finish(target, run)
        assert (state, result(run)["outcome"]) == ("hung", "hung")
        assert "host 1" in result(run)["error"]
        assert sorted(run.directory.list("stacks/0")) == ["host-0.txt", "host-1.txt"]
    pair.until_clean()


def beats(target: Target, run: Run) -> int:
    """How many seconds of steps a host has told of, a heartbeat each."""
    seen: set[float] = set()
    for _ in range(FEWEST_BEATS):
        entries = runs.look(target.agents, run).processes
        seen.update(
            entry["beat"]["time"] for entry in entries if (entry["beat"] or {}).get("state") == "stepping"
        )
        time.sleep(1.0)
    return len(seen) // len(NAMES)


@pytest.mark.nightly
def test_a_host_whose_door_and_tools_change_does_not_disturb_what_runs_there(
    pair: Pair, right_losses: Losses
) -> None:
    names = ("KEY_REFUSED", "HOST_KEY_CHANGED", "DEVICE_HELD", "PYTHON_MISSING")
    harmless = [getattr(faults, name) for name in names]
    with pair.target() as target:
        run = pair.launch(target)
        pair.reach(run, FAULT_AT_STEP)
        with faults.broken(pair, *((fault, NAMES[1]) for fault in harmless)):
            until(lambda: read(run).current_result() is not None, "it ends", pair.end_limit_s, 0.3)
    state, found = mended_and_gone_on(pair, run.run_id)
    assert state == "done"
    assert found == right_losses
