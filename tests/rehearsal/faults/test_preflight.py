"""Faults that are there before a launch: it is refused, nothing has been started, and every reason is told."""

from __future__ import annotations

import time

import pytest

from launch.hosts import HostsError
from tests.rehearsal.faults import faults
from tests.rehearsal.faults.faults import Fault, broken, nightly_but
from tests.rehearsal.faults.pair import NAMES, Pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

REFUSAL_LIMIT_S = 45.0
FAULTS = {
    "killed": faults.KILLED,
    "cut-off": faults.CUT_OFF,
    "disk-full": faults.DISK_FULL,
    "device-held": faults.DEVICE_HELD,
    "mount-missing": faults.SHARE_MISSING,
    "wrong-python": faults.PYTHON_MISSING,
    "key-refused": faults.KEY_REFUSED,
    "host-key-changed": faults.HOST_KEY_CHANGED,
    "clock-off": faults.CLOCK_OFF,
}
EACH_TIME = {"host-key-changed", "clock-off"}
"""The others come together in the tests below."""


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


@pytest.mark.parametrize("fault", nightly_but(EACH_TIME, {name: [fault] for name, fault in FAULTS.items()}))
def test_a_host_that_cannot_take_part_is_named_with_the_reason_and_a_remedy(pair: Pair, fault: Fault) -> None:
    said = refusal(pair, (fault, NAMES[1]))
    assert said, "no reason is given"
    assert all(line.startswith(f"{NAMES[1]}: ") for line in said), said
    assert any(fault.says in line and "→" in line for line in said), said


def test_what_is_wrong_with_each_host_is_told_at_once(pair: Pair) -> None:
    wrong = [
        (faults.PYTHON_MISSING, NAMES[0]),
        (faults.DEVICE_HELD, NAMES[0]),
        (faults.DISK_FULL, NAMES[1]),
        (faults.SHARE_MISSING, NAMES[1]),
    ]
    said = refusal(pair, *wrong)
    for fault, host in wrong:
        assert any(line.startswith(f"{host}: ") and fault.says in line for line in said), (fault, said)


def test_a_host_that_cannot_be_reached_hides_nothing_that_is_wrong_with_the_other(pair: Pair) -> None:
    said = refusal(pair, (faults.CUT_OFF, NAMES[0]), (faults.DEVICE_HELD, NAMES[1]))
    assert any(line.startswith(f"{NAMES[0]}: ") and faults.CUT_OFF.says in line for line in said), said
    assert any(line.startswith(f"{NAMES[1]}: ") and faults.DEVICE_HELD.says in line for line in said), said


@pytest.mark.nightly
def test_a_full_share_is_found_on_every_host(pair: Pair) -> None:
    said = refusal(pair, (faults.SHARE_FULL, NAMES[0]))
    assert {line.partition(":")[0] for line in said} == set(NAMES), said
