"""Faults of hosts and launchers: before a launch, between its phases, in the middle of training, in a checkpoint.

Whatever happens, the launcher names the host and the reason, nothing of the run is left on any host, and a run that
is resumed has the losses that it would have had. A few cases run each time, all of them in `make test-nightly`.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contracts.run_directory import State
from launch import runs
from launch.hosts import HostsError
from launch.launching import LaunchFailed
from rehearsal.machines.host_image import PYTHON
from tests.rehearsal.faults import pair as pairs
from tests.rehearsal.faults.pair import (
    CLOCK_OFF,
    CUT_OFF,
    DEVICE_HELD,
    DISK_FULL,
    HOST_KEY_CHANGED,
    KEY_REFUSED,
    KILLED,
    NAMES,
    PYTHON_MISSING,
    SHARE_FULL,
    SHARE_MISSING,
    Fault,
    Pair,
    broken,
    exactly_before,
    nightly_but,
    options,
    read,
    ready,
    until,
)
from tests.runs.lab import Losses, losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.nightly  # with most of the cases that depend on it
def test_a_host_that_is_cut_off_or_killed_tells_nobody(pair: Pair) -> None:
    """Without this all cases below would be easier ones: a refusal or a reset is an answer."""
    address = pair.inventory.slices[0].hosts[0].internal_address

    def on_the_other(command: str) -> tuple[int, str]:
        done = pair.machines.containers.find(NAMES[1]).exec_run(["bash", "-c", command])
        return done.exit_code, done.output.decode()

    def connections() -> str:
        return on_the_other(f"ss -tn state established dst {address} | grep -c :22")[1].strip()

    connect = f"timeout 2 bash -c 'exec 3<>/dev/tcp/{address}/22'"
    watch = f"exec 3<>/dev/tcp/{address}/22; head -n 1 <&3 >/dev/null; echo open; cat <&3; echo ended"
    on_the_other(f"({watch}) >/tmp/watched 2>&1 & disown")
    until(lambda: on_the_other("cat /tmp/watched") == (0, "open\n"), "a connection is open", 10.0)
    with broken(pair, (CUT_OFF, NAMES[0])):
        assert on_the_other(connect)[0] == 124  # timeout's own: nothing came back
        assert connections() == "1"
    assert on_the_other(connect)[0] == 0
    with broken(pair, (KILLED, NAMES[0])):
        assert on_the_other(connect)[0] != 0
        assert (on_the_other("cat /tmp/watched"), connections()) == ((0, "open\n"), "1")


# --- before a launch: it is refused, nothing has been started, and every reason is told -----------------------

REFUSAL_LIMIT_S = 45.0


def refusal(pair: Pair, *wrong: tuple[Fault, str]) -> list[str]:
    """What the launcher says of each fault it finds, one host a line; nothing has been started anywhere."""
    runs_before = pair.run_names()
    with broken(pair, *wrong):
        began_s = time.monotonic()
        with pair.target() as target, pytest.raises(HostsError, match="nothing was started") as caught:
            pair.launch(target)
        took_s = time.monotonic() - began_s
    print(f"refused after {took_s:.1f} s: {caught.value}")
    assert took_s < REFUSAL_LIMIT_S
    assert pair.run_names() == runs_before
    pair.until_clean(limit_s=10.0)
    return [str(error) for error in caught.value.errors]


def test_what_is_wrong_with_each_host_is_told_at_once(pair: Pair) -> None:
    wrong = [
        (PYTHON_MISSING, NAMES[0]),
        (DEVICE_HELD, NAMES[0]),
        (DISK_FULL, NAMES[1]),
        (SHARE_MISSING, NAMES[1]),
        (CLOCK_OFF, NAMES[1]),
    ]
    said = refusal(pair, *wrong)
    for fault, host in wrong:
        assert any(line.startswith(f"{host}: ") and fault.says in line for line in said), (fault, said)


UNREACHABLE = {
    "host-key-changed": [HOST_KEY_CHANGED],
    "key-refused": [KEY_REFUSED],
    "cut-off": [CUT_OFF],
    "killed": [KILLED],
}


@pytest.mark.parametrize("fault", nightly_but({"host-key-changed"}, UNREACHABLE))
def test_a_host_that_cannot_be_reached_hides_nothing_that_is_wrong_with_the_other(
    pair: Pair, fault: Fault
) -> None:
    said = refusal(pair, (fault, NAMES[0]), (DEVICE_HELD, NAMES[1]))
    assert any(line.startswith(f"{NAMES[0]}: ") and fault.says in line and "→" in line for line in said), said
    assert any(line.startswith(f"{NAMES[1]}: ") and DEVICE_HELD.says in line for line in said), said


@pytest.mark.nightly
def test_a_full_share_is_found_on_every_host(pair: Pair) -> None:
    said = refusal(pair, (SHARE_FULL, NAMES[0]))
    assert {line.partition(":")[0] for line in said} == set(NAMES), said


# --- between the phases of a launch: it fails with the reason, and is undone on every host --------------------

FAILURE_LIMIT_S = 120.0
"""No longer than the limit of one question, of a stop, and of connecting again."""
ROLLOUT_CASES = {
    "stage-killed": ("stage", KILLED),
    "stage-cut-off": ("stage", CUT_OFF),
    "stage-disk-full": ("stage", DISK_FULL),
    "start-killed": ("start", KILLED),
    "start-cut-off": ("start", CUT_OFF),
    "start-disk-full": ("start", DISK_FULL),
    "start-mount-missing": ("start", SHARE_MISSING),
    "start-wrong-python": ("start", PYTHON_MISSING),
    "join-killed": ("join", KILLED),
    "join-cut-off": ("join", CUT_OFF),
    "join-disk-full": ("join", DISK_FULL),
}


@pytest.mark.parametrize(("phase", "fault"), nightly_but({"join-killed"}, ROLLOUT_CASES))
def test_a_launch_that_meets_a_fault_fails_with_its_host_named_and_leaves_nothing(
    pair: Pair, phase: str, fault: Fault
) -> None:
    with ready(pair, fault, NAMES[1]) as happens, pair.target() as target:
        began_s = time.monotonic()
        with exactly_before(phase, happens), pytest.raises((HostsError, LaunchFailed)) as caught:
            pair.launch(target)
        took_s = time.monotonic() - began_s
        left_s = pair.until_clean(NAMES[0])
    error = caught.value
    said = str(error.run.current_result()) if isinstance(error, LaunchFailed) else str(error)
    print(f"failed after {took_s:.1f} s, {NAMES[0]} clean {left_s:.1f} s later: {said}")
    assert took_s < FAILURE_LIMIT_S
    assert NAMES[1] in said or "host 1" in said, said


# --- in the middle of training: the run stops everywhere, or is not disturbed ---------------------------------

STOP_LIMIT_S = 60.0
FAULT_AT_STEP = 25
SAVING = ("--checkpoint-every", "2")
"""Of a run that does little else."""
# The last: whether it happens while a checkpoint is being written.
TRAINING_CASES = {
    "host-1-killed": (KILLED, NAMES[1], False),
    "host-0-killed": (KILLED, NAMES[0], False),
    "host-1-cut-off": (CUT_OFF, NAMES[1], False),
    "disk-full": (DISK_FULL, NAMES[1], False),
    "share-full": (SHARE_FULL, NAMES[1], False),
    "mount-missing": (SHARE_MISSING, NAMES[0], False),
    "saving-host-1-killed": (KILLED, NAMES[1], True),
    "saving-share-full": (SHARE_FULL, NAMES[0], True),
}


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


def disturbed(
    pair: Pair,
    fault: Fault,
    host: str,
    *,
    saving: bool = False,
    run_id: str = "",
    step: int = FAULT_AT_STEP,
) -> str:
    """A run that met the fault at that step, and has come to an end on all hosts that still can be asked. run_id: of
    one that is resumed for it."""
    with ready(pair, fault, host) as happens:
        with pair.target() as target:
            run = pair.launch(
                target,
                *(SAVING if saving else ()),
                resume=runs.find(target.runs, run_id) if run_id else None,
            )
            pair.reach(run, step)
            if saving:
                until(lambda: pair.state(target, run) == "saving", "a checkpoint is being written", 60.0, 0.0)
            with pair.frozen():
                happens()
            began_s = time.monotonic()
        others = [name for name in NAMES if name != host]
        print(f"{others}: clean after {pair.until_clean(*others):.1f} s")
        assert time.monotonic() - began_s < STOP_LIMIT_S
    return run.run_id


@pytest.mark.nightly
def test_a_run_that_meets_a_full_share_in_a_checkpoint_and_then_loses_a_host_has_the_same_losses(
    pair: Pair, right_losses: Losses
) -> None:
    run_id = disturbed(pair, SHARE_FULL, NAMES[0], saving=True)
    with pair.target() as target:
        state, _ = pair.finish(target, runs.find(target.runs, run_id))
        pair.until_clean()
    if state == "done":  # the last checkpoint was all that it still lacked
        _, found = mended_and_gone_on(pair, run_id)
    else:
        assert state in ("failed", "lost")
        state, found = mended_and_gone_on(
            pair, disturbed(pair, KILLED, NAMES[0], run_id=run_id, step=2 * FAULT_AT_STEP)
        )
        assert state in ("failed", "lost", "done")
    assert found == right_losses


@pytest.mark.parametrize(("fault", "host", "saving"), nightly_but({"saving-share-full"}, TRAINING_CASES))
def test_a_run_whose_host_fails_stops_everywhere_and_goes_on_with_the_same_losses(
    pair: Pair, right_losses: Losses, fault: Fault, host: str, saving: bool
) -> None:
    state, found = mended_and_gone_on(pair, disturbed(pair, fault, host, saving=saving))
    assert state in ("failed", "lost", "done")
    assert found == right_losses


@pytest.mark.nightly
def test_a_host_whose_door_and_tools_change_does_not_disturb_what_runs_there(
    pair: Pair, right_losses: Losses
) -> None:
    names = ("KEY_REFUSED", "HOST_KEY_CHANGED", "DEVICE_HELD", "PYTHON_MISSING")
    harmless = [getattr(pairs, name) for name in names]
    with pair.target() as target:
        run = pair.launch(target)
        pair.reach(run, FAULT_AT_STEP)
        with broken(pair, *((fault, NAMES[1]) for fault in harmless)):
            until(lambda: read(run).current_result() is not None, "it ends", pair.end_limit_s, 0.3)
    state, found = mended_and_gone_on(pair, run.run_id)
    assert state == "done"
    assert found == right_losses


# --- the launcher is killed with SIGKILL: nothing stays half-started, and `fab` goes on ---------------------------

CHECKOUT = Path(__file__).resolve().parents[3]
LAUNCH_LIMIT_S = 120.0
HALF_STARTED_LIMIT_S = 60.0
# `fab` as it is, but for its death: at a phase, or when only the processes on these hosts have been started.
DYING_FAB = """
import os, signal, sys
from backends import host_backend
from launch import launching

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

phase, only = sys.argv.pop(1), sys.argv.pop(1)
if only:
    def start(plan, agents):
        agents[int(only)].ask("start", host_backend.plans.start(plan, int(only)))
        die()
    host_backend.start = start
else:
    setattr(launching if phase == "join" else host_backend, phase, die)
from fabfile.command_line import main
main()
"""


def dying_fab(pair: Pair, phase: str, only: str = "", *more: str) -> None:
    words = ["train", "--stack", str(pair.inventory_path), "--platform", "cpu", "--python", PYTHON]
    words += more or ["--job", "flax_mlm", "--args", " ".join(options())]
    done = subprocess.run(
        [sys.executable, "-c", DYING_FAB, phase, only, *words],
        cwd=CHECKOUT, env={**os.environ, "NO_COLOR": "1"}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=LAUNCH_LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("phase", ["preflight", "stage"])
def test_a_launcher_that_dies_before_it_starts_anything_leaves_nothing(pair: Pair, phase: str) -> None:
    before = pair.run_names()
    dying_fab(pair, phase)
    pair.until_clean(limit_s=10.0)
    with pair.target() as target:
        found = [run.run_id for run in runs.list_runs(target.runs)]
        assert set(found) <= set(before), "a run is listed that never was"


@pytest.mark.nightly  # tests/host/test_attempt.py each time, and a launcher that is killed tests/runs/test_stopped.py
@pytest.mark.parametrize("only", ["", "0", "1"], ids=["no-host", "host-0", "host-1"])
def test_what_a_dead_launcher_left_half_started_is_gone_and_what_it_had_started_goes_on_by_itself(
    pair: Pair, right_losses: Losses, only: str
) -> None:
    dying_fab(pair, "start", only)
    began_s = time.monotonic()
    pair.until_clean(limit_s=HALF_STARTED_LIMIT_S)
    print(f"started on {only or 'no host'}: clean after {time.monotonic() - began_s:.1f} s")
    with pair.target() as target:
        run = runs.find(target.runs, "latest")
        state, run = pair.finish(target, run)
        print(f"{run.run_id}: {state}: {(run.current_result() or {}).get('error')}")
        assert state in ("failed", "lost")
    dying_fab(pair, "join", "", "--resume", "latest")  # all is started then
    with pair.target() as target:
        state, run = pair.finish(target, runs.find(target.runs, "latest"), pair.end_limit_s)
        assert (state, losses(run)) == ("done", right_losses)
