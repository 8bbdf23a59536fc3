"""Programs of others that the launching side runs to their end."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from contracts.errors import RequestError


def run_program(
    argv: Sequence[str],
    *,
    cwd: Path,
    environ: Mapping[str, str] | None,
    limit_s: float,
    missing: str,
    late: str,
    text: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a program and return what it printed. text: its standard input. missing, late: what to say where it is not
    there, and where it has not ended within the limit.

    Raises:
        RequestError: one of these.
    """
    try:
        return subprocess.run(
            argv,
            cwd=cwd,
            env=environ,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except FileNotFoundError:
        raise RequestError(missing) from None
    except subprocess.TimeoutExpired:
        raise RequestError(late) from None
