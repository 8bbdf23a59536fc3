"""A user's shell in a checkout of their own, in which a test types commands."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

from rehearsal.gcp_stand_in.world import World

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 90
# One line of the list of resources: what is done, type, name, and how it went.
LINE = re.compile(r"^ *(?:[-+~]+ +)?([\w-]+(?::[\w/]+)+) +(\S+)(?: +(\w.*))?$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command printed, both streams together, and its exit code."""

    code: int
    text: str

    def resources(self, status: str) -> set[tuple[str, str]]:
        """Type and name of those that the engine lists so."""
        found = LINE.findall(self.text)
        return {(short(kind), name) for kind, name, said in found if said.split()[:1] == [status]}

    @property
    def summary(self) -> list[str]:
        """What stands below "Resources:", of the preview and of the operation."""
        parts = re.findall(r"^Resources:\n((?: {4}.*\n)+)", self.text, re.MULTILINE)
        return [" ".join(part.split()) for part in parts]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shell:
    """A user's shell in a checkout of their own. environ: all that it has; nothing of the tests' own environment."""

    root: Path
    environ: dict[str, str]
    world: World

    def type(self, line: str, *, below: str = "") -> Answer:
        done = subprocess.run(
            shlex.split(line), cwd=self.root / below, env=self.environ, timeout=LIMIT_S, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        return Answer(code=done.returncode, text=done.stdout)

    def state(self) -> list[dict[str, Any]]:
        """What Pulumi knows to be there, its own providers left out."""
        deployment = json.loads(self.type("pulumi stack export").text)["deployment"]
        resources = deployment.get("resources") or []
        return [each for each in resources if not each["type"].startswith("pulumi:providers:")]


def short(type_token: str) -> str:
    """gcp:compute:Network of gcp:compute/network:Network, as the engine shows most types."""
    return re.sub(r"/[^:]*:", ":", type_token)


def copy_checkout(target: Path) -> None:
    """What git has or would take, links as links; no .venv, which may be a link that git would take, too."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if name != ".venv" and os.path.lexists(ROOT / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def make_environment(root: Path) -> None:
    """As `make install` would, with the packages of this Python, and with that checkout on its path."""
    venv.EnvBuilder(symlinks=True).create(root / ".venv")
    (packages,) = (root / ".venv").glob("lib/python*/site-packages")
    (packages / "checkout.pth").write_text(f"{root}\n{sysconfig.get_path('purelib')}\n")


def launcher(path: Path, module: str, *arguments: Path) -> None:
    """An executable that runs a module of this checkout with this Python, and leaves no trace in its environment."""
    words = shlex.join([sys.executable, "-m", module, *map(str, arguments)])
    path.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT))} exec {words} "$@"\n')
    path.chmod(0o755)
