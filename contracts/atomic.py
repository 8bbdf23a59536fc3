"""Files and folders that others see whole or not at all: made under a name beside their own, then renamed."""

from __future__ import annotations

import contextlib
import json
import os

TYPE_CHECKING = False  # the agent starts on every host for every launch, and `typing` is a fifth of its start
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import TypeVar

    Place = TypeVar("Place", str, Path)

SUFFIX = ".part"


def beside_name(name: str) -> str:
    """Return a name that nothing has yet, for what will be called `name`; it begins with a dot and ends with SUFFIX."""
    return f".{name[:200]}.{os.urandom(6).hex()}{SUFFIX}"


@contextlib.contextmanager
def atomic_path(target: Place) -> Iterator[Place]:
    """Yield a free name in the folder of `target`, which is made; what lies there at the end takes `target`'s place.

    After an exception nothing of it is left, and `target` is as it was.

    Raises:
        FileExistsError: `target` is a folder, or a folder would take the place of a file: they are never mixed.
    """
    refuse_to_merge(target)
    folder, name = os.path.split(target)
    os.makedirs(folder or ".", exist_ok=True)
    fresh = os.path.join(folder, beside_name(name))
    try:
        yield type(target)(fresh)
        if not os.path.islink(fresh) and os.path.isdir(fresh) and os.path.lexists(target):
            raise FileExistsError(f"{target} is a file, and a folder would take its place; remove it first")
        os.replace(fresh, target)
    except BaseException:
        remove(fresh)
        raise


def refuse_to_merge(target: str | Path) -> None:
    """Refuse a target that is a folder.

    Raises:
        FileExistsError: it is one, and half of each is worse than none.
    """
    if os.path.isdir(target):
        raise FileExistsError(f"{target} is a folder that is there already; name another, or remove it first")


def write(
    path: str | Path,
    data: bytes | str,
    *,
    mode: int | None = None,
    put: Callable[[str, str], None] | None = None,
    beside: str | None = None,
) -> None:
    """Write a file whole, text as UTF-8. Its folder has to be there.

    mode: exactly; None is what the umask leaves. put: how the file gets its name; os.replace where none is given. With
    os.link one that is there already stays. beside: the path that it has until then, on the same disk.

    Raises:
        FileExistsError: with os.link, there is a file already.
        OSError: the disk is full, or the folder is not there or not to be written.
    """
    folder, name = os.path.split(path)
    beside = beside or os.path.join(folder, beside_name(name))
    try:
        made = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
        with open(made, "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data.encode(errors="replace") if isinstance(data, str) else data)
        (put or os.replace)(beside, os.fspath(path))
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)


def write_json(path: str | Path, value: object, *, put: Callable[[str, str], None] | None = None) -> None:
    """Write a JSON file whole; see `write`."""
    write(path, json.dumps(value), put=put)


def remove(path: str | Path) -> None:
    """Remove a file, a link or a folder with all that is in it; nothing happens where there is none."""
    if os.path.isdir(path) and not os.path.islink(path):
        import shutil

        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
