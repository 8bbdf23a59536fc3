"""The slices of wanted runs at Google: how they stand, by one listing, and how one is had again.

To have one again is `infra.cloud_tpu.lifecycle`, as for `pulumi up`: the same name, the same properties, remains first.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from contracts.inventory import Slice as InventorySlice
from contracts.inventory import slices_from_json, slices_to_json
from infra.cloud_tpu import request, zones
from infra.cloud_tpu.client import Client, Listing
from infra.cloud_tpu.lifecycle import Lifecycle
from infra.cloud_tpu.retry import Backoff, CloudTpuError
from infra.cloud_tpu.workers import are_complete, hosts_of
from infra.documents import Documents
from infra.lease import Lease
from keeper import rules
from keeper.store import INVENTORY, Stack, Wanted
from launch.inventories import with_kept


class UnpublishedError(CloudTpuError):
    """A slice is active, and its hosts cannot be reached yet."""

    __module__ = "builtins"


Say = Callable[[str], None]
Json = dict[str, Any]

WAIT_S = 120.0
"""For a slice that was asked for just now; if it is served in that time, nobody waits for the next look."""


def listed(client: Client, projects: Iterable[str], say: Say) -> dict[str, Listing]:
    """Return the queued resources of each project in all zones; a project that gives no answer is left out."""
    found = {}
    for project in sorted(set(projects)):
        try:
            found[project] = client.queued_resources(project)
        except CloudTpuError as error:
            say(str(error))
    return found


def standing(
    wanted: Wanted,
    found: Mapping[str, Listing],
    stack_of: Callable[[], Stack | None],
    now: Callable[[], datetime.datetime],
) -> rules.Slice:
    """Return how the slice of a wanted run stands. now: by Google's clock.

    The stack is read only where there is not just one request of the slice's id, which is active: mostly there is.
    """
    origin, _, own_id = wanted.origin.partition(" ")
    if wanted.project is None or origin != "queued-resource":
        return "none"
    if wanted.project not in found:
        return "unread"
    seen = found[wanted.project]
    same = [each for each in seen.found if each["name"].rpartition("/")[2] == own_id]
    if seen.unreachable and request.ACTIVE not in [request.state_of(each) for each in same]:
        return "unread"  # it may be in a zone that could not be asked
    if not same or [request.state_of(each) for each in same] == [request.ACTIVE]:
        return "active" if same else "absent"
    if stack := stack_of():
        same = [each for each in same if request.is_owned(request.node_of(each), stack.owner)]
    looks = [request.look(each, {}) for each in same]
    kinds = [look.kind for look in looks]
    order: tuple[rules.Slice, ...] = ("active", "waiting", "lost")
    kind: rules.Slice = next((each for each in order if each in kinds), "absent")
    spec = request.Spec.of(stack.slices.get(wanted.slice, {}) if stack else {})
    if kind == "active" and len(spec.zones) > 1:
        return "doubled" if sum(look.state != "DELETING" for look in looks) > 1 else kind
    if kind == "waiting" and len(spec.zones) > 1 and spec.strategy != "race":
        return "overdue" if any(zones.is_over(spec, look, now()) for look in looks) else kind
    return kind


def have(
    client: Client, backoff: Backoff, stack: Stack, name: str, lease: Lease, *, wait_s: float
) -> InventorySlice | None:
    """Ask for a slice, or adopt it, and return what the inventory has of it now; None while it waits for capacity.

    Raises:
        CloudTpuError: it is not to be had, or not with these properties.
        infra.lease.LeaseLostError: somebody else may be changing it, and what was asked for may be there.
    """
    props = stack.slices[name]
    here = next(each.zone for each in stack.inventory.slices if each.name == name)
    # Of two in its zones, which an interrupted request may have left, the one that hosts are known of stays.
    home = {"zone": here} if here in (props.get("zones") or ()) else {}
    try:
        outputs = Lifecycle(client, _leased(backoff, lease)).create({**props, **home, "wait_s": wait_s})
    except CloudTpuError:
        lease.require()
        raise
    lease.require()
    return entry(stack, name, outputs)


def entry(stack: Stack, name: str, outputs: Mapping[str, Any]) -> InventorySlice | None:
    """Return what the inventory has of a slice, by the outputs of its lifecycle; None where it has no nodes.

    Raises:
        UnpublishedError: its hosts cannot be reached yet.
    """
    nodes = outputs["nodes"]
    if request.kind_of(outputs["state"]) != "active" or not nodes:
        return None
    if not all(are_complete(node["workers"]) for node in nodes):
        raise UnpublishedError(f"{name}: its hosts have not published their names and host keys yet")
    known = next(each for each in stack.inventory.slices if each.name == name)
    return dataclasses.replace(
        known,
        hosts=hosts_of(nodes),
        created=str(outputs.get("create_time") or ""),
        zone=str(outputs.get("zone") or known.zone),
    )


def seen(client: Client, backoff: Backoff, stack: Stack, name: str) -> InventorySlice | None:
    """Return a slice as Google has it; None where it is not there, or not ours. Raises CloudTpuError, as `entry`."""
    outputs = Lifecycle(client, backoff).read(stack.slices[name])
    return None if outputs is None else entry(stack, name, outputs)


def withdraw(client: Client, backoff: Backoff, stack: Stack, name: str, lease: Lease | None) -> None:
    """Give back a slice that was asked for and that nobody wants any more. lease: None: there can be none.

    Raises as `have`.
    """
    Lifecycle(client, _leased(backoff, lease) if lease else backoff).delete(stack.slices[name])


def _leased(backoff: Backoff, lease: Lease) -> Backoff:
    """Return what asks for the lease too before each request."""
    return dataclasses.replace(backoff, is_awaited=lambda: backoff.is_awaited() and lease.require())


def record(documents: Documents, fresh: InventorySlice) -> None:
    """Write what a slice is now, for every command of the stack."""

    def change(value: Any) -> Any:
        kept = {each.name: each for each in slices_from_json(json.dumps(value or {"slices": []}))}
        return json.loads(slices_to_json([*({**kept, fresh.name: fresh}).values()]))

    documents.change(INVENTORY, change)


def with_newest(stack: Stack, documents: Documents) -> Stack:
    """Return the stack with the slices that a keeper has recorded."""
    found = documents.read(INVENTORY).value
    kept = with_kept(stack.inventory, None if found is None else json.dumps(found).encode())
    return dataclasses.replace(stack, inventory=kept)
