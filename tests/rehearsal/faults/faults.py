"""What goes wrong with a host of the pair, and how it is mended."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
from _pytest.mark import ParameterSet

from launch import launch
from tests.rehearsal.faults.pair import Pair

CLOCK_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Fault:
    """cause and mend take the pair and a host's name. says: a part of what the launcher must say of that host."""

    cause: Callable[[Pair, str], object]
    mend: Callable[[Pair, str], object]
    says: str = ""


KILLED = Fault(
    lambda pair, host: pair.machines.kill(host),
    lambda pair, host: pair.machines.restart(host),
    "does not answer",
)
CUT_OFF = Fault(
    lambda pair, host: pair.faults.cut(host), lambda pair, host: pair.faults.heal(host), "does not answer"
)
DISK_FULL = Fault(
    lambda pair, host: pair.faults.fill_disk(host),
    lambda pair, host: pair.faults.empty_disk(host),
    "No space left",
)
SHARE_FULL = Fault(
    lambda pair, host: pair.faults.fill_share(host),
    lambda pair, host: pair.faults.empty_share(host),
    "No space left",
)
DEVICE_HELD = Fault(
    lambda pair, host: pair.faults.hold_device(host),
    lambda pair, host: pair.faults.release_device(host),
    "accel0 is held by pid",
)
SHARE_MISSING = Fault(
    lambda pair, host: pair.faults.unmount_share(host),
    lambda pair, host: pair.faults.mount_share(host),
    "/mnt/share is not mounted",
)
PYTHON_MISSING = Fault(
    lambda pair, host: pair.faults.break_python(host),
    lambda pair, host: pair.faults.mend_python(host),
    "/opt/jobs/bin/python",
)
KEY_REFUSED = Fault(
    lambda pair, host: pair.faults.refuse_keys(host),
    lambda pair, host: pair.faults.accept_keys(host),
    "does not let",
)
HOST_KEY_CHANGED = Fault(
    lambda pair, host: pair.faults.change_host_key(host),
    lambda pair, host: pair.faults.restore_host_key(host),
    "key",
)

CLOCK_OFF = Fault(
    lambda pair, host: pair.faults.set_clock(host, CLOCK_S),
    lambda pair, host: pair.faults.set_clock(host, 0.0),
    "the clock is +3600",
)


@contextlib.contextmanager
def broken(pair: Pair, *faults: tuple[Fault, str]) -> Iterator[None]:
    """The pair with these faults, which are mended again whatever happens."""
    with contextlib.ExitStack() as stack:
        for fault, host in faults:
            stack.callback(fault.mend, pair, host)
            fault.cause(pair, host)
        yield


@contextlib.contextmanager
def ready(pair: Pair, fault: Fault, host: str) -> Iterator[Callable[[], None]]:
    """Call what it gives, and the fault is there; it is mended at the end."""

    def happens() -> None:
        fault.cause(pair, host)

    try:
        yield happens
    finally:
        fault.mend(pair, host)


@contextlib.contextmanager
def exactly_before(phase: str, happens: Callable[[], Any]) -> Iterator[None]:
    """It happens when the phases before have been carried out on all hosts, and this one not yet on any."""
    carried_out = getattr(launch, phase)

    def disturbed(*arguments: Any, **named: Any) -> Any:
        happens()
        return carried_out(*arguments, **named)

    with mock.patch.object(launch, phase, disturbed):
        yield


def nightly_but(each_time: set[str], cases: Mapping[str, Sequence[object]]) -> list[ParameterSet]:
    """The cases as parameters; of one rule's cases some are enough each time, and `make test-nightly` runs all."""
    assert each_time <= set(cases)
    return [
        pytest.param(*case, id=name, marks=() if name in each_time else pytest.mark.nightly)
        for name, case in cases.items()
    ]
