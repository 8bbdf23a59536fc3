"""A host's side of a deployment, carried out here: the runner under the oldest Python, in a home of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from launch.deploy.deploy import RUNNER
from launch.deploy.steps import Step, to_json

CarryOut = Callable[..., list[dict[str, Any]]]


def oldest_python() -> str:
    """The oldest from 3.10 on that is installed here, else the one that runs the tests."""
    for minor in (10, 11):
        places = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))
        found = shutil.which(f"python3.{minor}", path=os.defpath) or next(map(str, places), None)
        if found is not None:
            return found
    return sys.executable


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home directory of the host's user; its name wants quoting."""
    path = tmp_path / "home of o'user"
    path.mkdir()
    return path


@pytest.fixture
def carry_out(home: Path) -> CarryOut:
    """Carries out steps as a host does; what it answered, line by line, without what is only under way."""

    def run(
        steps: Sequence[Step], *, environ: dict[str, str] | None = None, under_way: bool = False
    ) -> list[dict[str, Any]]:
        done = subprocess.run(
            [oldest_python(), "-S", "-E", "-c", RUNNER.read_text(), to_json(steps)],
            env={**os.environ, "HOME": str(home), **(environ or {})},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stderr == ""
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        assert done.returncode == int(any(answer["state"] == "failed" for answer in answers))
        return [answer for answer in answers if under_way or answer["state"] != "doing"]

    return run
