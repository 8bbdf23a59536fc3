"""Finding a Python that this project can use, by running the likely ones and asking them what they are.

Standard library of Python 3.8 only: see tools/install.py."""

import contextlib
import json
import os
import subprocess
from typing import Dict, Iterator, Mapping, NamedTuple, Optional, Sequence, Tuple

OLDEST: Tuple[int, int] = (3, 12)
PREFERRED = "3.12"
PROBE_LIMIT_S = 30

_QUESTION = """
import json, sys
try:
    import ensurepip, venv
    able = True
except ImportError:
    able = False
path = getattr(sys, "_base_executable", sys.executable)
print(json.dumps({"path": path, "version": list(sys.version_info[:3]), "able": able}))
"""


class NoInterpreterError(Exception):
    """No Python on this machine will do; the message says how to get one."""


class Interpreter(NamedTuple):
    """A Python that was run and answered."""

    path: str  # its own executable: no shim, no virtual environment's link
    version: Tuple[int, ...]
    able: bool  # to make a virtual environment: Debian ships venv and ensurepip apart

    @property
    def is_new_enough(self) -> bool:
        return self.version[:2] >= OLDEST

    @property
    def words(self) -> str:
        return "Python {} ({})".format(".".join(map(str, self.version)), self.path)


def suitable(found: Sequence[Interpreter]) -> Interpreter:
    """The first interpreter that is new enough and can make an environment.

    Raises NoInterpreterError otherwise; it names the Debian package that lacks, or ways to get a Python."""
    new_enough = [python for python in found if python.is_new_enough]
    for python in new_enough:
        if python.able:
            return python
    if new_enough:
        short = "{}.{}".format(*new_enough[0].version)
        raise NoInterpreterError(
            f"{new_enough[0].words} cannot make a virtual environment: its modules venv and ensurepip are "
            f"not installed; run `apt-get install python{short}-venv` and make again"
        )
    seen = ", ".join(python.words for python in found) or "none that runs"
    raise NoInterpreterError(
        f"this project needs Python {PREFERRED} or newer, and this machine has: {seen}; install one "
        f"(`pyenv install {PREFERRED}`, `uv python install {PREFERRED}`, or where the system has it "
        f"`apt-get install python{PREFERRED} python{PREFERRED}-venv`) and make again, "
        f"or name one: `make PYTHON=/path/to/python{PREFERRED}`"
    )


def probe(command: str) -> Optional[Interpreter]:
    """Runs a candidate and asks what it is; None when it does not run. Being on PATH is not enough: a pyenv
    shim is there for every version and fails for those not chosen in this folder."""
    try:
        answer = subprocess.run(
            [command, "-I", "-c", _QUESTION],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PROBE_LIMIT_S,
            check=True,
        ).stdout
        facts = json.loads(answer)
        return Interpreter(path=facts["path"], version=tuple(facts["version"]), able=facts["able"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None


def candidates(environ: Mapping[str, str]) -> Iterator[str]:
    """Commands that may be a Python new enough, likeliest first; uv is asked when nothing before will do."""
    yield "python" + PREFERRED
    yield "python3"
    for folder in environ.get("PATH", os.defpath).split(os.pathsep):
        for name in ("python" + PREFERRED, "python3", "python3.13", "python3.14"):
            if os.access(os.path.join(folder, name), os.X_OK):
                yield os.path.join(folder, name)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        yield subprocess.run(
            ["uv", "python", "find", "--no-project", "--no-python-downloads", ">=" + PREFERRED],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PROBE_LIMIT_S,
            check=True,
            text=True,
        ).stdout.strip()


def find_interpreter(asked: str, environ: Mapping[str, str]) -> Interpreter:
    """The Python asked for (PYTHON=…) and no other, or else the first suitable one of this machine."""
    if asked:
        python = probe(asked)
        if python is None:
            raise NoInterpreterError(
                f"PYTHON={asked}: this does not run as a Python; name a Python {PREFERRED} or newer"
            )
        return suitable([python])
    found: Dict[str, Interpreter] = {}
    for command in candidates(environ):
        python = probe(command)
        if python is not None:
            found.setdefault(os.path.realpath(python.path), python)
            if python.is_new_enough and python.able:
                break
    return suitable(list(found.values()))
