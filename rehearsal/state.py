"""The state file of a rehearsal that is up, in a folder that only its user may read.

The daemon writes it, `fab … --stack rehearsal` and the stand-ins for gcloud and pulumi read it. The folder is
~/.cache/tpu-stack/rehearsal unless $TPU_STACK_REHEARSAL names another, so that two can be up side by side.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import filelock

from contracts import atomic

VERSION = 1
FOLDER_VARIABLE = "TPU_STACK_REHEARSAL"
FILE = "state.json"
LOCK = "lock"
SECRETS = "secrets"
"""A folder: what Secret Manager has, as files PROJECT/SECRET."""
STAND_INS = Path(__file__).resolve().parent / "bin"
STACK = "rehearsal"
SLICE = "main"

Phase = Literal["starting", "ready", "ending"]


class RehearsalError(Exception):
    """A request to the rehearsal was refused or failed; the message says why and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """pid: of the daemon. socket: the path where it is asked. inventory: as the program exported it; empty before.

    environment: what a launching command needs besides PATH. instances: instance name → address, of those that run.
    tpu_url: of the simulated Cloud TPU API. user, python: on the hosts, and so are devices, patterns of what stands for
    the device nodes of TPUs.
    """

    phase: Phase
    pid: int
    socket: str
    hosts: int
    inventory: str = ""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    instances: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tpu_url: str = ""
    user: str = ""
    python: str = ""
    devices: tuple[str, ...] = ()
    version: int = VERSION


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenRehearsal:
    """What launching needs of a rehearsal. environment: to be added to the command's own, PATH included."""

    inventory_json: str
    environment: Mapping[str, str]
    platform: str
    python: str
    device_globs: tuple[str, ...]


def rehearsal_folder(environ: Mapping[str, str]) -> Path:
    """The folder of this user's rehearsal, or of the one that the environment names."""
    if environ.get(FOLDER_VARIABLE):
        return Path(environ[FOLDER_VARIABLE]).absolute()
    return user_cache(environ) / "rehearsal"


def user_cache(environ: Mapping[str, str]) -> Path:
    """The user's cache folder for tpu-stack; a relative $XDG_CACHE_HOME is ignored, as its specification asks."""
    configured = Path(environ.get("XDG_CACHE_HOME") or "")
    cache = configured if configured.is_absolute() else Path(environ.get("HOME") or Path.home()) / ".cache"
    return cache / "tpu-stack"


def rehearsal_name(folder: Path) -> str:
    """The label of the machines of the rehearsal in a folder."""
    return f"rehearsal-{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:8]}"


def write(folder: Path, state: State) -> None:
    """Write the state file, readable by the user only."""
    atomic.write(folder / FILE, json.dumps(dataclasses.asdict(state), indent=1) + "\n", mode=0o600)


def read(folder: Path) -> State | None:
    """The recorded state, whether its daemon lives or not; None if there is none.

    Raises:
        RehearsalError: another version of tpu-stack wrote it.
    """
    try:
        values: Any = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RehearsalError(f"{folder / FILE} cannot be read: {error}; `fab rehearsal down`") from None
    fields = {field.name for field in dataclasses.fields(State)}
    if not isinstance(values, dict) or values.get("version") != VERSION or values.keys() != fields:
        raise RehearsalError(
            f"{folder / FILE} is of another version of tpu-stack; `fab rehearsal down`, then `fab rehearsal up`"
        )
    return State(**{**values, "devices": tuple(values["devices"])})


def is_alive(folder: Path) -> bool:
    """Whether a daemon holds that folder, as its lock says, which ends with the process however that ends."""
    if not (folder / LOCK).is_file():
        return False
    try:
        with filelock.FileLock(folder / LOCK, timeout=0):
            return False
    except filelock.Timeout:
        return True


def require(folder: Path) -> State:
    """The state of the rehearsal that is up.

    Raises:
        RehearsalError: there is none, or it is not ready.
    """
    current = read(folder)
    if current is None:
        raise RehearsalError("no rehearsal is up; `fab rehearsal up` starts one")
    if not is_alive(folder):
        raise RehearsalError(
            "the rehearsal ended without being taken down; `fab rehearsal down`, then `fab rehearsal up`"
        )
    if current.phase != "ready":
        raise RehearsalError(
            f"the rehearsal is {current.phase}, not ready; `fab rehearsal status` says how far it is"
        )
    return current


def open_rehearsal(environ: Mapping[str, str] | None = None) -> OpenRehearsal:
    """Return what launching needs of the rehearsal that is up.

    Raises:
        RehearsalError: there is none, or it is not ready.
    """
    environ = os.environ if environ is None else environ
    folder = rehearsal_folder(environ)
    current = require(folder)
    return OpenRehearsal(
        inventory_json=current.inventory,
        environment={
            **current.environment,
            FOLDER_VARIABLE: str(folder),
            "PATH": stand_ins_first(environ.get("PATH", os.defpath)),
            **_past_proxies(environ, current.environment),
        },
        platform="cpu",
        python=current.python,
        device_globs=current.devices,
    )


def _past_proxies(environ: Mapping[str, str], rehearsal_environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep requests to the rehearsal's servers, which are on this machine, away from proxies."""
    near = (
        urllib.parse.urlsplit(rehearsal_environment.get("STORAGE_EMULATOR_HOST", "")).hostname or "localhost"
    )
    return {
        name: ",".join(dict.fromkeys([*filter(None, environ.get(name, "").split(",")), near, "127.0.0.1"]))
        for name in ("NO_PROXY", "no_proxy")
    }


def stand_ins_first(path: str) -> str:
    """A PATH on which gcloud and pulumi are the rehearsal's."""
    return os.pathsep.join([str(STAND_INS), without_stand_ins(path)])


def without_stand_ins(path: str) -> str:
    """The PATH without the stand-ins, on which the daemon looks for the real Pulumi."""
    return os.pathsep.join(folder for folder in path.split(os.pathsep) if folder != str(STAND_INS))
