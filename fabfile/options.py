"""The options that every task about hosts has: which stack, which slice, which hosts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launch.runs import Run
    from launch.target import Target
    from launch.targets import Given, Wanted

STACK = "where: local (this machine), a Pulumi stack, an inventory file, or rehearsal (default: $TPU_STACK)"
SLICE = "a slice of the stack, by name (default: the only one)"
HOSTS = "which hosts, such as 0-3,5 (default: all; on this machine: how many)"
RUNTIME = "bare, or docker: in the framework's image (default: docker where the stack has one)"
ACCESS = "a container's access to its host: devices (only the TPU's nodes), or privileged"
WHERE = {"stack": STACK, "slice": SLICE, "hosts": HOSTS}
REHEARSAL = "rehearsal"


def target(
    stack: str = "",
    slice: str = "",
    hosts: str = "",
    *,
    platform: str = "",
    python: str = "",
    runs: str = "",
    like: Run | None = None,
) -> Target:
    """The hosts that the options mean; an empty option was not given. like: a run that is to go on there.

    Raises:
        RequestError: there is no such stack, slice or host, or no rehearsal is up.
    """
    from launch.targets import resolve

    return resolve(wanted(stack, slice, hosts, platform=platform, python=python, runs=runs), like)


def wanted(
    stack: str = "", slice: str = "", hosts: str = "", *, platform: str = "", python: str = "", runs: str = ""
) -> Wanted:
    """What the options ask for, before anything is looked up. Raises RequestError: no rehearsal is up."""
    from launch.targets import Wanted

    chosen = stack or os.environ.get("TPU_STACK") or "local"
    return Wanted(
        stack=chosen,
        slice=slice or None,
        hosts=hosts or None,
        platform=platform or None,
        python=python or None,
        runs=runs or None,
        given=_rehearsal() if chosen == REHEARSAL else None,
    )


def after_dashes(c: Any) -> list[str]:
    """The words behind `--` on the command line, as they were typed."""
    return list(c.after_dashes)


def _rehearsal() -> Given:
    """The rehearsal that is up: its stand-ins come first on PATH, and its bucket in place of Google's."""
    from contracts.errors import RequestError
    from launch.inventories import parse
    from launch.targets import Given
    from rehearsal import state

    try:
        found = state.open_rehearsal()
    except state.RehearsalError as error:
        raise RequestError(f"--stack {REHEARSAL}: {error}") from None
    os.environ.update(found.environment)
    return Given(
        folder=state.folder_of(os.environ),
        inventory=parse(found.inventory_json, "the rehearsal"),
        platform=found.platform,
        python=found.python,
        stand_in_devices=tuple(found.device_globs),
    )
