"""What a check finds, and how checks are carried out: one that fails, or breaks, hides no other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from contracts.errors import RequestError, first_line
from launch.hosts import HostError, HostsError
from launch.output import printable

State = Literal["ok", "warn", "fail", "skip"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What is known of one thing. host: on which one, where it is about one of several.

    area and name may be left to the check that found it.
    """

    area: str = ""
    name: str = ""
    state: State
    message: str
    remedy: str = ""
    host: str | None = None


def ok(message: str, *, host: str | None = None, name: str = "") -> Finding:
    return Finding(state="ok", message=message, host=host, name=name)


def warn(message: str, remedy: str, *, host: str | None = None, name: str = "") -> Finding:
    return Finding(state="warn", message=message, remedy=remedy, host=host, name=name)


def fail(message: str, remedy: str, *, host: str | None = None, name: str = "") -> Finding:
    return Finding(state="fail", message=message, remedy=remedy, host=host, name=name)


def skip(message: str) -> Finding:
    return Finding(state="skip", message=message)


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing to look at. `look` may raise: that is an answer too."""

    area: str
    name: str
    look: Callable[[], Iterable[Finding] | Finding]


def carry_out(checks: Iterable[Check]) -> Iterator[Finding]:
    """Look at one after the other, and give each answer as it is there."""
    for check in checks:
        for finding in _answers(check):
            yield dataclasses.replace(
                finding,
                area=check.area,
                name=finding.name or check.name,
                message=printable(finding.message),
                remedy=printable(finding.remedy),
            )


def _answers(check: Check) -> list[Finding]:
    try:
        findings = check.look()
        return [findings] if isinstance(findings, Finding) else list(findings)
    except HostError as error:
        return [fail(error.reason, error.remedy, host=error.host or None)]
    except HostsError as error:
        return [
            fail(host_error.reason, host_error.remedy, host=host_error.host) for host_error in error.errors
        ]
    except RequestError as error:
        return [fail(str(error), "")]
    except OSError as error:
        prefix = f"{error.filename}: " if error.filename else ""
        return [fail(f"{prefix}{error.strerror or error}", "see to that file or connection")]
    except Exception as error:  # a library's own errors, and mistakes of ours: the other checks go on
        return [fail(f"could not be looked at: {first_line(error)}", "")]
