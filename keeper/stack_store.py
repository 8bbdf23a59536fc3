"""The control documents of a stack, in `<bucket>/control`, or of this machine, in `.control` of its runs folder.

stack.json          what its slices are made of, written by `pulumi up`: see `Stack`
inventory.json      slices that were made again since, by name, as contracts.inventory has them
runs/, slices/      what people want of runs and slices: see `launch.control`
bundles/            the code of submitted runs
executables/        notes of training steps that were compiled for them beforehand
leases/<slice>.json who may change a slice now: see `infra.documents.lease`
capacity.json       stock-outs that were seen: see `infra.documents.stock_outs`
deleted.json        slices that were deleted while they ran: see `infra.documents.deleted_slices`
used.json           when a TPU of a slice was last seen open: see `keeper.reclaim`
looked.json         when a pass last began, as it notes now and then: see `note_look`
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.resolve import read_inventory, resolve
from console import notify
from contracts.durations import MINUTE_S, spoken
from contracts.errors import RequestError
from contracts.inventory import RECORDED, SPECIFICATION, Inventory, InventoryError, from_json
from infra.documents import Documents
from jobs.runtime.storage.cache import user_cache_dir
from launch import targets
from launch.control.store import Content, Store
from launch.inventories import with_kept
from launch.targets import Target, TargetRequest

LOOKED = "looked.json"
NOTED_EVERY_S, NOTED_WITHIN_S = 15 * MINUTE_S, 2 * MINUTE_S
NEGLECTED_S = 2 * NOTED_EVERY_S


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """What the keeper has to know of a stack that Pulumi made.

    owner: the id that tells its slices from others'. slices: of each queued slice, by name, the properties that ask for
    it. inventory: of the stack, its slices without hosts. environment: variables of the keeper. platform,
    python, stand_in_devices: of a rehearsal's hosts.
    """

    project: str
    owner: str
    slices: Mapping[str, Mapping[str, Any]]
    inventory: Inventory
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    platform: str | None = None
    python: str | None = None
    stand_in_devices: tuple[str, ...] | None = None

    def take_environment(self) -> None:
        """Set the variables of the notification channels in this process, but for those that it has.

        Whoever may write in the bucket writes this document, so other variables are ignored: that of an API's endpoint
        would send the keeper's token elsewhere. A channel's value names a secret that the keeper's account may read.
        """
        for variable in notify.VARIABLES.values():
            value = self.environment.get(variable, "")
            if value.startswith(notify.SECRET):
                os.environ.setdefault(variable, value)


def stack_documents(target: Target) -> Documents:
    """Return the documents of a target's stack, or of this machine, beside its runs.

    Raises:
        RequestError: the stack has no place for them.
    """
    if target.capabilities.shares_files:
        return Documents(f"{target.runs_url.rstrip('/')}/.control")
    return _stack_documents(target.inventory, target.name)


def documents_for(request: TargetRequest) -> Documents:
    """Return the documents of the stack that is asked for, or of this machine; no host is needed.

    Raises:
        RequestError: there is no such stack, or as `stack_documents`.
    """
    if request.stack == targets.LOCAL:
        return stack_documents(resolve(request))
    return _stack_documents(read_inventory(request), request.stack)


def _stack_documents(inventory: Inventory, stack: str) -> Documents:
    if inventory.control is None:
        raise RequestError(
            f"--stack {stack}: what is kept or queued, and stock-outs, are noted in its bucket, and it has none; set "
            "tpu-stack:storage.bucket, then `pulumi up`"
        )
    return Documents(inventory.control)


WRITES_IT = "`pulumi up` writes it"


def stack_at(content: Content, url: str) -> Stack | None:
    """Return what `pulumi up` has written of the stack, with the slices as they were last recorded; None where it has
    not, as for this machine. url: of the documents.

    Raises:
        RequestError: this version cannot read it.
    """
    stack = _parsed(content.stack_values.get(SPECIFICATION), url)
    if stack is None:
        return None
    recorded = content.stack_values.get(RECORDED)
    recorded_inventory = with_kept(
        stack.inventory, None if recorded is None else json.dumps(recorded).encode()
    )
    return dataclasses.replace(stack, inventory=recorded_inventory)


def _parsed(content: Any, url: str) -> Stack | None:
    if not isinstance(content, dict):
        return None
    try:
        devices = content.get("stand_in_devices")
        return Stack(
            project=str(content["project"]),
            owner=str(content["owner"]),
            slices=dict(content["slices"]),
            inventory=from_json(content["inventory"]),
            environment=dict(content.get("environment") or {}),
            platform=content.get("platform"),
            python=content.get("python"),
            stand_in_devices=None if devices is None else tuple(devices),
        )
    except (KeyError, TypeError, ValueError, InventoryError) as error:
        raise RequestError(f"{url}/{SPECIFICATION} cannot be read ({error}); {WRITES_IT}") from None


def store_at(documents: Documents) -> Store:
    """Return the store in the documents, which remembers on this machine what it has read."""
    name = hashlib.sha256(documents.url.encode()).hexdigest()[:16]
    return Store(documents, Path(user_cache_dir(os.environ)) / "control" / f"{name}.json")


def is_noted(documents: Documents) -> bool:
    """Whether it is time for what not every pass does: within the first NOTED_WITHIN_S of each NOTED_EVERY_S."""
    return documents.now_s() % NOTED_EVERY_S <= NOTED_WITHIN_S


def note_look(documents: Documents) -> None:
    """Note that a keeper looks, once in NOTED_EVERY_S, as a pass in which all is well writes nothing."""
    now_s = documents.now_s()
    if is_noted(documents):
        documents.change(LOOKED, lambda at_s: at_s if now_s - (at_s or 0.0) <= NOTED_WITHIN_S else now_s)


def neglected(store: Store) -> str:
    """Return a line if no keeper looks at what is wanted; "" if one does, or nothing has been wanted for long."""
    active = [run for run in store.read().runs.values() if run.end is None]
    now_s = store.now_s()
    looked_s = float(store.documents.read(LOOKED).value or 0.0) if active else 0.0
    silent_s = now_s - max(looked_s, min((run.added_s for run in active), default=now_s))
    if silent_s < NEGLECTED_S:
        return ""
    return (
        f"no keeper has looked for {spoken(silent_s, units=1)}, and what is kept waits: `fab keeper install` puts one "
        "on the gateway, `fab keeper run` looks now, `fab unkeep RUN` leaves the run's slice to others"
    )
