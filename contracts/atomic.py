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
    replace: Callable[[str, str], None] | None = None,
    temporary_path: str | None = None,
) -> None:
    """Write a file whole, text as UTF-8. Its folder must exist.

    mode: the exact mode; None: by the umask. replace: gives the temporary file its name; by default os.replace. With
    os.link, an existing file stays. temporary_path: the path until then, on the same disk.

    Raises:
        FileExistsError: with os.link, if the file exists.
        OSError: the disk is full, or the folder does not exist or cannot be written.
    """
    folder, name = os.path.split(path)
    temporary_path = temporary_path or os.path.join(folder, beside_name(name))
    try:
        descriptor = os.open(
            temporary_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600
        )
        with open(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data.encode(errors="replace") if isinstance(data, str) else data)
        (replace or os.replace)(temporary_path, os.fspath(path))
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary_path)


def write_json(path: str | Path, value: object, *, replace: Callable[[str, str], None] | None = None) -> None:
    """Write a JSON file whole; see `write`."""
    write(path, json.dumps(value), replace=replace)


def remove(path: str | Path) -> None:
    """Remove a file, a link or a folder with all that is in it; nothing happens where there is none."""
    if os.path.isdir(path) and not os.path.islink(path):
        import shutil

        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
