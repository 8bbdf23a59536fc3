"""Slices that nobody has used for `tpu-stack:idle-hours`: the keeper gives them back.

A slice is given back only if all of this holds: no run is kept on it or queued for it; every host answers; no process
of ours runs there, and no program of any user has a TPU open; and no run on it was active within the time. When a TPU
was last seen open is noted in the store, because nothing else tells it once the program has ended.
"""

from __future__ import annotations

import dataclasses
import datetime
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from contracts.device_nodes import DEVICE_GLOBS
from contracts.durations import HOUR_S, MINUTE_S, spoken
from contracts.inventory import Slice
from infra.cloud_tpu.retry import CloudTpuError
from infra.lease import LeaseHeldError, LeaseLostError
from keeper import slices, store
from keeper.queue import PENDING
from keeper.store import QUEUE, Stack
from launch import idle, runs
from launch.hosts import HostError
from launch.targets import Target

if TYPE_CHECKING:
    from keeper.passes import Means

EVERY_S = 15 * MINUTE_S
WITHIN_S = 2 * MINUTE_S
"""Passes in the first WITHIN_S of every EVERY_S look for idle slices, so that the last look need not be noted."""
USED = "used.json"
"""Slice → when a pass last saw a TPU of it open."""
LOOK_LIMIT_S = 30.0
AS_ROOT = 'if [ "$(id -u)" = 0 ]; then sh -c "$0"; else sh -c "$0" 2>/dev/null; sudo -n -- sh -c "$0"; fi'
"""Only root sees what other users have open. A container's root may see less than users see of their own programs."""
GONE, LOOKED = ("No such file or directory", "No such process"), "looked"


def give_back(means: Means) -> None:
    """Give back what is idle, if it is time to look.

    Raises:
        contracts.errors.RequestError, launch.hosts.HostError, infra.documents.DocumentsError: it cannot be seen whether
            something is.
    """
    if means.documents.now_s() % EVERY_S > WITHIN_S:
        return
    stack = store.find_stack(means.documents)
    hours = None if stack is None else stack.inventory.idle_hours
    if stack is None or hours is None:
        return
    stack.take_environment()
    for name in stack.slices:
        try:
            if _is_wanted(means, name) or (before := _seen(means, stack, name)) is None:
                continue
            if _unused_s(means, stack, before) <= hours * HOUR_S:
                continue
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
    """Return for how long nobody has used it; 0 while it is used, or if that cannot be seen."""
    others = [each for each in stack.inventory.slices if each.name != one.name]
    inventory = dataclasses.replace(stack.inventory, slices=(one, *others))
    target = means.hosts.on(dataclasses.replace(stack, inventory=inventory), one.name)
    known = runs.look_at_all(target.agents)
    if known.errors or any(each["state"] in ("starting", "running") for each in known.processes):
        return 0.0
    try:
        open_on = devices_open_on(target)
    except HostError as error:
        means.say(f"{one.name}: it is not given back: {error}")
        return 0.0
    if open_on:
        means.documents.change(USED, lambda value: {**(value or {}), one.name: means.documents.now_s()})
        return 0.0
    seen: Mapping[str, float] = means.documents.read(USED).value or {}
    ended_s = [float(each["ended"]) for each in known.processes if each.get("ended")]
    last_s = idle.used_s(one, runs.list_runs(target.runs))
    if last_s is None:
        return 0.0
    return max(0.0, means.documents.now_s() - max([last_s, *ended_s, seen.get(one.name, 0.0)]))


def devices_open_on(target: Target) -> list[str]:
    """Return the hosts on which a program of any user has a TPU open.

    Raises:
        HostError: it cannot be seen, as where this user may not become root.
    """
    patterns = target.stand_in_devices or DEVICE_GLOBS[target.platform]
    if not patterns:
        return []
    names = " -o ".join(f"-lname {shlex.quote(each)}" for each in patterns)
    words = ["sh", "-c", AS_ROOT, f"LC_ALL=C find /proc/[0-9]*/fd {names}; echo {LOOKED}"]
    begun = [transport.begin(words, "", timeout_s=LOOK_LIMIT_S) for transport in target.transports]
    found, unseen = [], []
    for host, future in zip(target.hosts, begun, strict=True):
        answer = future.result()
        problems = [line for line in answer.stderr.splitlines() if not line.endswith(GONE)]
        if any(line.startswith("/proc/") for line in answer.stdout.splitlines()):
            found.append(host.name)
        elif problems or not answer.stdout.endswith(f"{LOOKED}\n"):
            unseen.append((host.name, [*problems, "no answer"][0]))
    if unseen and not found:
        raise HostError(
            host=unseen[0][0],
            reason=f"whether a program has a TPU open cannot be seen ({unseen[0][1]})",
            remedy="give the keeper's user sudo on that host, or leave tpu-stack:idle-hours out",
        )
    return found
