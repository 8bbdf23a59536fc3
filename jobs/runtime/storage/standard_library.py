"""The modules of Python's own library, which are text that every machine has."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_NOT_MODULES = frozenset(
    {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
)


def stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_modules() -> Iterator[Path]:
    """The standard library's own modules: no tests, no IDLE, no lib2to3, nothing installed beside them."""
    for folder, folders, names in os.walk(stdlib_root()):
        folders[:] = [name for name in folders if name not in _NOT_MODULES]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))
