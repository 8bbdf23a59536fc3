"""A file or folder of this machine that comes to be under another name, and gets its own when it is whole."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def beside(target: Path) -> Iterator[Path]:
    """A free name in the folder of `target`, which is made; what lies there at the end takes the place of `target`.

    After an exception nothing of it is left, and `target` is as it was.

    Raises:
        FileExistsError: `target` is a folder, or a folder would take the place of a file.
    """
    refuse_to_merge(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.parent / beside_name(target.name)
    try:
        yield fresh
        if not fresh.is_symlink() and fresh.is_dir() and (target.exists() or target.is_symlink()):
            raise FileExistsError(f"{target} is a file, and a folder would take its place; remove it first")
        os.replace(fresh, target)
    except BaseException:
        if fresh.is_dir() and not fresh.is_symlink():
            shutil.rmtree(fresh, ignore_errors=True)
        else:
            fresh.unlink(missing_ok=True)
        raise


def beside_name(name: str) -> str:
    """A name that nothing has yet, for what will be called `name`."""
    return f".{name[:200]}.{secrets.token_hex(6)}.part"


def refuse_to_merge(target: Path) -> None:
    """A folder is never mixed with what is there already: half of each is worse than none."""
    if target.is_dir():
        raise FileExistsError(f"{target} is a folder that is there already; name another, or remove it first")
