"""What a rule says of a configuration: an error stops `pulumi up`, a warning and a note do not. Pure."""

from __future__ import annotations

import dataclasses
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """`path` is the configuration's key as a user writes it, tpu-stack:slices[0].zone."""

    severity: Severity
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def error(path: str, message: str) -> Finding:
    return Finding(severity="error", path=path, message=message)


def warning(path: str, message: str) -> Finding:
    return Finding(severity="warning", path=path, message=message)


def note(path: str, message: str) -> Finding:
    return Finding(severity="note", path=path, message=message)


def refused(path: str, message: str, *, unless: str, allowed: bool) -> Finding:
    """An error that names the key that allows it, or, where that is set, the same as a warning."""
    if allowed:
        return warning(path, message)
    return error(path, f"{message}; if that is meant, set {unless}: true")


def slice_path(index: int, key: str = "") -> str:
    return f"tpu-stack:slices[{index}]" + (f".{key}" if key else "")
