"""Finds a Go that builds what a checkout needs and no package of it carries. Standard library."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

OLDEST = (1, 21)  # from there on Go fetches the newer Go that a go.mod asks for
OTHER_PLACES = ("/usr/local/go/bin/go", "/opt/homebrew/bin/go", "/snap/bin/go")
ANSWER_LIMIT_S = 60
REQUIREMENT = f"Go {'.'.join(map(str, OLDEST))} or newer"


class GoError(Exception):
    """There is none. The message says which were found and are no good; who asked says what it is for."""


def find(environ: Mapping[str, str]) -> str:
    """The path of a Go that is new enough: of PATH, else of a usual place. Raises GoError."""
    versions = []
    for go in (shutil.which("go", path=environ.get("PATH", os.defpath)), *OTHER_PLACES):
        if go is None or not os.access(go, os.X_OK):
            continue
        output = answer([go, "env", "GOVERSION"], environ) or ""  # go1.26.8
        if tuple(int(part) for part in re.findall(r"\d+", output)[:2]) >= OLDEST:
            return go
        versions.append(f"{go} ({output or 'does not run'})")
    has = f"; this machine has {', '.join(versions)}" if versions else ""
    raise GoError(
        f"there is no {REQUIREMENT}{has}: https://go.dev/doc/install has it (Debian 12's package golang is too old)"
    )


def answer(argv: list[str], environ: Mapping[str, str], folder: Path | None = None) -> str | None:
    """What a command prints that answers at once; None where it fails."""
    try:
        done = subprocess.run(
            argv, cwd=folder, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=ANSWER_LIMIT_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout.strip()
