"""Makes .venv from a hashed lock. `make` runs it before every command; the second time nothing is left to do.

Standard library of Python 3.8 and nothing else: it runs before anything is installed, on any Python.
In order: find a Python that the project can use, make .venv with it, put uv there by hash, let uv install
the lock, put this checkout on its path. A stamp written after each half says what is already true, so an
interrupted install goes on where it was, and a touched file installs nothing."""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, Iterator, Mapping, Optional, Sequence

from tools.interpreter import NoInterpreterError, find_interpreter, probe

# Each is enough for every command of the Makefile. An environment keeps its lock until another is asked for.
LOCKS = ("dev", "gpu")
LOCK_WAIT_LIMIT_S = 1800

# Settings of the caller's shell that would send an install somewhere else than .venv.
_MISLEADING = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "UV_PYTHON")


class InstallError(Exception):
    """What went wrong and what to do about it, for a person."""


def fingerprint(*parts: bytes) -> str:
    """One hash over parts; moving a byte from one part to the next changes it."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(b"%d:" % len(part) + part)
    return whole.hexdigest()


def count_packages(lock: str) -> int:
    """How many packages a lock pins, for this platform or another."""
    return len(re.findall(r"^[A-Za-z0-9][^=\s]*==", lock, flags=re.MULTILINE))


def reason_to_rebuild(
    stamp: Optional[Mapping[str, str]], wanted: Mapping[str, str], version: str
) -> Optional[str]:
    """Why a .venv that is there cannot be used as it is; None when it can. `version` is what its interpreter
    answers when it is run, empty when it does not run."""
    if stamp is None:
        return "it is not finished, or was not made by make"
    if stamp.get("root") != wanted["root"]:
        return "it was made for another folder, {}".format(stamp.get("root"))
    if not version:
        return "its interpreter, {}, is gone".format(stamp.get("python"))
    if stamp.get("version") != version:
        return "its interpreter was Python {} and is now {}".format(stamp.get("version"), version)
    if wanted["python"] and stamp.get("python") != wanted["python"]:
        return "it has {}, and PYTHON asks for {}".format(stamp.get("python"), wanted["python"])
    if stamp.get("uv") != wanted["uv"]:
        return "the lock names another uv"
    return None


def duration(seconds: float) -> str:
    """12.3 → '12 s', 75 → '1 min 15 s'."""
    minutes, rest = divmod(max(1, round(seconds)), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def calm(environ: Mapping[str, str]) -> Dict[str, str]:
    """The caller's environment without what would lead an installer out of .venv."""
    kept = {name: value for name, value in environ.items() if name not in _MISLEADING}
    kept["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    return kept


def read_stamp(path: Path) -> Optional[Dict[str, str]]:
    """A stamp's contents; None when it is absent or not whole."""
    try:
        stamp = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) else None


def write_stamp(path: Path, stamp: Mapping[str, str]) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(stamp, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(str(beside), str(path))


def carry_out(argv: Sequence[str], purpose: str, environ: Mapping[str, str]) -> None:
    """Runs a step quietly. Raises InstallError with what the tool printed when it fails."""
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=dict(environ), check=False, text=True, errors="replace",
    )  # fmt: skip
    if done.returncode != 0:
        said = done.stdout.strip() or f"(nothing; exit code {done.returncode})"
        raise InstallError(
            f"{purpose} failed; it said:\n\n{said}\n\nMend that and make again: it goes on from here."
        )


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Only one install at a time in a checkout. The kernel frees the lock of a process that dies."""
    with path.open("w") as handle:
        deadline = time.monotonic() + LOCK_WAIT_LIMIT_S
        told = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InstallError("it takes more than half an hour; end that make") from None
                if not told:
                    print("another make is installing into .venv; waiting for it …", flush=True)
                    told = True
                time.sleep(0.2)
        yield


class Checkout:
    """One checkout's .venv and what it is to be made from."""

    def __init__(self, root: Path, *, lock: Optional[str], python: str, environ: Mapping[str, str]) -> None:
        self.root = root
        self.venv = root / ".venv"
        self.python = str(self.venv / "bin" / "python")
        self.environ = calm(environ)
        self.asked = python
        self.base_stamp = self.venv / ".made-by-make"
        self.full_stamp = self.venv / ".installed"
        self.lock = lock or (read_stamp(self.full_stamp) or {}).get("lock") or LOCKS[0]
        self.lock_file = f"requirements/{self.lock}.txt"
        self.wanted_base = {
            "root": str(root),
            "python": find_interpreter(python, self.environ).path if python else "",
            "uv": fingerprint(self._read("requirements/uv.txt")),
        }
        key = fingerprint(self._read(self.lock_file), self._read("pyproject.toml"))
        self.wanted_full = {"lock": self.lock, "key": key}

    def _read(self, name: str) -> bytes:
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            raise InstallError(f"{name} is missing; `git checkout -- {name}` restores it") from None

    def reason_to_rebuild(self) -> Optional[str]:
        """None when .venv is there with uv in it, for this folder and with an interpreter that runs."""
        stamp = read_stamp(self.base_stamp)
        answer = probe(self.python) if stamp else None
        version = ".".join(map(str, answer.version[:2])) if answer else ""
        return reason_to_rebuild(stamp, self.wanted_base, version)

    def has_base(self) -> bool:
        return self.reason_to_rebuild() is None

    def is_complete(self) -> bool:
        return read_stamp(self.full_stamp) == self.wanted_full and self.has_base()

    def make_base(self) -> None:
        """.venv with uv in it and nothing else."""
        if self.venv.is_symlink():
            raise InstallError(f".venv is a link to {os.readlink(str(self.venv))}; remove it and make again")
        python = find_interpreter(self.asked, self.environ)
        if self.venv.exists():
            print(f"making .venv again: {self.reason_to_rebuild()}", flush=True)
            shutil.rmtree(str(self.venv))
        print(f"making .venv with {python.words} …", flush=True)
        carry_out([python.path, "-m", "venv", str(self.venv)], "making .venv", self.environ)
        pip = [self.python, "-m", "pip", "install", "--quiet"]
        hashed = ["--require-hashes", "--only-binary", ":all:", "-r", "requirements/uv.txt"]
        carry_out([*pip, *hashed], "installing uv", self.environ)
        version = ".".join(map(str, python.version[:2]))
        write_stamp(self.base_stamp, {**self.wanted_base, "python": python.path, "version": version})

    def install(self) -> None:
        """The lock's packages, exactly those, and this checkout on the path."""
        count = count_packages(self._read(self.lock_file).decode())
        print(f"installing {count} locked packages into .venv …", flush=True)
        # The stamp must not outlive the packages that it vouches for.
        if self.full_stamp.exists():
            self.full_stamp.unlink()
        uv = [str(self.venv / "bin" / "uv"), "pip"]
        quiet = ["--quiet", "--python", self.python]
        hashed = ["--require-hashes", "--only-binary", ":all:", self.lock_file]
        carry_out([*uv, "sync", *quiet, *hashed], f"installing {self.lock_file}", self.environ)
        # setuptools is in the lock: nothing is fetched to build with.
        editable = ["--no-build-isolation", "--no-deps", "--offline", "--editable", str(self.root)]
        carry_out([*uv, "install", *quiet, *editable], "putting this checkout on .venv's path", self.environ)
        write_stamp(self.full_stamp, self.wanted_full)


def bring_up_to_date(checkout: Checkout, *, only_uv: bool = False) -> None:
    """Installs what is missing, and says and does nothing when nothing is. Raises InstallError."""
    enough = checkout.has_base if only_uv else checkout.is_complete
    if enough():
        return
    with alone(checkout.root / ".install.lock"):
        if enough():
            return
        start = time.monotonic()
        if not checkout.has_base():
            checkout.make_base()
        if not only_uv:
            checkout.install()
        print(f"done in {duration(time.monotonic() - start)}", flush=True)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools.install", description="Make .venv from a hashed lock.")
    parser.add_argument(
        "--lock", choices=LOCKS, help="which requirements/*.txt; default: the one installed, or dev"
    )
    parser.add_argument(
        "--python", default="", help="the Python to make .venv with; default: the first that will do"
    )
    parser.add_argument(
        "--only-uv", action="store_true", help="stop when uv is there: enough to renew the locks"
    )
    options = parser.parse_args(argv)
    root = Path(__file__).resolve().parent.parent
    os.chdir(str(root))
    # A polite kill unwinds as Ctrl-C does, so that the installer underneath ends too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        checkout = Checkout(root, lock=options.lock, python=options.python, environ=os.environ)
        bring_up_to_date(checkout, only_uv=options.only_uv)
    except (InstallError, NoInterpreterError, OSError) as problem:
        print(f"install: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninstall: interrupted; the next make goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
