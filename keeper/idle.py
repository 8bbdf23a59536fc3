"""Slices that no run has used for `tpu-stack:idle-hours`: the keeper gives them back.

Nothing is removed on one word alone: no run may want the slice or be queued for it, every host of it has to answer and
to say that nothing runs there, and none of its runs may have been heard of, by the hosts' clocks and the store's.
"""

from __future__ import annotations

import dataclasses
import datetime
from typing import TYPE_CHECKING

from contracts.durations import HOUR_S, MINUTE_S, spoken
from contracts.inventory import Slice
from infra.cloud_tpu.retry import CloudTpuError
from infra.lease import LeaseHeldError, LeaseLostError
from keeper import slices, store
from keeper.queue import PENDING
from keeper.store import QUEUE, Stack
from launch import idle, runs

if TYPE_CHECKING:
    from keeper.passes import Means

EVERY_S = 15 * MINUTE_S
WITHIN_S = 2 * MINUTE_S
"""Of every EVERY_S, the time in which a pass looks for idle slices: so nothing has to be remembered between two."""


def give_back(means: Means) -> None:
    """Give back what is idle, if it is time to look.

    Raises:
        contracts.errors.RequestError, launch.hosts.HostError, infra.documents.DocumentsError, CloudTpuError: it cannot
            be seen whether something is.
    """
    if means.documents.now_s() % EVERY_S > WITHIN_S:
        return
    stack = store.find_stack(means.documents)
    hours = None if stack is None else stack.inventory.idle_hours
    if stack is None or hours is None:
        return
    stack.take_environment()
    for name in stack.slices:
        if _is_wanted(means, name) or (before := _seen(means, stack, name)) is None:
            continue
        if _unused_s(means, stack, before) <= hours * HOUR_S:
            continue
        try:
            with means.hold(means.lease_of(name)) as mine:
                # As it is now that nobody else may change it.
                one = _seen(means, stack, name)
                if one is None or one.created != before.created or _is_wanted(means, name):
                    continue
                unused_s = _unused_s(means, stack, one)
                if unused_s <= hours * HOUR_S:
                    continue
                means.say(f"{name}: no run has used it for {spoken(unused_s)}; it is given back")
                slices.withdraw(means.client(), means.backoff, stack, name, mine)
                moment = datetime.datetime.fromtimestamp(means.documents.now_s(), datetime.UTC)
                slices.record(means.documents, dataclasses.replace(one, hosts=(), created=moment.isoformat()))
        except (LeaseHeldError, LeaseLostError, CloudTpuError) as error:
            means.say(f"{name}: {error}")


def _is_wanted(means: Means, name: str) -> bool:
    """Whether a run is kept on the slice, or waits for one in the queue."""
    kept = store.read_wanted(means.documents).values()
    queued = means.documents.read(QUEUE).value or {}
    waiting = any(each.get("state") in PENDING for each in queued.get("entries", ()))
    return waiting or any(each.slice == name and each.state != "ended" for each in kept)


def _seen(means: Means, stack: Stack, name: str) -> Slice | None:
    return slices.seen(means.client(), means.backoff, stack, name)


def _unused_s(means: Means, stack: Stack, one: Slice) -> float:
    """For how long no run has used it; 0 while something runs there, or a host does not answer."""
    others = [each for each in stack.inventory.slices if each.name != one.name]
    inventory = dataclasses.replace(stack.inventory, slices=(one, *others))
    target = means.hosts.on(dataclasses.replace(stack, inventory=inventory), one.name)
    known = runs.look_at_all(target.agents)
    if known.errors or any(each["state"] in ("starting", "running") for each in known.processes):
        return 0.0
    ended_s = [float(each["ended"]) for each in known.processes if each.get("ended")]
    last_s = idle.used_s(one, runs.list_runs(target.runs))
    return 0.0 if last_s is None else max(0.0, means.documents.now_s() - max([last_s, *ended_s]))
