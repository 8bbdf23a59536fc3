"""What a framework's `smoke.py` holds: a small model of its framework, and what only that framework has to prove.

The file imports nothing of its framework at its top, and nothing of this folder; functions do.
Every check runs in a process of its own, so nothing is kept from one to the next but what `save` wrote.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

Platform = Literal["cpu", "tpu"]
State = Any
"""What training changes, of whatever type the framework has: parameters, optimizer, the step it is at."""


class CheckFailed(Exception):
    """The image does not do what it is for; the message names what was found, what has to be, and the remedy."""


class Framework(Protocol):
    """The module `framework`; mypy knows modules as protocols."""

    @property
    def NAME(self) -> str:
        """The folder's name: jax."""

    @property
    def MODULES(self) -> tuple[str, ...]:
        """What must import, in the order in which a job imports it; the framework first."""

    @property
    def ENVIRONMENT(self) -> Mapping[Platform, Mapping[str, str]]:
        """Variables that a process of this framework needs on that platform, as jobs.runtime sets them."""

    @property
    def CHECKS(self) -> Mapping[str, Callable[[], str]]:
        """What else has to work, by name; each returns what it found in a few words, and raises where it does not."""

    def devices(self) -> tuple[str, str]:
        """The platform that the framework computes on when nothing is said (cpu, tpu), and its devices in words."""

    def start(self) -> State:
        """A small model and its optimizer with parameters by a fixed seed, on the device."""

    def step(self, state: State, number: int) -> tuple[State, float]:
        """One training step on data that is a function of `number`; the new state and its loss."""

    def save(self, state: State, folder: Path) -> None:
        """A checkpoint in the framework's own format, complete on return. `folder` is there and empty."""

    def load(self, folder: Path) -> State:
        """What `save` wrote, in a process that has started nothing yet."""

    def listen(self) -> Callable[[int], bool]:
        """Answer SIGTERM as a job of this framework does: the function says after a step whether to save and leave."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What a check is given."""

    framework: Framework
    platform: Platform
    folder: Path
    """Empty, writable, the check's own."""
    doing: Callable[[str], None]
    """Says what is done next; it is shown should the interpreter not live to tell."""
