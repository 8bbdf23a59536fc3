"""What a check answers, and how checks are carried out: one that fails, or breaks, hides no other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from contracts.errors import RequestError
from launch.display import printable
from launch.hosts import HostError, HostsError

State = Literal["ok", "warn", "fail", "skip"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What is known of one thing. host: on which one, where it is about one of several."""

    area: str
    name: str
    state: State
    message: str
    remedy: str = ""
    host: str | None = None


@dataclasses.dataclass(frozen=True)
class Said:
    """A check's answer before it is known whose it is."""

    state: State
    message: str
    remedy: str = ""
    host: str | None = None
    name: str | None = None


def ok(message: str, *, host: str | None = None) -> Said:
    return Said("ok", message, host=host)


def warn(message: str, remedy: str, *, host: str | None = None) -> Said:
    return Said("warn", message, remedy, host)


def fail(message: str, remedy: str, *, host: str | None = None) -> Said:
    return Said("fail", message, remedy, host)


def skip(message: str, *, host: str | None = None) -> Said:
    return Said("skip", message, host=host)


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing to look at. `look` may raise: that is an answer too."""

    area: str
    name: str
    look: Callable[[], Iterable[Said] | Said]


def carry_out(checks: Iterable[Check]) -> Iterator[Finding]:
    """Look at one after the other, and give each answer as it is there."""
    for check in checks:
        for said in _answers(check):
            yield Finding(
                area=check.area,
                name=said.name or check.name,
                state=said.state,
                message=printable(said.message),
                remedy=printable(said.remedy),
                host=said.host,
            )


def _answers(check: Check) -> list[Said]:
    try:
        said = check.look()
        return [said] if isinstance(said, Said) else list(said)
    except HostError as error:
        return [fail(error.reason, error.remedy, host=error.host or None)]
    except HostsError as error:
        return [fail(each.reason, each.remedy, host=each.host) for each in error.errors]
    except RequestError as error:
        return [fail(str(error), "")]
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return [fail(f"{where}{error.strerror or error}", "see to that file or connection")]
    except Exception as error:  # a library's own errors, and mistakes of ours: the other checks go on
        text = str(error).splitlines()[0] if str(error) else ""
        return [fail(f"could not be looked at: {type(error).__name__}: {text}", "")]
