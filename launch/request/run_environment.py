"""The environment variables and secrets that a user gives a run: how they are read, and which names are refused."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from contracts.errors import RequestError
from contracts.host_interface import SET_BY_IMAGE, SHORTEST_SECRET
from jobs.runtime.ranks.secret_values import is_missing
from launch.plan import launcher_names
from launch.targets import Plan, Secret

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LONGEST_VALUE = 32 * 2**10
"""Characters of a value. The system takes 128 KiB (MAX_ARG_STRLEN in Linux's include/uapi/linux/binfmts.h)."""
NAME_OF_SECRET = re.compile(
    r"(.*_)?(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|SECRET_KEY|PRIVATE_KEY)", re.IGNORECASE
)
SHELL = "shell"
FILE = "file:"
REFERENCE = re.compile(
    r"sm://(?P<project>[a-z0-9][a-z0-9.:-]*)/(?P<secret>[A-Za-z0-9_-]{1,255})(/(?P<version>latest|\d+))?"
)
"""A secret of Secret Manager: sm://PROJECT/SECRET, or sm://PROJECT/SECRET/VERSION."""


def read(env: Sequence[str], files: Sequence[str], shell: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the options give; of several values of one name, the last in `env`, else in `files`.

    env: NAME=VALUE, or NAME for its value in `shell`. files: files of such lines, as `docker run --env-file` and
    python-dotenv read them.

    Raises:
        RequestError: with every file that cannot be read, and every line and option that is no variable or whose name
            is that of a secret.
    """
    variables: dict[str, str] = {}
    mistakes: list[str] = []
    lines = [line for file in files for line in _lines("--env-file", file, mistakes)]
    options = [(f"--env {text}", *_split(text)) for text in env]
    for place, name, value in (*lines, *options):
        value = _value(place, name, value, shell, mistakes)
        if value is None:
            continue
        if NAME_OF_SECRET.fullmatch(name) and value:
            option = place.partition(" ")[0].replace("env", "secret")
            mistakes.append(
                f"{place.partition('=')[0]}: {name} names a secret, and run.json keeps what a variable holds; "
                f"give it by {option}"
            )
        variables[name] = value
    if mistakes:
        raise RequestError("\n".join(mistakes))
    return variables


def read_secrets(secrets: Sequence[str], files: Sequence[str], shell: Mapping[str, str]) -> dict[str, Secret]:
    """Return the secrets that the options give, as `read` does.

    secrets: NAME for its value in `shell`, or NAME=sm://PROJECT/SECRET. files: files of lines NAME=VALUE.

    Raises:
        RequestError: with every option, file and line that is none; no message has a value.
    """
    result: dict[str, Secret] = {}
    mistakes: list[str] = []
    for file in files:
        for place, name, value in _lines("--secret-file", file, mistakes):
            value = _value(place, name, value, shell, mistakes)
            if value is not None:
                result[name] = Secret(
                    source=f"{FILE}{os.path.abspath(os.path.expanduser(file))}", value=value
                )
    for text in secrets:
        name, reference = _split(text)
        if reference is None:
            value = _value(f"--secret {name}", name, None, shell, mistakes)
            if value is not None:
                result[name] = Secret(source=SHELL, value=value)
        elif not REFERENCE.fullmatch(reference):
            mistakes.append(
                f"--secret {name}=…: a value on a command line can be seen by others; export {name} and write "
                f"--secret {name}, or {name}=sm://PROJECT/SECRET for one in Secret Manager"
            )
        elif not NAME.fullmatch(name):
            mistakes.append(f"--secret {name}=…: {_NAME_RULE}")
        else:
            result[name] = Secret(source=reference)
    mistakes += [
        f"--secret {name}: its value has fewer than {SHORTEST_SECRET} characters, which cannot be masked in logs"
        for name, secret in result.items()
        if secret.value is not None and len(secret.value.strip()) < SHORTEST_SECRET
    ]
    if mistakes:
        raise RequestError("\n".join(mistakes))
    return result


def secrets_again(
    sources: Mapping[str, str], resolved: Mapping[str, Secret], shell: Mapping[str, str]
) -> dict[str, Secret]:
    """Return the secrets of a run that is resumed: those that the request has, and the others from their sources.

    sources: as run.json has them. resolved: those of the request.

    Raises:
        RequestError: a value is no longer where it came from.
    """
    result, mistakes = dict(resolved), []
    for name, source in sources.items():
        if name in resolved:
            continue
        try:
            if source == SHELL:
                result |= read_secrets([name], [], shell)
            elif source.startswith(FILE):
                result[name] = read_secrets([], [source.removeprefix(FILE)], shell)[name]
            else:
                result[name] = Secret(source=source)
        except KeyError:
            mistakes.append(
                f"{source.removeprefix(FILE)}: has no {name}, a secret of the run; add it, or give --secret {name}"
            )
        except RequestError as error:
            mistakes.append(f"{error}; it is a secret of the run")
    if mistakes:
        raise RequestError("\n".join(mistakes))
    return result


def require_references(sources: Mapping[str, str], requester: str) -> None:
    """Make sure that the secrets of a run can be read without the user.

    requester: the option or command that needs it.

    Raises:
        RequestError: with every secret that only a shell or a file of the user's has.
    """
    own = [name for name, source in sources.items() if not REFERENCE.fullmatch(source)]
    if own:
        raise RequestError(
            f"--secret {', '.join(own)}: {requester} starts the run without you, and reads secrets from Secret Manager "
            "only; write --secret NAME=sm://PROJECT/SECRET"
        )


def check_references(secrets: Mapping[str, Secret], environ: Mapping[str, str]) -> None:
    """Make sure that the secrets that hosts read themselves exist, as far as this machine can ask.

    Raises:
        RequestError: with every one that Secret Manager does not have.
    """
    missing = [name for name, one in secrets.items() if one.value is None and is_missing(one.source, environ)]
    if missing:
        raise RequestError(
            "\n".join(
                f"--secret {name}={secrets[name].source}: Secret Manager has no such secret or version; "
                f"`gcloud secrets list --project {secrets[name].source.split('/')[2]}` lists them"
                for name in missing
            )
        )


def check(plan: Plan) -> None:
    """Make sure that the variables and secrets of a plan are none that the launcher sets.

    Raises:
        RequestError: with every name that cannot be given.
    """
    options = {**dict.fromkeys(plan.env, "--env"), **dict.fromkeys(plan.secrets, "--secret")}
    mistakes, names = [], launcher_names(plan) if options else set()
    for name, option in options.items():
        if name.startswith("RUN_") or name in names:
            mistakes.append(f"{option} {name}: tpu-stack sets it itself (docs/scripts.md); leave it out")
        elif plan.container is not None and SET_BY_IMAGE.fullmatch(name):
            mistakes.append(f"{option} {name}: the image sets it; leave it out, or add --runtime bare")
    mistakes += [
        f"--env {name}: is a --secret too; leave one out" for name in plan.env if name in plan.secrets
    ]
    if mistakes:
        raise RequestError("\n".join(mistakes))


_FILE_RULE = "name a text file of lines NAME=VALUE or NAME"
_NAME_RULE = "a name has letters, digits and _, and begins with no digit"


def _value(
    place: str, name: str, value: str | None, shell: Mapping[str, str], mistakes: list[str]
) -> str | None:
    """Return the value of a variable, by default that in the shell; None, with a mistake more, where there is none."""
    place = place.partition("=")[0]
    if not NAME.fullmatch(name):
        mistakes.append(f"{place}: {_NAME_RULE}")
        return None
    if value is None and name not in shell:
        mistakes.append(f"{place}: {name} is not set in this shell; export it")
        return None
    value = shell[name] if value is None else value
    if "\0" in value:
        mistakes.append(f"{place}: the value has a NUL character, which no environment takes")
        return None
    if len(value) > LONGEST_VALUE:
        limit = f"at most {LONGEST_VALUE:,} are taken; put it into a file of the folder or the bucket"
        mistakes.append(f"{place}: the value has {len(value):,} characters; {limit}")
        return None
    return value


def _lines(option: str, file: str, mistakes: list[str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield of each variable in a file its place, its name and its value, None where the file has the name alone."""
    from dotenv.parser import parse_stream  # most runs have no such file

    try:
        with Path(file).expanduser().open(encoding="utf-8") as stream:
            bindings = list(parse_stream(stream))
    except OSError as error:
        mistakes.append(f"{option} {file}: cannot be read: {error.strerror}; {_FILE_RULE}")
        return
    except UnicodeDecodeError:
        mistakes.append(f"{option} {file}: is not UTF-8; {_FILE_RULE}")
        return
    for binding in bindings:
        place = f"{option} {file}, line {binding.original.line}"
        if binding.error:
            mistakes.append(f"{place}: is neither NAME=VALUE nor NAME")
        elif binding.key is not None:
            yield place, binding.key, binding.value


def _split(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    return name, value if equals else None
