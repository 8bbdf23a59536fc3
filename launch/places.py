"""Where a copied file or folder goes, by what there is already."""

from __future__ import annotations

import dataclasses
import os
import posixpath
from pathlib import Path
from typing import Literal

from contracts.errors import RequestError

Kind = Literal["file", "folder", "nothing"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """What there is where a copy shall go: at `path` itself, and in it under the source's name."""

    path: str
    kind: Kind
    inside: Kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy:
    """Where a copy goes. replaces: a folder that is there has to go."""

    path: str
    replaces: bool


def decide(name: str, kind: Kind, place: Place, *, force: bool) -> Copy:
    """Where a file or folder called `name` goes: as with `cp`, into a folder that is there, else under that very name.

    A file takes the place of a file. A folder takes the place of a folder only by force, and is never mixed with it.

    Raises:
        RequestError: something is in the way.
    """
    into = place.kind == "folder" or place.path.endswith("/")
    path = posixpath.join(place.path, name) if into else place.path
    there = place.inside if into else place.kind
    if place.kind == "file" and into:
        raise RequestError(f"{place.path} is a file, not a folder; name another target")
    if there != "nothing" and there != kind:
        raise RequestError(f"{path} is a {there} and the source is a {kind}; name another target")
    if there == "folder" and not force:
        raise RequestError(
            f"{path} is there already; --force replaces the whole folder, or name another target"
        )
    return Copy(path=path, replaces=there == "folder")


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; links are not followed."""
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_size if kind_of(path) == "file" else 0
    return sum(
        os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(path) for name in names
    )


def kind_of(path: Path) -> Kind:
    return "folder" if path.is_dir() else "file" if path.exists() or path.is_symlink() else "nothing"
