"""What --stack, --slice and --hosts mean: the target of a request, on the backend that its slice has."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from backends.local.local_backend import on_this_machine
from contracts.errors import RequestError
from contracts.files import is_url, unwritable
from contracts.inventory import Host, Inventory, Slice
from contracts.process_environment import PLATFORMS
from launch.jobs import CHECKOUT
from launch.runs import Run
from launch.targets import LOCAL, Target, TargetRequest, in_catalogue


def resolve(request: TargetRequest, like: Run | None = None) -> Target:
    """Return the target that is asked for. like: a run that is resumed; on this machine with its hosts and platform.

    Raises:
        RequestError: there is no such stack, slice, host or platform, or it has no place for runs.
    """
    _require_platform(request)
    if request.stack == LOCAL:
        if request.slice not in (None, LOCAL):
            raise RequestError(f"--slice {request.slice}: this machine has no slices; say --stack as well")
        before = like.described["platform"] if like else None
        same = like is not None and request.platform in (None, before)
        return on_this_machine(
            hosts=request.hosts or (str(like.processes) if like and same else None),
            platform=request.platform or before or "cpu",
            python=request.python,
            runs=request.runs,
        )

    from launch import inventories  # this machine needs none

    inventory = request.preset.inventory if request.preset else inventories.read(request.stack)
    return inventory_target(inventories.renewed(inventory), request)


def _require_platform(request: TargetRequest) -> None:
    if request.platform is not None and request.platform not in PLATFORMS:
        raise RequestError(
            f'--platform: "{request.platform}" is not a platform; choose one of {", ".join(PLATFORMS)}'
        )


def read_inventory(request: TargetRequest) -> Inventory:
    """Return the inventory of a stack as it is now, whether it has hosts or not; of this machine its own.

    Raises:
        RequestError: there is no such stack.
    """
    _require_platform(request)
    if request.stack == LOCAL:
        return resolve(request).inventory
    from launch import inventories  # this machine needs none

    return inventories.renewed(
        request.preset.inventory if request.preset else inventories.read(request.stack)
    )


def slice_targets(inventory: Inventory, request: TargetRequest) -> list[Target]:
    """Return the target of every slice that may be meant, those without hosts left out. Raises as `resolve`."""
    if request.stack == LOCAL:
        return [resolve(request)]
    usable = [one_slice for one_slice in inventory.slices if one_slice.is_usable]
    named = [one_slice.name for one_slice in usable if request.slice in (None, one_slice.name)]
    return [inventory_target(inventory, dataclasses.replace(request, slice=name)) for name in named]


def keys_file(request: TargetRequest) -> Path:
    """Return the file with the confirmed keys of an inventory: beside it, or for a stack beside its configuration."""
    from launch import inventories

    if request.preset is not None:
        return request.preset.folder / "host-keys.json"
    if inventories.is_file(request.stack):
        return Path(request.stack).with_suffix(".host-keys.json")
    return CHECKOUT / f"Pulumi.{request.stack}.host-keys.json"


def inventory_target(inventory: Inventory, request: TargetRequest) -> Target:
    """Return the target of a slice on the backend that it has; nothing is connected to yet. Raises as `resolve`."""
    from launch import inventories

    inventory = inventories.with_keys(inventory, inventories.read_keys(keys_file(request)))
    one_slice = choose_slice(inventory, request.slice)
    if (pool := one_slice.pool) is not None:
        one_slice = with_hosts(one_slice, pool.nodes * one_slice.count)
    hosts = choose_hosts(one_slice.hosts, request.hosts)
    runs_url = place_of_runs(inventory, one_slice, request.runs)
    if pool is not None:
        from backends.pods import pod_backend

        return pod_backend.make_target(inventory, one_slice, hosts, runs_url, request)
    from backends.vm import ssh_backend  # with it comes all of SSH, which this machine does not need

    return ssh_backend.make_target(inventory, one_slice, hosts, runs_url, request)


def choose_slice(inventory: Inventory, name: str | None) -> Slice:
    """Return the slice called `name`, or the only one.

    Raises:
        RequestError: there is none of that name, several to choose from, or it has no hosts yet.
    """
    names = ", ".join(one_slice.name for one_slice in inventory.slices)
    if not inventory.slices:
        raise RequestError(
            f"the stack {inventory.stack} has no slice; add one to tpu-stack:slices, then `pulumi up`"
        )
    if name is None and len(inventory.slices) > 1:
        raise RequestError(f"--slice: the stack {inventory.stack} has several, say which: {names}")
    chosen = [one_slice for one_slice in inventory.slices if name in (None, one_slice.name)]
    if not chosen:
        raise RequestError(f'--slice: "{name}" is not a slice of {inventory.stack}; choose one of {names}')
    if not chosen[0].is_usable:
        raise RequestError(
            f"the slice {chosen[0].name} has no hosts yet: its {chosen[0].origin} was still waiting for capacity when "
            f"the stack was last updated; `pulumi up --stack {inventory.stack}` waits on"
        )
    return chosen[0]


def choose_hosts(hosts: Sequence[Host], text: str | None) -> tuple[Host, ...]:
    """Return the hosts that "0-3,5" means; all of them without a choice.

    Raises:
        RequestError: the text is no such list, or there is no such host.
    """
    if text is None:
        return tuple(hosts)
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None:
            raise RequestError(f'--hosts: "{text}" is not a list of hosts; write it as 0-3,5')
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= len(hosts):
            raise RequestError(f"--hosts {text}: the slice has the hosts 0 to {len(hosts) - 1}")
        chosen.update(range(first, last + 1))
    return tuple(hosts[index] for index in sorted(chosen))


def with_expected_hosts(inventory: Inventory) -> Inventory:
    """Return the inventory with the hosts that slices without any will have, so that a request can be checked. Pure.

    They have no addresses. A slice that is not in the catalogue stays as it is.
    """

    def expected(one_slice: Slice) -> Slice:
        entry = None if one_slice.is_usable else in_catalogue(one_slice.accelerator_type)
        return with_hosts(one_slice, entry.hosts * one_slice.count) if entry else one_slice

    return dataclasses.replace(inventory, slices=tuple(map(expected, inventory.slices)))


def with_hosts(one_slice: Slice, count: int) -> Slice:
    """Return a slice with hosts that have no addresses yet."""
    hosts = tuple(
        Host(
            index=index, name=f"{one_slice.name}-{index}", internal_address="", external_address=None,
            user=None, host_keys=(), reach="direct",
        )
        for index in range(count)
    )  # fmt: skip
    return dataclasses.replace(one_slice, hosts=hosts)


def place_of_runs(inventory: Inventory, one_slice: Slice, requested: str | None) -> str:
    """Return the folder of the runs of a slice, a path on its hosts or a URL. requested: as --runs says it.

    Raises:
        RequestError: it is no such place, or the stack has none.
    """
    if requested is not None:
        if problem := unwritable(requested):
            raise RequestError(f"--runs {requested}: {problem}")
        if not is_url(requested) and not requested.startswith("/"):
            raise RequestError(
                f"--runs {requested}: must be an absolute path on the hosts, or a URL such as gs://…"
            )
        return requested.rstrip("/")
    # A slice that may be in several zones finds its runs in the bucket, whichever it is in.
    mount = None if one_slice.zones or one_slice.pool else inventory.storage.nfs_mount
    place = mount or inventory.storage.bucket_url
    if place is None and one_slice.pool is not None:
        raise RequestError(
            f"the stack {inventory.stack} has no bucket, and the runs of {one_slice.name}, whose hosts are pods, have "
            "to be in one; set tpu-stack:storage.bucket, or say where with --runs"
        )
    if place is None and one_slice.zones:
        raise RequestError(
            f"the stack {inventory.stack} has no bucket, and {one_slice.name} may be in {', '.join(one_slice.zones)}: "
            "its runs have to be in one; set tpu-stack:storage.bucket, or say where with --runs"
        )
    if place is None:
        raise RequestError(
            f"the stack {inventory.stack} has neither NFS nor a bucket, and the hosts of {one_slice.name} need one "
            "place for their runs; set tpu-stack:storage, or say where with --runs"
        )
    return f"{place}/runs"
