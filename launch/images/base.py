"""The base that all images begin with: one line in images/base.txt, a tag and the digest that it had."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import docker

from contracts.errors import RequestError
from launch.images.engine import asking
from launch.images.recipe import FOLDER

FILE = FOLDER / "base.txt"
VARIABLE = "TPU_STACK_BASE_IMAGE"
"""Names another base, such as the stand-in that tests use where no registry can be reached (tools/stand_in_base.py)."""
PINNED = re.compile(r"(?P<tag>[a-z0-9][a-z0-9._:/-]*:[\w.-]+)@(?P<digest>sha256:[0-9a-f]{64})")


def read(environ: Mapping[str, str], file: Path = FILE) -> str:
    """The base as a Dockerfile names it.

    Raises:
        RequestError: the file names none by its digest.
    """
    if given := environ.get(VARIABLE):
        return given
    return _pinned(file)[0]


def _pinned(file: Path) -> re.Match[str]:
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{file}: {getattr(error, 'strerror', None) or error}; git has it") from None
    match = PINNED.fullmatch(text)
    if match is None:
        raise RequestError(
            f'{file}: "{text}" is no base by tag and digest; write NAME:TAG@sha256:… in one line'
        )
    return match


def update(client: docker.DockerClient, say: Callable[[str], None], file: Path = FILE) -> bool:
    """Ask the registry which digest the tag has now, and write it down; whether it moved.

    Raises:
        RequestError: the registry cannot be asked.
    """
    found = _pinned(file)
    tag, old = found["tag"], found["digest"]
    with asking(f"asking the registry for {tag}"):
        new = client.images.get_registry_data(tag).id
    if new == old:
        say(f"base {tag}: still {old}")
        return False
    beside = file.with_name(f"{file.name}.new")
    beside.write_text(f"{tag}@{new}\n", encoding="utf-8")
    os.replace(beside, file)
    say(f"base {tag}\n  was {old}\n  now {new}\n  in {file}; every image is built anew from it")
    return True
