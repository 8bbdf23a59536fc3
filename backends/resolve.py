"""What --stack, --slice and --hosts mean: the target of a request, on the backend that its slice has."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from backends.local.local_backend import on_this_machine
from contracts.errors import RequestError
from contracts.inventory import Inventory
from contracts.process import PLATFORMS
from launch.jobs import CHECKOUT
from launch.runs import Run
from launch.targets import LOCAL, Target, Wanted, choose_slice


def resolve(wanted: Wanted, like: Run | None = None) -> Target:
    """Return the target that is asked for. like: a run that is resumed; on this machine with its hosts and platform.

    Raises:
        RequestError: there is no such stack, slice, host or platform, or it has no place for runs.
    """
    _require_platform(wanted)
    if wanted.stack == LOCAL:
        if wanted.slice not in (None, LOCAL):
            raise RequestError(f"--slice {wanted.slice}: this machine has no slices; say --stack as well")
        before = like.described["platform"] if like else None
        same = like is not None and wanted.platform in (None, before)
        return on_this_machine(
            hosts=wanted.hosts or (str(like.processes) if like and same else None),
            platform=wanted.platform or before or "cpu",
            python=wanted.python,
            runs=wanted.runs,
        )

    from launch import inventories  # this machine needs none

    inventory = wanted.given.inventory if wanted.given else inventories.read(wanted.stack)
    return of_inventory(inventories.renewed(inventory), wanted)


def _require_platform(wanted: Wanted) -> None:
    if wanted.platform is not None and wanted.platform not in PLATFORMS:
        raise RequestError(
            f'--platform: "{wanted.platform}" is not a platform; choose one of {", ".join(PLATFORMS)}'
        )


def inventory_of(wanted: Wanted) -> Inventory:
    """Return the inventory of a stack as it is now, whether it has hosts or not; of this machine its own.

    Raises:
        RequestError: there is no such stack.
    """
    _require_platform(wanted)
    if wanted.stack == LOCAL:
        return resolve(wanted).inventory
    from launch import inventories  # this machine needs none

    return inventories.renewed(wanted.given.inventory if wanted.given else inventories.read(wanted.stack))


def of_each(inventory: Inventory, wanted: Wanted) -> list[Target]:
    """Return the target of every slice that may be meant, those without hosts left out. Raises as `resolve`."""
    if wanted.stack == LOCAL:
        return [resolve(wanted)]
    there = [each for each in inventory.slices if each.is_usable]
    named = [each.name for each in there if wanted.slice in (None, each.name)]
    return [of_inventory(inventory, dataclasses.replace(wanted, slice=name)) for name in named]


def keys_file(wanted: Wanted) -> Path:
    """Return the file with the confirmed keys of an inventory: beside it, or for a stack beside its configuration."""
    from launch import inventories

    if wanted.given is not None:
        return wanted.given.folder / "host-keys.json"
    if inventories.is_file(wanted.stack):
        return Path(wanted.stack).with_suffix(".host-keys.json")
    return CHECKOUT / f"Pulumi.{wanted.stack}.host-keys.json"


def of_inventory(inventory: Inventory, wanted: Wanted) -> Target:
    """Return the target of a slice on the backend that it has; nothing is connected to yet. Raises as `resolve`."""
    from launch import inventories

    inventory = inventories.with_keys(inventory, inventories.read_keys(keys_file(wanted)))
    one_slice = choose_slice(inventory, wanted.slice)
    if one_slice.pool is not None:
        from backends.pods import pod_backend

        return pod_backend.target_of(inventory, one_slice, one_slice.pool, wanted)
    from backends.vm import ssh_backend  # with it comes all of SSH, which this machine does not need

    return ssh_backend.target_of(inventory, one_slice, wanted)
