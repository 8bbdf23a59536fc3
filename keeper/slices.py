"""The slices of wanted runs at Google: how they stand, by one listing, and how one is had again.

To have one again is `infra.cloud_tpu.lifecycle`, as for `pulumi up`: the same name, the same properties, remains first.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from backends.vm import ensure
from backends.vm.ensure import UnpublishedError as UnpublishedError
from backends.vm.ensure import record as record
from contracts.inventory import Slice as InventorySlice
from infra.cloud_tpu import request, zones
from infra.cloud_tpu.client import Client, Listing
from infra.cloud_tpu.retry import Backoff, CloudTpuError
from infra.documents import Documents
from infra.lease import Lease
from keeper import rules
from keeper.store import INVENTORY, Stack, Wanted
from launch.inventories import with_kept

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
    client: Client,
    backoff: Backoff,
    stack: Stack,
    name: str,
    lease: Lease,
    *,
    wait_s: float,
    lost: Callable[[str], None],
) -> InventorySlice | None:
    """Bring a slice of a stack about, as `backends.vm.ensure.ensure`."""
    known = _known(stack, name)
    return ensure.ensure(client, backoff, stack.slices[name], known, lease, wait_s=wait_s, lost=lost)


def seen(client: Client, backoff: Backoff, stack: Stack, name: str) -> InventorySlice | None:
    """Return a slice of a stack, as `backends.vm.ensure.observed`."""
    return ensure.observed(client, backoff, stack.slices[name], _known(stack, name))


def withdraw(client: Client, backoff: Backoff, stack: Stack, name: str, lease: Lease | None) -> None:
    """Give back a slice that nobody wants any more, as `backends.vm.ensure.release`."""
    ensure.release(client, backoff, stack.slices[name], lease)


def _known(stack: Stack, name: str) -> InventorySlice:
    return next(each for each in stack.inventory.slices if each.name == name)


def with_newest(stack: Stack, documents: Documents) -> Stack:
    """Return the stack with the slices that were made again since `pulumi up`."""
    found = documents.read(INVENTORY).value
    kept = with_kept(stack.inventory, None if found is None else json.dumps(found).encode())
    return dataclasses.replace(stack, inventory=kept)
