"""Checks: whatever one does, the others are carried out, and what is wrong has a place."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from contracts.errors import RequestError
from launch.doctor.check import Check, Said, carry_out, ok, warn
from launch.hosts import HostError, HostsError


def raising(error: BaseException) -> Callable[[], Said]:
    def look() -> Said:
        raise error

    return look


@pytest.mark.parametrize(
    ("error", "message", "host"),
    [
        (HostError(host="w-0", reason="refused", remedy="r"), "refused", "w-0"),
        (HostsError("all", [HostError(host="w-0", reason="refused")]), "refused", "w-0"),
        (RequestError("--slice: no"), "--slice: no", None),
        (OSError(13, "Permission denied", "/x"), "/x: Permission denied", None),
        (KeyError("name"), "could not be looked at: KeyError: 'name'", None),
    ],
)
def test_a_check_that_breaks_is_a_failure_and_the_next_one_is_carried_out(
    error: Exception, message: str, host: str | None
) -> None:
    broken, fine = carry_out([Check("a", "x", raising(error)), Check("a", "y", lambda: ok("fine"))])
    assert (broken.state, broken.message, broken.host) == ("fail", message, host)
    assert (fine.name, fine.state) == ("y", "ok")


def test_what_hosts_say_cannot_break_the_terminal() -> None:
    (finding,) = carry_out([Check("a", "x", lambda: warn("\x1b]0;owned\x07", "\x1b[2J"))])
    assert "\x1b" not in finding.message + finding.remedy


def test_an_interrupt_is_no_finding() -> None:
    with pytest.raises(KeyboardInterrupt):
        list(carry_out([Check("a", "x", raising(KeyboardInterrupt()))]))
