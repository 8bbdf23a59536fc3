"""What goes wrong on hosts: one host's error, and the errors of several, none hiding another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(kw_only=True, eq=False)
class HostError(Exception):
    """What went wrong on one host, and what to do about it. Not frozen: raising sets an exception's traceback."""

    host: str
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.host}: {self.reason}" + (f" → {self.remedy}" if self.remedy else "")


class HostsError(Exception):
    """One or more hosts could not do what was asked; every one is listed."""

    def __init__(self, what: str, errors: Sequence[HostError]) -> None:
        super().__init__("\n  ".join([what, *map(str, errors)]))
        self.errors = tuple(errors)
