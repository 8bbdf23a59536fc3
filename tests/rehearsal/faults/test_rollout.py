"""Faults that come between the phases of a launch: it fails with the reason, and is undone on every host."""

from __future__ import annotations

import time

import pytest

from launch.hosts import HostsError
from launch.launch import LaunchFailed
from tests.rehearsal.faults import faults
from tests.rehearsal.faults.faults import Fault, exactly_before, nightly_but, ready
from tests.rehearsal.faults.pair import NAMES, Pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FAILURE_LIMIT_S = 120.0
"""No longer than the limit of one question, of a stop, and of connecting again."""
CASES = {
    "stage-killed": ("stage", faults.KILLED),
    "stage-cut-off": ("stage", faults.CUT_OFF),
    "stage-disk-full": ("stage", faults.DISK_FULL),
    "start-killed": ("start", faults.KILLED),
    "start-cut-off": ("start", faults.CUT_OFF),
    "start-disk-full": ("start", faults.DISK_FULL),
    "start-mount-missing": ("start", faults.SHARE_MISSING),
    "start-wrong-python": ("start", faults.PYTHON_MISSING),
    "join-killed": ("join", faults.KILLED),
    "join-cut-off": ("join", faults.CUT_OFF),
    "join-disk-full": ("join", faults.DISK_FULL),
}


EACH_TIME = {"stage-disk-full", "start-killed", "join-killed"}


@pytest.mark.parametrize(("phase", "fault"), nightly_but(EACH_TIME, CASES))
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
