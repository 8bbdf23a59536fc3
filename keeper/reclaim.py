"""Gives idle slices back, for the keeper.

A slice is given back only if all of this holds: no run is kept on it or queued for it; every host answers; no process
of ours runs there, and no program of any user has a TPU open; and no run on it was active within
`tpu-stack:idle-hours`. When a TPU was last seen open is noted in the store, because nothing else shows it once the
program has ended.
"""

from __future__ import annotations

import dataclasses
import datetime
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from backends.vm import ensure
from console import idle, notify
from contracts.aliases import Say
from contracts.durations import HOUR_S, spoken
from contracts.host_interface import DEVICE_GLOBS
from contracts.inventory import Slice
from infra.documents import Documents
from infra.documents.lease import LeaseHeldError, LeaseLostError
from infra.slice_apis.retry import CloudTpuError
from keeper.stack_store import NOTED_EVERY_S, Stack, is_noted, stack_at
from keeper.world import World, on
from launch import runs
from launch.control.store import Store
from launch.hosts import HostError
from launch.targets import Target

USED = "used.json"
"""Slice → when a pass last saw a TPU of it open."""
LOOK_LIMIT_S = 30.0
AS_ROOT = 'if [ "$(id -u)" = 0 ]; then sh -c "$0"; else sh -c "$0" 2>/dev/null; sudo -n -- sh -c "$0"; fi'
"""Only root sees what other users have open. A container's root may see less than users see of their own programs."""
VANISHED, LOOKED = ("No such file or directory", "No such process"), "looked"


def give_back(store: Store, world: World, say: Say) -> None:
    """Give back what is idle, if it is time to look.

    Raises:
        contracts.errors.RequestError, launch.hosts.HostError, infra.documents.DocumentsError: it cannot be seen whether
            something is.
    """
    documents = store.documents
    if not is_noted(documents):
        return
    stack = stack_at(store.read(), documents.url)
    hours = None if stack is None else stack.inventory.idle_hours
    if stack is None or hours is None:
        return
    stack.take_environment()
    for name in stack.slices:
        try:
            if (before := _unused(store, world, stack, name, hours * HOUR_S, say)) is None:
                continue
            with world.hold(name) as mine:
                # As it is now that nobody else may change it.
                now = _unused(store, world, stack, name, hours * HOUR_S, say)
                if now is None or now[0].created != before[0].created:
                    continue
                line = f"{name}: no run has used it for {spoken(now[1])}"
                if not _is_told(documents, stack, name, now[1], line, say):
                    continue
                say(f"{line}; it is given back")
                ensure.release(world.clients, world.backoff, stack.slices[name], mine)
                moment = datetime.datetime.fromtimestamp(store.now_s(), datetime.UTC)
                ensure.record(documents, dataclasses.replace(now[0], hosts=(), created=moment.isoformat()))
        except (LeaseHeldError, LeaseLostError, CloudTpuError) as error:
            say(f"{name}: {error}")


def _unused(
    store: Store, world: World, stack: Stack, name: str, limit_s: float, say: Say
) -> tuple[Slice, float] | None:
    """Return a slice that nobody has used for longer than the limit, and for how long; None: somebody may want it."""
    running = [run for run in store.read().runs.values() if run.end is None and run.desired == "running"]
    if any(name in run.slices if run.slice is None else run.slice == name for run in running):
        return None
    recorded = next(entry for entry in stack.inventory.slices if entry.name == name)
    idle_slice = ensure.observed(world.clients, world.backoff, stack.slices[name], recorded)
    unused_s = 0.0 if idle_slice is None else _unused_s(store, stack, idle_slice, say)
    return (idle_slice, unused_s) if idle_slice is not None and unused_s > limit_s else None


def _is_told(documents: Documents, stack: Stack, name: str, unused_s: float, line: str, say: Say) -> bool:
    """Return whether an earlier look has told people that a slice is idle; if none has, tell them now."""
    key, now_s = f"{name}/told", documents.now_s()
    if (documents.read(USED).value or {}).get(key, 0.0) > now_s - unused_s:
        return True
    text = f"{line}; it is given back in {spoken(NOTED_EVERY_S)} unless a run begins on it"
    say(text)
    for problem in notify.send(notify.Event(kind="idle", text=text, stack=stack.inventory.stack)).values():
        say(f"{name}: not notified by {problem}")
    documents.change(USED, lambda value: {**(value or {}), key: now_s})
    return False


def unused_s(
    now_s: float,
    *,
    used_s: float | None,
    processes: Iterable[Mapping[str, Any]] = (),
    open_s: float = 0.0,
    silent_since_s: float = 0.0,
) -> float:
    """Return for how long nobody has used a slice; 0 while it is used, or if that is not known. Pure.

    used_s: when a run last used it, or when it was made; None: not known. processes: as the agents of its hosts tell.
    open_s: when a TPU was last seen open. silent_since_s: since when a host does not answer, 0.0: all do.

    A process with a heartbeat is ended by its supervisor once it hangs. One without is not judged there, and may wait
    for ever for what it needs to join the others, so it is a use only at its start.
    """
    since_s = [open_s, silent_since_s]
    for process in processes:
        if process["state"] in ("starting", "running"):
            if process.get("beat"):
                return 0.0
            since_s.append(float(process.get("started") or now_s))
        else:
            since_s.append(float(process.get("ended") or 0.0))
    return 0.0 if used_s is None else max(0.0, now_s - max([used_s, *since_s]))


def _unused_s(store: Store, stack: Stack, idle_slice: Slice, say: Say) -> float:
    """Return for how long nobody has used it; 0 while it is used, or if that cannot be seen.

    A host that does not answer, at any look, for as long as no run has used the slice, is of no use to anybody.
    """
    documents, now_s = store.documents, store.now_s()
    other_slices = [entry for entry in stack.inventory.slices if entry.name != idle_slice.name]
    target = on(
        dataclasses.replace(
            stack, inventory=dataclasses.replace(stack.inventory, slices=(idle_slice, *other_slices))
        ),
        idle_slice.name,
    )
    look = target.backend.status()
    use_times: Mapping[str, float] = documents.read(USED).value or {}
    silent, silent_since_s, open_s = f"{idle_slice.name}/silent", 0.0, use_times.get(idle_slice.name, 0.0)
    if look.errors:
        silent_since_s = use_times.get(silent, now_s)
        if silent not in use_times:
            documents.change(USED, lambda value: {**(value or {}), silent: now_s})
    else:
        if silent in use_times:
            documents.change(
                USED, lambda value: {key: at for key, at in (value or {}).items() if key != silent}
            )
        try:
            open_on = devices_open_on(target)
        except HostError as error:
            say(f"{idle_slice.name}: it is not given back: {error}")
            return 0.0
        if open_on:
            documents.change(USED, lambda value: {**(value or {}), idle_slice.name: now_s})
            open_s = now_s
    return unused_s(
        now_s,
        used_s=idle.used_s(idle_slice, runs.list_runs(target.runs)),
        processes=look.processes,
        open_s=open_s,
        silent_since_s=silent_since_s,
    )


def devices_open_on(target: Target) -> list[str]:
    """Return the hosts on which a program of any user has a TPU open.

    Raises:
        HostError: it cannot be seen, as where this user may not become root.
    """
    patterns = target.stand_in_devices or DEVICE_GLOBS[target.platform]
    if not patterns:
        return []
    names = " -o ".join(f"-lname {shlex.quote(pattern)}" for pattern in patterns)
    command = ["sh", "-c", AS_ROOT, f"LC_ALL=C find /proc/[0-9]*/fd {names}; echo {LOOKED}"]
    futures = [transport.begin(command, "", timeout_s=LOOK_LIMIT_S) for transport in target.transports]
    open_hosts, unseen = [], []
    for host, future in zip(target.hosts, futures, strict=True):
        answer = future.result()
        problems = [line for line in answer.stderr.splitlines() if not line.endswith(VANISHED)]
        if any(line.startswith("/proc/") for line in answer.stdout.splitlines()):
            open_hosts.append(host.name)
        elif problems or not answer.stdout.endswith(f"{LOOKED}\n"):
            unseen.append((host.name, [*problems, "no answer"][0]))
    if unseen and not open_hosts:
        raise HostError(
            host=unseen[0][0],
            reason=f"whether a program has a TPU open cannot be seen ({unseen[0][1]})",
            remedy="give the keeper's user sudo on that host, or leave tpu-stack:idle-hours out",
        )
    return open_hosts
