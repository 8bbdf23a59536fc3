"""Compares the installed packages with the lock. Pure but for `installed`."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping

PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==([^\s;\\]+)\s*\\?$")
CONTINUES = re.compile(r"^\s+--hash=|^\s*#|^\s*$")


def read(text: str) -> dict[str, str]:
    """Package → version. Raises ValueError on a line that is no pin: a lock for one platform has no conditions."""
    pins: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if pin := PIN.match(line):
            pins[normal(pin[1])] = pin[2]
        elif not CONTINUES.match(line):
            raise ValueError(
                f"line {number} of the lock is {line!r}; it has to be NAME==VERSION, as `make lock` writes"
            )
    return pins


def installed() -> dict[str, str]:
    """This interpreter's packages: name → version."""
    distributions = importlib.metadata.distributions()
    return {normal(distribution.name): distribution.version for distribution in distributions}


def differences(locked: Mapping[str, str], installed_versions: Mapping[str, str]) -> list[str]:
    """The differences in words, sorted by name. A build of the same version for CPUs (+cpu) is no difference."""
    return [
        f"{name} is {installed_versions.get(name, 'missing')}, the lock says {locked.get(name, 'nothing of it')}"
        for name in sorted({*locked, *installed_versions})
        if locked.get(name)
        != (installed_versions[name].removesuffix("+cpu") if name in installed_versions else None)
    ]


def normal(name: str) -> str:
    """A package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
