"""A slice of TPU VMs is brought about, under its lease: by the same code for `pulumi up`, `fab recover` and the keeper.

`pulumi up` writes what the stack's slices are made of into its control documents. Whoever makes one of them again later
does it by that specification, with `infra.slice_apis.lifecycles`: by the same API, with the same name and properties,
remains first. Then it records the new hosts in the control documents, where every command finds them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from contracts.aliases import Say
from contracts.durations import spoken
from contracts.errors import RequestError, Unreachable
from contracts.inventory import RECORDED, SPECIFICATION, Slice, slices_from_json, slices_to_json
from infra.documents import Documents, lease
from infra.documents.lease import Lease
from infra.slice_apis import lifecycles
from infra.slice_apis.lifecycles import Clients
from infra.slice_apis.retry import Backoff, CloudTpuError
from infra.slice_apis.slice_api import state_kind
from infra.slice_apis.workers import are_complete, inventory_hosts
from launch import inventories
from launch.jobs import CHECKOUT
from launch.launching import StopAsked
from launch.targets import Require, Sleep

Properties = Mapping[str, Any]
"""Of a slice, as `infra.queued_resource.QueuedResourceArgs` or `infra.compute_slice.ComputeSliceArgs` has them."""

PULUMI_LIMIT_S = 13 * 3600.0
"""Longer than a slice waits for capacity by default (tpu-stack:slices[].wait, 12 h)."""
PULUMI_POLL_S = 1.0


class UnpublishedError(CloudTpuError):
    """A slice is active, and its hosts cannot be reached yet."""

    __module__ = "builtins"


@contextlib.contextmanager
def exclusive(control_url: str | None, slice_name: str) -> Iterator[Require]:
    """Hold a slice's lease, as `launch.targets.Backend.hold`. control_url: None: the stack has no place for one.

    Raises:
        RequestError: somebody else has it, or the documents do not answer.
    """
    if control_url is None:
        yield lambda: None
        return
    with _held(Documents(control_url), slice_name) as mine:
        yield mine.require


@contextlib.contextmanager
def _held(
    documents: Documents, slice_name: str, sleep: Sleep = time.sleep, **patience: Any
) -> Iterator[Lease]:
    try:
        ours = Lease(documents, slice_name, lease.myself("`fab`"), sleep=sleep)
        with lease.held(ours, **patience) as mine:
            yield mine
    except (lease.LeaseHeldError, lease.LeaseLostError) as error:
        raise RequestError(f"{error}; try again once that is done") from None


# --- by its specification -------------------------------------------------------------------------------------------


def ensure(
    clients: Clients,
    backoff: Backoff,
    properties: Properties,
    recorded: Slice,
    mine: Lease,
    *,
    wait_s: float,
    lost: Callable[[str], None],
) -> Slice | None:
    """Adopt a slice, make it again, or ask for it; return it as it is now, or None while it waits for capacity.

    recorded: as the inventory has it; of two in its zones, which an interrupted request may have left, that one stays.
    lost: called with the reason before what is left of a lost slice is deleted.

    Raises:
        infra.slice_apis.retry.CloudTpuError: it is not available, or not with these properties.
        infra.documents.lease.LeaseLostError: somebody else may be changing it, and what was asked for may be there.
    """
    home = {"zone": recorded.zone} if recorded.zone in (properties.get("zones") or ()) else {}
    try:
        lifecycle = lifecycles.lifecycle_for(properties, clients, _leased(backoff, mine))
        outputs = lifecycle.restore({**properties, **home, "wait_s": wait_s}, lost)
    except CloudTpuError:
        mine.require()
        raise
    mine.require()
    return entry(recorded, outputs)


def release(clients: Clients, backoff: Backoff, properties: Properties, mine: Lease | None) -> None:
    """Delete a slice, or what was asked for. mine: None: there can be no lease. Raises as `ensure`."""
    leased = _leased(backoff, mine) if mine else backoff
    lifecycles.lifecycle_for(properties, clients, leased).delete(properties)


def observed(clients: Clients, backoff: Backoff, properties: Properties, recorded: Slice) -> Slice | None:
    """Return a slice as Google has it; None where it is not there, or not ours. Raises CloudTpuError."""
    outputs = lifecycles.lifecycle_for(properties, clients, backoff).read(properties)
    return None if outputs is None else entry(recorded, outputs)


def entry(recorded: Slice, outputs: Mapping[str, Any]) -> Slice | None:
    """Return what the inventory has of a slice, by the outputs of its lifecycle; None where it has no nodes.

    Raises:
        UnpublishedError: its hosts cannot be reached yet.
    """
    nodes = outputs["nodes"]
    if state_kind(outputs["state"]) != "active" or not nodes:
        return None
    if not all(are_complete(node["workers"]) for node in nodes):
        raise UnpublishedError(f"{recorded.name}: its hosts have not published their names and host keys yet")
    return dataclasses.replace(
        recorded,
        hosts=inventory_hosts(nodes),
        created=str(outputs.get("create_time") or ""),
        active_at=str(outputs.get("active_at") or ""),
        ends_at=str(outputs.get("ends_at") or ""),
        zone=str(outputs.get("zone") or recorded.zone),
    )


def _leased(backoff: Backoff, mine: Lease) -> Backoff:
    """Return what asks for the lease too before each request."""
    return dataclasses.replace(backoff, is_awaited=lambda: backoff.is_awaited() and mine.require())


def record(documents: Documents, fresh: Slice) -> None:
    """Write what a slice is now, for every command of the stack."""

    def change(value: Any) -> Any:
        recorded = {
            one_slice.name: one_slice for one_slice in slices_from_json(json.dumps(value or {"slices": []}))
        }
        return json.loads(slices_to_json([*({**recorded, fresh.name: fresh}).values()]))

    documents.change(RECORDED, change)


# --- by a person, for one run ---------------------------------------------------------------------------------------


def restore(
    control_url: str | None, pulumi_stack: str | None, recorded: Slice, say: Say, sleep: Sleep
) -> None:
    """Make a slice again that has lost hosts, and no other one of its stack. It waits as long as `pulumi up` would.

    By its specification, under its lease; a slice that has none (a direct one, or of a stack without a bucket) by
    Pulumi, which is told to look at that slice only. pulumi_stack: None: Pulumi did not make it. sleep: as
    `launch.targets.Backend.ensure` has it.

    Raises:
        RequestError: it cannot be made again, or waits for capacity.
    """
    documents, properties = None, None
    if control_url is not None:
        documents = Documents(control_url)
        properties = _specified(documents, recorded.name)
    if documents is not None and properties is not None:
        _restore_specified(documents, recorded, say, sleep)
    elif pulumi_stack is not None:
        _restore_by_pulumi(pulumi_stack, recorded.name, say, sleep)
    else:
        raise RequestError(
            f"the slice {recorded.name} has lost hosts, and Pulumi did not make it; bring them back, then "
            "`fab recover` again"
        )


def _specified(documents: Documents, slice_name: str) -> Properties | None:
    specification = documents.read(SPECIFICATION).value or {}
    properties: Properties | None = specification.get("slices", {}).get(slice_name)
    return properties


def _restore_specified(documents: Documents, recorded: Slice, say: Say, sleep: Sleep) -> None:
    backoff = Backoff(say=say, sleep=sleep)
    with _held(documents, recorded.name, sleep, patience_s=lease.PATIENCE_S, waiting=say) as mine:
        properties = _specified(documents, recorded.name)
        if mine.removed or properties is None:
            raise RequestError(f"the slice {recorded.name} was removed by Pulumi; `pulumi up` makes it again")
        wait_s = float(properties.get("wait_s") or 0.0)

        def lost(reason: str) -> None:
            say(f"the slice {recorded.name} is lost ({reason}); it alone is made again")

        try:
            with contextlib.closing(Clients(lifecycles.read_environment_settings, backoff)) as google:
                restored = ensure(google, backoff, properties, recorded, mine, wait_s=wait_s, lost=lost)
        except CloudTpuError as error:
            kind = Unreachable if error.status == "UNAVAILABLE" else RequestError
            raise kind(f"the slice {recorded.name} is not made again: {error}") from None
        except (KeyboardInterrupt, StopAsked):
            say(f"what was asked for {recorded.name} stays in the queue: `fab recover` goes on with it")
            raise
        if restored is None:
            raise Unreachable(
                f"the slice {recorded.name} waits for capacity; its request stays in the queue, and `fab recover` "
                "goes on with it"
            )
        record(documents, restored)
    say(f"the slice {recorded.name} is ACTIVE in {restored.zone}; its hosts are recorded in {documents.url}")


def _restore_by_pulumi(stack: str, slice_name: str, say: Say, sleep: Sleep) -> None:
    exported = inventories.ask(["stack", "export"], stack, otherwise="then `fab recover` again")
    urns = slice_urns(exported, slice_name)
    if not urns:
        raise RequestError(
            f"the slice {slice_name} has lost hosts, and Pulumi's state of {stack} does not have it; `pulumi up "
            f"--refresh --stack {stack}` makes it again, with whatever else has changed"
        )
    targets = [word for urn in urns for word in ("--target", urn)]
    command = ["pulumi", "up", "--refresh", "--yes", "--skip-preview", "--stack", stack, *targets]
    say(f"the slice {slice_name} is not whole: {shlex.join(command)}")
    _run_pulumi(command, say, sleep)


def slice_urns(exported: str, slice_name: str) -> tuple[str, ...]:
    """Return the URNs of a slice's TPUs in the state that `pulumi stack export` has printed. Pure.

    Raises:
        RequestError: it is no state of a stack.
    """
    try:
        resources = json.loads(exported)["deployment"].get("resources") or []
        urns = [str(resource["urn"]) for resource in resources]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise RequestError("`pulumi stack export` printed no state of a stack") from None
    kinds = (":QueuedResource", ":ComputeSlice", "tpu/v2Vm:V2Vm", ":NodeWorkers")
    ends = tuple(f"{kind}::{slice_name}" for kind in kinds)
    return tuple(urn for urn in urns if urn.endswith(ends))


def _run_pulumi(command: Sequence[str], say: Say, sleep: Sleep) -> None:
    """Run Pulumi, whose output goes to the terminal as it comes.

    Ctrl-C reaches Pulumi too, which ends what it has begun and writes it to its state; that is waited for. A second
    one ends both. Where `sleep` raises, Pulumi is sent the same signal.
    """
    try:
        process = subprocess.Popen(command, cwd=CHECKOUT, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise RequestError("`pulumi` is not on PATH; install it, then `fab recover` again") from None
    with process:
        deadline = time.monotonic() + PULUMI_LIMIT_S
        try:
            while not _has_ended(process):
                if time.monotonic() > deadline:
                    process.kill()
                    raise RequestError(
                        f"`pulumi up` did not end within {spoken(PULUMI_LIMIT_S)}; `pulumi cancel`, then see what it "
                        "waits for"
                    )
                sleep(0.0)
        except StopAsked:
            say("the run is to be stopped; waiting until Pulumi has ended what it has begun")
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        except KeyboardInterrupt:
            process.wait()
            raise
    if process.returncode != 0:
        raise RequestError(
            f"`{shlex.join(command)}` failed (exit code {process.returncode}); its last lines say why"
        )


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PULUMI_POLL_S)
    return process.returncode is not None
