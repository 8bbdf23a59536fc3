"""What is installed against what the lock names. Pure but for `installed`."""

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
    """Package → version, of this interpreter."""
    found = importlib.metadata.distributions()
    return {normal(distribution.name): distribution.version for distribution in found}


def differences(wanted: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """In words, by name; empty where both are the same. A build of the same version for CPUs (+cpu) is the same."""
    return [
        f"{name} is {found.get(name, 'missing')}, the lock says {wanted.get(name, 'nothing of it')}"
        for name in sorted({*wanted, *found})
        if wanted.get(name) != (found[name].removesuffix("+cpu") if name in found else None)
    ]


def normal(name: str) -> str:
    """A package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
