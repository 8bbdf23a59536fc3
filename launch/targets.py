"""What --stack, --slice and --hosts mean: this machine, a Pulumi stack, or a file with an inventory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from contracts.errors import RequestError
from contracts.inventory import Inventory
from launch import inventories, local
from launch.runs import Run
from launch.target import LOCAL, Target

PLATFORMS = ("cpu", "gpu", "tpu")
PYTHON = "~/.local/share/tpu-stack/venv/bin/python"
"""Where `fab deploy` puts the interpreter that has what the jobs need."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """An inventory that is at hand already, and what it cannot say of its hosts: that of a rehearsal, in `folder`."""

    inventory: Inventory
    folder: Path
    platform: str
    python: str
    stand_in_devices: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """A target as a user asks for it; None: the default.

    hosts: on this machine how many, else which ("0-3,5"). runs: a folder on the hosts or a URL, for runs.
    """

    stack: str = LOCAL
    slice: str | None = None
    hosts: str | None = None
    platform: str | None = None
    python: str | None = None
    runs: str | None = None
    given: Given | None = None


def resolve(wanted: Wanted, like: Run | None = None) -> Target:
    """The target that is asked for. like: a run that is to go on; on this machine with its hosts and its platform.

    Raises:
        RequestError: there is no such stack, slice, host or platform, or it has no place for runs.
    """
    if wanted.platform is not None and wanted.platform not in PLATFORMS:
        raise RequestError(
            f'--platform: "{wanted.platform}" is not a platform; choose one of {", ".join(PLATFORMS)}'
        )
    if wanted.stack == LOCAL:
        if wanted.slice not in (None, LOCAL):
            raise RequestError(f"--slice {wanted.slice}: this machine has no slices; say --stack as well")
        before = like.described["platform"] if like else None
        same = like is not None and wanted.platform in (None, before)
        return local.resolve(
            hosts=wanted.hosts or (str(like.processes) if like and same else None),
            platform=wanted.platform or before or "cpu",
            python=wanted.python,
            runs=wanted.runs,
        )
    from launch.remote import of_inventory  # with it comes all of SSH, which this machine alone does not need

    inventory = wanted.given.inventory if wanted.given else inventories.read(wanted.stack)
    return of_inventory(inventory, wanted)
