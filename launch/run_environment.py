"""The environment variables that a user gives a run: read from `--env` and `--env-file`, and checked against the
launcher's own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from contracts.errors import RequestError
from contracts.process import SET_BY_IMAGE
from launch.plan import launcher_names
from launch.targets import Plan

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LONGEST_VALUE = 32 * 2**10
"""Characters of a value. The system takes 128 KiB (MAX_ARG_STRLEN in Linux's include/uapi/linux/binfmts.h)."""


def read(env: Sequence[str], files: Sequence[str], shell: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the options give; of several values of one name, the last in `env`, else in `files`.

    env: NAME=VALUE, or NAME for its value in `shell`. files: files of such lines, as `docker run --env-file` and
    python-dotenv read them.

    Raises:
        RequestError: with every file that cannot be read, and every line and option that is no variable.
    """
    variables: dict[str, str] = {}
    mistakes: list[str] = []
    lines = [line for file in files for line in _lines(file, mistakes)]
    options = [(f"--env {text}", *_split(text)) for text in env]
    for place, name, value in (*lines, *options):
        if not NAME.fullmatch(name):
            mistakes.append(f"{place}: a name has letters, digits and _, and begins with no digit")
        elif value is None and name not in shell:
            mistakes.append(f"{place}: {name} is not set in this shell; export it, or write {name}=VALUE")
        else:
            variables[name] = shell[name] if value is None else value
            mistakes += _mistakes_of_value(place.partition("=")[0], variables[name])
    if mistakes:
        raise RequestError("\n".join(mistakes))
    return variables


def check(plan: Plan) -> None:
    """Make sure that the variables of a plan are none that the launcher sets.

    Raises:
        RequestError: with every name that cannot be given.
    """
    mistakes, names = [], launcher_names(plan) if plan.env else set()
    for name in plan.env:
        if name.startswith("RUN_") or name in names:
            mistakes.append(f"--env {name}: tpu-stack sets it itself (docs/scripts.md); leave it out")
        elif plan.container is not None and SET_BY_IMAGE.fullmatch(name):
            mistakes.append(f"--env {name}: the image sets it; leave it out, or add --runtime bare")
    if mistakes:
        raise RequestError("\n".join(mistakes))


def _lines(file: str, mistakes: list[str]) -> Iterator[tuple[str, str, str | None]]:
    from dotenv.parser import parse_stream  # most runs have no such file

    try:
        with Path(file).expanduser().open(encoding="utf-8") as stream:
            bindings = list(parse_stream(stream))
    except OSError as error:
        mistakes.append(f"--env-file {file}: cannot be read: {error.strerror}")
        return
    except UnicodeDecodeError:
        mistakes.append(f"--env-file {file}: is not UTF-8")
        return
    for binding in bindings:
        place = f"--env-file {file}, line {binding.original.line}"
        if binding.error:
            mistakes.append(f"{place}: is neither NAME=VALUE nor NAME")
        elif binding.key is not None:
            yield place, binding.key, binding.value


def _split(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    return name, value if equals else None


def _mistakes_of_value(place: str, value: str) -> list[str]:
    if "\0" in value:
        return [f"{place}: the value has a NUL character, which no environment takes"]
    if len(value) > LONGEST_VALUE:
        limit = f"at most {LONGEST_VALUE:,} are taken; put it into a file of the folder or the bucket"
        return [f"{place}: the value has {len(value):,} characters; {limit}"]
    return []
