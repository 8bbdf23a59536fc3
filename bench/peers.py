"""Environments of other people's programs that ours are compared with, each from its own hashed lock.

They lie under the cache folder, named by the lock's content, and are made when first asked for: PyTorch's takes 5 GiB,
since the registry's build for Linux does not import without its CUDA libraries."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from jobs.runtime.cache import user_cache_dir

LOCKS = Path(__file__).resolve().with_name("locks")
MAKE_LIMIT_S = 1800
WHOLE = "whole"
"""The file that says of an environment that everything was installed."""


def python_of(peer: str) -> Path:
    """The interpreter that has what `bench/locks/<peer>.txt` pins; its environment is made where it is missing.

    Raises:
        subprocess.CalledProcessError: it could not be installed; uv has said why.
    """
    lock = LOCKS / f"{peer}.txt"
    name = hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()[:12]
    home = user_cache_dir() / "peers" / f"{peer}-{name}"
    home.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{home}.lock", timeout=MAKE_LIMIT_S):
        if not (home / WHOLE).exists():
            shutil.rmtree(home, ignore_errors=True)
            uv = str(Path(sys.executable).with_name("uv"))
            for command in install_commands(uv, home, lock):
                subprocess.run(command, check=True, timeout=MAKE_LIMIT_S)
            (home / WHOLE).touch()
    return home / "bin" / "python"


def install_commands(uv: str, home: Path, lock: Path) -> list[list[str]]:
    """An environment at `home` with exactly what `lock` pins."""
    return [
        [uv, "venv", "--quiet", "--python", sys.executable, str(home)],
        [
            uv,
            "pip",
            "sync",
            "--quiet",
            "--require-hashes",
            "--python",
            str(home / "bin" / "python"),
            str(lock),
        ],
    ]


def run(peer: str, script: Path, arguments: Sequence[str], *, limit_s: float) -> str:
    """What `script` prints in the peer's environment, which sees nothing of this checkout or of any hub.

    Raises:
        RuntimeError: it failed; the message ends with what it said.
    """
    command = [str(python_of(peer)), "-I", str(script), *arguments]
    done = subprocess.run(
        command, env=environment(os.environ), capture_output=True, text=True, timeout=limit_s, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{json.dumps(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def environment(inherited: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """`inherited` without what would lead the peer's Python to this checkout, and without a network."""
    kept = {name: value for name, value in inherited.items() if not name.startswith("PYTHON")}
    return {**kept, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "USE_TF": "0"}
