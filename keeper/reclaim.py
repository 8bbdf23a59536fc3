"""Slices that nobody uses, which the keeper gives back, and such that nobody knows of, which `fab zombies` removes.

`fab zombies` lists all TPUs that a project holds, in every zone, and whose they are. The stack's resources carry its
owner label. Those that Pulumi's state or the inventory has are in use. The others are zombies: an interrupted program
has left them, they count against the quota, may be billed, and can be removed here. Resources of others are shown and
never changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from rich.table import Table

from backends.vm import ensure
from console import idle, notify
from contracts.device_nodes import DEVICE_GLOBS
from contracts.durations import HOUR_S, spoken
from contracts.errors import DONE, FAILED, RequestError
from contracts.inventory import Inventory, Slice
from infra import catalogue
from infra.cloud_tpu import request, settings
from infra.cloud_tpu.client import Client
from infra.cloud_tpu.lifecycle import Lifecycle
from infra.cloud_tpu.retry import Backoff, CloudTpuError
from infra.documents import Documents
from infra.lease import LeaseHeldError, LeaseLostError
from keeper.stack import NOTED_EVERY_S, Stack, is_noted, stack_of
from keeper.world import World, on
from launch import costs, inventories, runs
from launch.hosts import HostError
from launch.output import say, terminal
from launch.store import Store
from launch.targets import LOCAL, Target, Wanted

Json = dict[str, Any]
Whose = Literal["zombie", "another stack's", "in use", "not tpu-stack's"]

STACK_LABEL = "tpu-stack"
"""As `infra.naming` has it."""
QUEUED_RESOURCE = "pulumi-python:dynamic/tpu_stack:QueuedResource"
IDENTITY = "pulumi-python:dynamic/tpu_stack:StackIdentity"
DIRECT = "gcp:tpu/v2Vm:V2Vm"
STACK = "pulumi:pulumi:Stack"
PROJECT = "gcp:project"
"""The key of Pulumi's configuration."""
EMPTY_STATES = frozenset(
    {"ACCEPTED", "WAITING_FOR_RESOURCES", "FAILED", "SUSPENDED", "PREEMPTED", "TERMINATED"}
)
"""States in which a resource holds no machine and nothing is billed."""
QUOTAS = "https://cloudquotas.googleapis.com/v1/projects/{}/locations/global/services/tpu.googleapis.com/quotaInfos"
QUOTA_OF = {
    "v2": "TPUV2", "v3": "TPUV3", "v4": "TPUV4", "v5e": "TPUV5sLitepod", "v5p": "TPUV5P", "v6e": "TPUV6E",
}  # fmt: skip
"""Generation → how the ids of its quotas begin, as in TPUV6EPreemptiblePerProjectPerZone… of Google's refusals."""
SPOT, SERVING = "Preemptible", "Serving"
ANSWER_LIMIT_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Known:
    """What Pulumi's state has of a stack, whether or not it was ever made as a whole.

    owner, project: empty where there is no id of the stack. names: ZONE/ID of its queued resources and nodes, and of
    the slices of its inventory. pending: resources of an update that is under way or was interrupted.
    """

    owner: str
    names: frozenset[str]
    pending: tuple[str, ...] = ()
    project: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holding:
    """A queued resource with its nodes (count), or a node without one. label: the stack that its labels name.

    asked_by: the id of the queued resource that it is or was of.
    """

    kind: Literal["queued resource", "node"]
    zone: str
    own_id: str
    accelerator_type: str
    count: int
    capacity: str
    state: str
    whose: Whose
    label: str
    asked_by: str

    @property
    def pool(self) -> tuple[str, str, bool]:
        """What a quota is for: zone, generation, and whether the chips are spot."""
        known = catalogue.ACCELERATORS.get(self.accelerator_type)
        return self.zone, known.generation.name if known else "", self.capacity == "spot"

    @property
    def chips(self) -> int:
        """How many chips it has now."""
        known = catalogue.ACCELERATORS.get(self.accelerator_type)
        return known.chips * self.count if known and self.state not in EMPTY_STATES else 0

    def delete(self, lifecycle: Lifecycle, project: str, owner: str) -> None:
        """Have it removed, if it is the owner's. Raises CloudTpuError."""
        if self.kind == "node":
            lifecycle.delete_node(f"projects/{project}/locations/{self.zone}/nodes/{self.own_id}", owner)
            return
        place = {"project": project, "zone": self.zone, "owner": owner}
        lifecycle.delete({**place, "queued_resource_id": self.own_id, "node_count": self.count})

    @property
    def usd_per_hour(self) -> float | None:
        price = costs.listed_price(dataclasses.asdict(self)) if self.chips else None
        return price["usd_per_hour"] if price else None


def known_of(stack: str, text: str) -> Known:
    """Return what the output of `pulumi stack export` says. Pure.

    Raises:
        RequestError: it is none, or its inventory cannot be read.
    """
    try:
        state = json.loads(text)["deployment"]
        of = [(each["type"], each.get("outputs") or {}) for each in state.get("resources") or ()]
        pending = [str(each["resource"]["urn"]) for each in state.get("pending_operations") or ()]
        names = {
            f"{zone}/{it['queued_resource_id']}"
            for kind, it in of
            if kind == QUEUED_RESOURCE
            for zone in [it["zone"], *(it.get("zones") or ())]
        }
        names |= {f"{it['zone']}/{it['name']}" for kind, it in of if kind == DIRECT}
        owner, project = next(
            ((str(it["owner"]), str(it.get("project", ""))) for kind, it in of if kind == IDENTITY), ("", "")
        )
        inventory = next((it.get("inventory") for kind, it in of if kind == STACK), None)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise RequestError(f"--stack {stack}: `pulumi stack export` printed no state of a stack") from None
    if inventory is not None:
        names |= names_of(inventories.parse(str(inventory), f"the stack {stack}"))
    return Known(owner=owner, names=frozenset(names), pending=tuple(pending), project=project)


def names_of(inventory: Inventory) -> set[str]:
    """Return ZONE/ID of its slices, in all zones that they may be in."""
    return {
        f"{zone}/{each.origin.rpartition(' ')[2]}"
        for each in inventory.slices
        for zone in (each.zone, *each.zones)
    }


def holdings(queued: Iterable[Json], nodes: Iterable[Json], known: Known) -> list[Holding]:
    """Return all that a project holds, zombies first. Pure."""
    found, made, queued = [], set(), [*queued]
    serving = {
        str(each["name"]).rpartition("/")[2]
        for each in queued
        if request.state_of(each) == request.ACTIVE
        and "/".join(str(each["name"]).split("/")[3::2]) in known.names
    }
    for each in queued:
        capacity = "spot" if "spot" in each else "reserved" if each.get("reservationName") else "on-demand"
        state, count = request.state_of(each), len(request.node_ids(each)) or 1
        found.append(_holding("queued resource", each, request.node_of(each), state, capacity, count, known))
        one = found[-1]
        if one.whose == "in use" and state != request.ACTIVE and one.own_id in serving:
            # One that another of the slice's zones serves, be it ours: what a race has left.
            is_left = request.is_owned(request.node_of(each), known.owner)
            found[-1] = dataclasses.replace(one, whose="zombie" if is_left else one.whose)
        made.add(f"{found[-1].zone}/{found[-1].own_id}")
    for node in nodes:
        asked = node.get("schedulingConfig") or {}
        is_spot = asked.get("spot") or asked.get("preemptible")
        capacity = "spot" if is_spot else "reserved" if asked.get("reserved") else "on-demand"
        one = _holding("node", node, node, str(node.get("state", "")), capacity, 1, known)
        if f"{one.zone}/{one.asked_by}" not in made:
            found.append(one)
    return sorted(found, key=lambda each: (each.whose != "zombie", each.whose, each.zone, each.own_id))


def _holding(
    kind: Any, resource: Json, node: Json, state: str, capacity: str, count: int, known: Known
) -> Holding:
    _, _, _, zone, _, own_id = [*str(resource.get("name", "")).split("/"), *[""] * 6][:6]
    labels, config = node.get("labels") or {}, node.get("acceleratorConfig") or {}
    whose: Whose = "another stack's" if STACK_LABEL in labels else "not tpu-stack's"
    if f"{zone}/{own_id}" in known.names:  # a direct node has no owner label
        whose = "in use"
    elif request.is_owned(node, known.owner):
        whose = "zombie"
    return Holding(
        kind=kind,
        zone=zone,
        own_id=own_id,
        accelerator_type=str(
            node.get("acceleratorType") or f"{config.get('type', '?')} {config.get('topology', '')}"
        ),
        count=count,
        capacity=capacity,
        state=state,
        whose=whose,
        label=str(labels.get(STACK_LABEL, "")),
        asked_by=str(resource.get("queuedResource", "")).rpartition("/")[2] or own_id,
    )


def limits(quotas: Sequence[Json], found: Sequence[Holding]) -> Iterator[str]:
    """Return a line for each quota that is told of the zones and generations that are held. Pure.

    A quota counts chips for some generations and cores for others, so what is left is for the reader to work out.
    """
    for pool in sorted({each.pool for each in found}):
        zone, generation, is_spot = pool
        chips = sum(each.chips for each in found if each.pool == pool)
        for quota in quotas:
            own_id = str(quota.get("quotaId", ""))
            is_of = own_id.startswith(QUOTA_OF.get(generation, "-")) and SERVING not in own_id
            if is_of and (SPOT in own_id) == is_spot and (value := _value(quota, zone)) is not None:
                yield f"quota {own_id} in {zone}: {value}; {chips} chips are held"


def _value(quota: Json, zone: str) -> str | None:
    """Return its value for a zone: the zone's own, else that of a group of places with the zone."""
    infos = [each for each in quota.get("dimensionsInfos", []) if (each.get("details") or {}).get("value")]
    own = [each for each in infos if (each.get("dimensions") or {}).get("zone") == zone]
    shared = [
        each for each in infos if not each.get("dimensions") and zone in each.get("applicableLocations", [])
    ]
    return next((str(each["details"]["value"]) for each in own + shared), None)


def command(wanted: Wanted, *, remove: bool, yes: bool) -> int:
    """List what the project holds. remove: also remove the zombies, after a question unless `yes`; FAILED if one stays.

    Raises:
        RequestError: Pulumi did not make the stack, an update of it is under way, or Google does not answer.
    """
    stack = wanted.stack
    if stack == LOCAL or (inventories.is_file(stack) and wanted.given is None):
        raise RequestError(
            f"--stack {stack}: Pulumi did not make it, so nothing says what is its own; "
            "name a Pulumi stack with --stack"
        )
    given = wanted.given.inventory if wanted.given else None  # a rehearsal's
    stack = given.stack if given else stack
    project = given.project if given else _exported(stack).project
    if not project:
        project = inventories.ask(["config", "get", PROJECT], stack, otherwise="then try again").strip()
    access, backoff = settings.read(lambda _: None), Backoff(say=say(terminal()))
    with contextlib.closing(Client(access, backoff)) as client:
        kept = frozenset(names_of(given) if given else ())
        return _carry_out(stack, kept, project, access, client, backoff, remove=remove, yes=yes)


def _exported(stack: str) -> Known:
    return known_of(stack, inventories.ask(["stack", "export"], stack, otherwise="then try again"))


def _carry_out(
    stack: str,
    kept: frozenset[str],
    project: str,
    access: settings.Settings,
    client: Client,
    backoff: Backoff,
    *,
    remove: bool,
    yes: bool,
) -> int:
    def look() -> tuple[Known, list[Holding]]:
        try:
            queued, nodes = client.queued_resources(project), client.nodes(project)
        except CloudTpuError as error:
            raise RequestError(str(error)) from None
        if unknown := sorted({*queued.unreachable, *nodes.unreachable}):
            backoff.say(
                f"warning: Google could not say what it holds in {', '.join(unknown)}; try again later"
            )
        # Read afterwards, so that it has whatever Pulumi had begun by then.
        known = _exported(stack)
        known = dataclasses.replace(known, names=known.names | kept)
        return known, holdings(queued.found, nodes.found, known)

    tell, (known, found) = backoff.say, look()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("whose", "zone", "id", "is a", "type", "capacity", "state", "USD/hour"):
        table.add_column(heading, overflow="fold")
    for each in found:
        whose = f"{each.whose} ({each.label})" if each.whose == "another stack's" else each.whose
        kind = f"{each.count} x {each.accelerator_type}" if each.count > 1 else each.accelerator_type
        usd = "" if each.usd_per_hour is None else f"{each.usd_per_hour:,.2f}"
        table.add_row(whose, each.zone, each.own_id, each.kind, kind, each.capacity, each.state, usd)
    if found:
        terminal().print(table)
    for line in _told_quotas(access, project, found) if found else ():
        tell(line)
    zombies = [each for each in found if each.whose == "zombie"]
    tell(f"{project} holds {len(found)}; {len(zombies)} are {stack}'s and nobody knows of them")
    if not known.owner:
        tell(
            f"Pulumi's state of {stack} has no id, as before the first `pulumi up` and after `pulumi destroy`: what is "
            "its own cannot be told from what other stacks of that name have made"
        )
    if not zombies or not remove:
        return DONE
    if not yes and not sys.stdin.isatty():
        raise RequestError("--remove: nobody is there to be asked; add --yes")
    if not yes and input(f"remove {len(zombies)} for good? [y/N] ").strip().lower() != "y":
        return DONE
    known, fresh = look()  # what Pulumi has begun meanwhile, it knows of
    if known.pending:
        raise RequestError(
            f"--remove: an update of {stack} is under way or was interrupted, and goes on with what is there; "
            f"first `pulumi up --stack {stack}`, or `pulumi destroy`, which removes it too"
        )
    failed = False
    for each in [each for each in fresh if each in zombies]:
        try:
            each.delete(Lifecycle(client, backoff), project, known.owner)
            tell(f"{each.zone}/{each.own_id}: removed")
        except CloudTpuError as error:
            tell(f"{each.zone}/{each.own_id}: {error}")
            failed = True
    return FAILED if failed else DONE


def _told_quotas(access: settings.Settings, project: str, found: Sequence[Holding]) -> Iterator[str]:
    """Return the lines about quotas from Google's Cloud Quotas API, or why there are none."""
    if access.is_rehearsal:
        return
    import google.auth.exceptions
    import google.auth.transport.requests

    try:
        session = google.auth.transport.requests.AuthorizedSession(settings.credentials(access))  # type: ignore[no-untyped-call]
        answer = session.get(QUOTAS.format(project), params={"pageSize": 1000}, timeout=ANSWER_LIMIT_S)
        if answer.status_code == 200:
            yield from limits(answer.json().get("quotaInfos", []), found)
            return
        why = f"HTTP {answer.status_code}"
    except (OSError, ValueError, CloudTpuError, google.auth.exceptions.GoogleAuthError) as error:
        why = type(error).__name__
    yield (
        f"quotas are not told ({why}): `gcloud services enable cloudquotas.googleapis.com --project={project}`, or see "
        f"https://console.cloud.google.com/iam-admin/quotas?project={project}"
    )


# --- those that nobody uses -----------------------------------------------------------------------------------------

# One is given back only if all of this holds: no run is kept on it or queued for it; every host answers; no process of
# ours runs there, and no program of any user has a TPU open; and no run on it was active within `tpu-stack:idle-hours`.
# When a TPU was last seen open is noted in the store, because nothing else tells it once the program has ended.
USED = "used.json"
"""Slice → when a pass last saw a TPU of it open."""
LOOK_LIMIT_S = 30.0
AS_ROOT = 'if [ "$(id -u)" = 0 ]; then sh -c "$0"; else sh -c "$0" 2>/dev/null; sudo -n -- sh -c "$0"; fi'
"""Only root sees what other users have open. A container's root may see less than users see of their own programs."""
GONE, LOOKED = ("No such file or directory", "No such process"), "looked"


def give_back(store: Store, world: World, say: Callable[[str], None]) -> None:
    """Give back what is idle, if it is time to look.

    Raises:
        contracts.errors.RequestError, launch.hosts.HostError, infra.documents.DocumentsError: it cannot be seen whether
            something is.
    """
    documents = store.documents
    if not is_noted(documents):
        return
    stack = stack_of(store.read(), documents.url)
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
                ensure.release(world.client, world.backoff, stack.slices[name], mine)
                moment = datetime.datetime.fromtimestamp(store.now_s(), datetime.UTC)
                ensure.record(documents, dataclasses.replace(now[0], hosts=(), created=moment.isoformat()))
        except (LeaseHeldError, LeaseLostError, CloudTpuError) as error:
            say(f"{name}: {error}")


def _unused(
    store: Store, world: World, stack: Stack, name: str, limit_s: float, say: Callable[[str], None]
) -> tuple[Slice, float] | None:
    """Return a slice that nobody has used for longer than the limit, and for how long; None: somebody may want it."""
    wanted = [run for run in store.read().runs.values() if run.end is None and run.desired == "running"]
    if any(name in run.slices if run.slice is None else run.slice == name for run in wanted):
        return None
    known = next(each for each in stack.inventory.slices if each.name == name)
    one = ensure.observed(world.client, world.backoff, stack.slices[name], known)
    unused_s = 0.0 if one is None else _unused_s(store, stack, one, say)
    return (one, unused_s) if one is not None and unused_s > limit_s else None


def _is_told(
    documents: Documents, stack: Stack, name: str, unused_s: float, line: str, say: Callable[[str], None]
) -> bool:
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


def _unused_s(store: Store, stack: Stack, one: Slice, say: Callable[[str], None]) -> float:
    """Return for how long nobody has used it; 0 while it is used, or if that cannot be seen.

    A host that does not answer, at any look, for as long as no run has used the slice, is of no use to anybody.
    """
    documents, now_s = store.documents, store.now_s()
    others = [each for each in stack.inventory.slices if each.name != one.name]
    target = on(
        dataclasses.replace(stack, inventory=dataclasses.replace(stack.inventory, slices=(one, *others))),
        one.name,
    )
    known = target.backend.status()
    seen: Mapping[str, float] = documents.read(USED).value or {}
    silent, silent_since_s, open_s = f"{one.name}/silent", 0.0, seen.get(one.name, 0.0)
    if known.errors:
        silent_since_s = seen.get(silent, now_s)
        if silent not in seen:
            documents.change(USED, lambda value: {**(value or {}), silent: now_s})
    else:
        if silent in seen:
            documents.change(
                USED, lambda value: {key: at for key, at in (value or {}).items() if key != silent}
            )
        try:
            open_on = devices_open_on(target)
        except HostError as error:
            say(f"{one.name}: it is not given back: {error}")
            return 0.0
        if open_on:
            documents.change(USED, lambda value: {**(value or {}), one.name: now_s})
            open_s = now_s
    return unused_s(
        now_s,
        used_s=idle.used_s(one, runs.list_runs(target.runs)),
        processes=known.processes,
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
