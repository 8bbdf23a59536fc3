"""Makes .venv from a hashed lock with uv. `make` runs it before every command; the second time nothing is left to do.

Standard library of Python 3.8 only: it runs before anything is installed, on any Python. In order: fetch uv by hash
into .uv, let uv find a Python that the project can use and make .venv with it, let uv install the lock, put this
checkout on its path. A stamp after each step says what is already true, so an interrupted install continues where it
was, and a touched file installs nothing."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import glob
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Iterator, Mapping, Sequence

PREFERRED = "3.12"
"""Also the oldest that the project runs on."""
# Each is enough for every command of the Makefile. An environment keeps its lock until another is asked for.
LOCKS = ("dev", "gpu")
LOCK_WAIT_LIMIT_S = 1800
PROBE_LIMIT_S = 30

# Settings of the caller's shell that would send an install somewhere else than .venv.
_MISLEADING = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "UV_PYTHON")
_QUESTION = """
import sys
print(getattr(sys, "_base_executable", sys.executable))
print("%d.%d.%d" % sys.version_info[:3])
"""


class InstallError(Exception):
    """What went wrong and what to do about it, for a person."""


def probe(command: str) -> tuple[str, str] | None:
    """Runs a Python: its own executable (no shim, no environment's link) and its version, such as 3.12.1.

    None where it does not run, as a pyenv shim does not for a version that this folder has not chosen."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        path, version = answer([command, "-I", "-c", _QUESTION], os.environ).splitlines()
        return path, version
    return None


def series(version: str) -> tuple[int, ...]:
    """(3, 12) of 3.12.1."""
    return tuple(map(int, version.split(".")[:2]))


def reason_to_rebuild(stamp: Mapping[str, str], root: Path, python: str, requested: str) -> str | None:
    """Why a .venv that is there cannot be used as it is; None when it can.

    python: the version that its interpreter answers, empty where it does not run. requested: the path of the Python
    that PYTHON names, empty without one."""
    made_with, version = stamp.get("python"), stamp.get("version", "")
    if "root" not in stamp:
        return "it is not finished, or was not made by make"
    if stamp["root"] != str(root):
        return "it was made for another folder, {}".format(stamp["root"])
    if not python:
        return f"its interpreter, {made_with}, is gone"
    if series(python) != series(version):
        return f"its interpreter was Python {version} and is now {python}"
    if requested and made_with != requested:
        return f"it has {made_with}, and PYTHON asks for {requested}"
    return None


def damaged(expected: Sequence[str], names: Sequence[str]) -> list[str]:
    """What of a site-packages folder is gone, or is there a second time in another version.

    expected: its names after the install. Packages that somebody added are no damage."""
    missing = set(expected) - set(names)
    locked = {name.split("-")[0] for name in expected if name.endswith(".dist-info")}
    added = {name for name in set(names) - set(expected) if name.endswith(".dist-info")}
    return sorted(missing | {name for name in added if name.split("-")[0] in locked})


def calm(environ: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without what would lead an installer out of .venv."""
    environment = {name: value for name, value in environ.items() if name not in _MISLEADING}
    return {
        **environment,
        "PIP_USER": "0",
        "PIP_REQUIRE_VIRTUALENV": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def answer(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """What a command that answers at once prints. Raises OSError or SubprocessError."""
    return subprocess.run(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=dict(environ),
        timeout=PROBE_LIMIT_S, check=True, text=True,
    ).stdout.strip()  # fmt: skip


def runs(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether a command that is there also runs: a pyenv shim fails for the versions that it is not installed in."""
    try:
        answer(argv, environ)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def fingerprint(*parts: bytes) -> str:
    """One hash over parts; moving a byte from one part to the next changes it."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def carry_out(argv: Sequence[str], purpose: str, environ: Mapping[str, str]) -> None:
    """Runs a step quietly. Raises InstallError with what the tool printed when it fails."""
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=dict(environ), check=False, text=True, errors="replace",
    )  # fmt: skip
    if done.returncode != 0:
        output = done.stdout.strip() or f"(nothing; exit code {done.returncode})"
        raise InstallError(
            f"{purpose} failed; it said:\n\n{output}\n\nMend that and make again: it goes on from here."
        )


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one install at a time in a checkout. The kernel frees the lock of a process that dies."""
    with path.open("w") as handle:
        deadline = time.monotonic() + LOCK_WAIT_LIMIT_S
        is_announced = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InstallError("it takes more than half an hour; end that make") from None
                if not is_announced:
                    print("another make is installing into .venv; waiting for it …", flush=True)
                    is_announced = True
                time.sleep(0.2)
        yield


class Checkout:
    """One checkout's uv and .venv, and what they are to be made from."""

    def __init__(self, root: Path, *, lock: str | None, python: str, environ: Mapping[str, str]) -> None:
        self.root = root
        self.environ = calm(environ)
        self.venv, self.python = root / ".venv", str(root / ".venv" / "bin" / "python")
        self.uv_home, self.uv = root / ".uv", str(root / ".uv" / "bin" / "uv")
        self.stamp_file = self.venv / ".installed"
        self.asked = self._requested_python(python) if python else None
        self.lock = lock or self.stamp().get("lock") or LOCKS[0]
        self.lock_file = f"requirements/{self.lock}.txt"
        self.key = fingerprint(self._read(self.lock_file), self._read("pyproject.toml"))
        self.uv_key = fingerprint(self._read("requirements/uv.txt"))

    def _read(self, name: str) -> bytes:
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            raise InstallError(f"{name} is missing; `git checkout -- {name}` restores it") from None

    @staticmethod
    def _requested_python(command: str) -> tuple[str, str]:
        """The Python that PYTHON=… names, and no other."""
        python = probe(command)
        if python is None or series(python[1]) < series(PREFERRED):
            finding = f"is Python {python[1]}" if python else "does not run as a Python"
            raise InstallError(f"PYTHON={command}: this {finding}; name a Python {PREFERRED} or newer")
        return python

    def stamp(self) -> dict[str, str]:
        """What .venv was made from, and which lock is whole in it; empty where it says nothing that can be read."""
        with contextlib.suppress(OSError, ValueError):
            stamp = json.loads(self.stamp_file.read_text(encoding="utf-8"))
            return stamp if isinstance(stamp, dict) else {}
        return {}

    def write_stamp(self, stamp: Mapping[str, str]) -> None:
        new_stamp = self.stamp_file.with_name(".installed.new")
        new_stamp.write_text(json.dumps(stamp, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(str(new_stamp), str(self.stamp_file))

    def has_uv(self) -> bool:
        environment_folder = self.uv_home / self.uv_key
        return environment_folder.exists() and os.access(self.uv, os.X_OK)

    def reason_to_rebuild(self) -> str | None:
        """None when .venv is there, for this folder and with an interpreter that runs."""
        stamp = self.stamp()
        python = probe(self.python) if stamp else None
        return reason_to_rebuild(
            stamp, self.root, python[1] if python else "", self.asked[0] if self.asked else ""
        )

    def contents(self) -> list[str]:
        """The names in .venv's site-packages."""
        folders = self.venv.glob("lib/python*/site-packages")
        return sorted(name for folder in folders for name in os.listdir(str(folder)) if name != "__pycache__")

    def damage(self) -> list[str]:
        """What was removed from the packages of a finished install, or replaced, by an installer other than make."""
        return damaged(self.stamp().get("contents", "").splitlines(), self.contents())

    def is_complete(self) -> bool:
        stamp = self.stamp()
        is_complete = (stamp.get("lock"), stamp.get("key")) == (self.lock, self.key) and "contents" in stamp
        return is_complete and self.reason_to_rebuild() is None and not self.damage()

    def fetch_uv(self) -> None:
        """The locked uv, by whatever on this machine installs a wheel: a uv, this Python's pip, or a new venv's."""
        print("fetching uv …", flush=True)
        if self.uv_home.exists():
            shutil.rmtree(str(self.uv_home))
        path = os.pathsep.join([str(self.venv / "bin"), self.environ.get("PATH", os.defpath)])
        with tempfile.TemporaryDirectory() as scratch:
            uv = shutil.which("uv", path=path)
            if uv is not None and runs([uv, "--version"], self.environ):
                pip = [uv, "pip", "install", "--python", sys.executable]
            elif importlib.util.find_spec("pip"):
                pip = [sys.executable, "-m", "pip", "install"]
            elif importlib.util.find_spec("ensurepip"):
                carry_out([sys.executable, "-m", "venv", scratch], "making a place for pip", self.environ)
                pip = [os.path.join(scratch, "bin", "python"), "-m", "pip", "install"]
            else:
                raise InstallError(
                    f"uv installs this project, and {sys.executable} has neither pip nor ensurepip to fetch it with; "
                    "run `apt-get install python3-venv`, or install uv, and make again"
                )
            hashed = ["--require-hashes", "--only-binary", ":all:", "-r", "requirements/uv.txt"]
            carry_out([*pip, "--quiet", "--target", str(self.uv_home), *hashed], "fetching uv", self.environ)
        (self.uv_home / self.uv_key).touch()

    def find_python(self) -> tuple[str, str]:
        """The Python asked for, or else the first on this machine that will do: on PATH, pyenv's, uv's.

        Raises InstallError, which names those that are there and the ways to get one."""
        if self.asked:
            return self.asked
        pyenv = self.environ.get("PYENV_ROOT") or os.path.join(self.environ.get("HOME", ""), ".pyenv")
        path = [self.environ.get("PATH", os.defpath), *glob.glob(f"{pyenv}/versions/{PREFERRED}*/bin")]
        environ = {**self.environ, "PATH": os.pathsep.join(path)}
        find = [self.uv, "python", "find", "--system", "--no-project", "--no-python-downloads"]
        for version_request in (PREFERRED, f">={PREFERRED}"):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                python = probe(answer([*find, version_request], environ))
                if python:
                    return python
        installed = ""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            installed = answer([self.uv, "python", "list", "--only-installed"], environ)
        names = sorted({line.split()[0] for line in installed.splitlines() if line.strip()})
        raise InstallError(
            f"this project needs Python {PREFERRED} or newer, and this machine has: {', '.join(names) or 'none'}; "
            f"install one (`pyenv install {PREFERRED}`, `uv python install {PREFERRED}`, or where the system has it "
            f"`apt-get install python{PREFERRED}`) and make again, or name one: "
            f"`make PYTHON=/path/to/python{PREFERRED}`"
        )

    def make_venv(self) -> None:
        """.venv, empty."""
        if self.venv.is_symlink():
            raise InstallError(f".venv is a link to {os.readlink(str(self.venv))}; remove it and make again")
        path, version = self.find_python()
        if self.venv.exists():
            print(f"making .venv again: {self.reason_to_rebuild()}", flush=True)
            shutil.rmtree(str(self.venv))
        print(f"making .venv with Python {version} ({path}) …", flush=True)
        command = [self.uv, "venv", "--quiet", "--no-project", "--python", path, str(self.venv)]
        carry_out(command, "making .venv", self.environ)
        self.write_stamp({"root": str(self.root), "python": path, "version": version})

    def install(self) -> None:
        """The lock's packages, exactly those, and this checkout on the path."""
        count = len(re.findall(rb"^[A-Za-z0-9][^=\s]*==", self._read(self.lock_file), flags=re.MULTILINE))
        damage = self.damage()
        if damage:
            names = ", ".join(damage[:5]) + (", …" if len(damage) > 5 else "")
            print(f"mending .venv: something other than make has removed or replaced {names}", flush=True)
        print(f"installing {count} locked packages into .venv …", flush=True)
        # A stamp must not outlive the packages that it vouches for.
        identity = {name: self.stamp()[name] for name in ("root", "python", "version")}
        expected = {"contents": self.stamp()["contents"]} if damage else {}
        self.write_stamp({**identity, "lock": self.lock, **expected})
        uv, quiet = [self.uv, "pip"], ["--quiet", "--python", self.python]
        hashed = ["--require-hashes", "--only-binary", ":all:", self.lock_file]
        # setuptools is in the lock: nothing is fetched to build with.
        editable = ["--no-build-isolation", "--no-deps", "--offline", "--editable", str(self.root)]
        # uv compares versions, and does not miss a package's files.
        for all_anew in ([], ["--reinstall"]):
            sync = [*uv, "sync", *quiet, *all_anew, *hashed]
            carry_out(sync, f"installing {self.lock_file}", self.environ)
            carry_out(
                [*uv, "install", *quiet, *editable], "putting this checkout on .venv's path", self.environ
            )
            if not damage or not self.damage():
                break
        contents = "\n".join(self.contents())
        self.write_stamp({**identity, "lock": self.lock, "key": self.key, "contents": contents})


def bring_up_to_date(checkout: Checkout, *, only_uv: bool = False) -> None:
    """Installs what is missing, and says and does nothing when nothing is. Raises InstallError."""
    enough = checkout.has_uv if only_uv else checkout.is_complete
    if enough():
        return
    with locked(checkout.root / ".install.lock"):
        if enough():
            return
        start = time.monotonic()
        if not checkout.has_uv():
            checkout.fetch_uv()
        if not only_uv:
            if checkout.reason_to_rebuild() is not None:
                checkout.make_venv()
            checkout.install()
        print(f"done in {max(1, round(time.monotonic() - start))} s", flush=True)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools.install", description="Make .venv from a hashed lock.")
    add = parser.add_argument
    add("--lock", choices=LOCKS, help="which requirements/*.txt; default: the one installed, or dev")
    add("--python", default="", help="the Python to make .venv with; default: the first that will do")
    add("--only-uv", action="store_true", help="stop when uv is there: enough to renew the locks")
    options = parser.parse_args(argv)
    root = Path(__file__).resolve().parent.parent
    os.chdir(str(root))
    # A polite kill unwinds as Ctrl-C does, so that the installer underneath ends too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        checkout = Checkout(root, lock=options.lock, python=options.python, environ=os.environ)
        bring_up_to_date(checkout, only_uv=options.only_uv)
    except (InstallError, OSError) as problem:
        print(f"install: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninstall: interrupted; the next make goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
