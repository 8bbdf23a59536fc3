"""`fab zombies`: lists all TPUs that a project holds, in every zone, with their owners, and removes leftovers.

The stack's resources carry its owner label. Those that Pulumi's state or the inventory has are in use. The others are
zombies: an interrupted program has left them, they count against the quota, may be billed, and can be removed here.
Resources of others are shown and never changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from contracts.aliases import Json
from contracts.errors import DONE, FAILED, RequestError
from contracts.inventory import Inventory
from infra import catalogue, naming
from infra.cloud_tpu import tpu_request
from infra.cloud_tpu.queued_resources import QueuedResources
from infra.compute import compute_request
from infra.compute.groups import ComputeGroups
from infra.slice_apis import google_settings
from infra.slice_apis.lifecycle import Lifecycle
from infra.slice_apis.lifecycles import Clients
from infra.slice_apis.retry import Backoff, CloudTpuError
from infra.slice_apis.slice_api import ACTIVE
from launch import inventories, pricing
from launch.output import say, table, terminal
from launch.targets import LOCAL, TargetRequest

Ownership = Literal["zombie", "another stack's", "in use", "not tpu-stack's"]

QUEUED_RESOURCE = "pulumi-python:dynamic/tpu_stack:QueuedResource"
COMPUTE_SLICE = "pulumi-python:dynamic/tpu_stack:ComputeSlice"
IDENTITY = "pulumi-python:dynamic/tpu_stack:StackIdentity"
DIRECT = "gcp:tpu/v2Vm:V2Vm"
STACK = "pulumi:pulumi:Stack"
PROJECT = "gcp:project"
"""The key of Pulumi's configuration."""
WAITING_STATES = frozenset({"ACCEPTED", "WAITING_FOR_RESOURCES", "PENDING"})
EMPTY_STATES = WAITING_STATES | {"FAILED", "SUSPENDED", "PREEMPTED", "TERMINATED"}
"""States in which a resource holds no machine and nothing is billed."""
QUOTAS = "https://cloudquotas.googleapis.com/v1/projects/{}/locations/global/services/tpu.googleapis.com/quotaInfos"
QUOTA_PREFIXES = {
    generation.name: generation.quota_prefix for generation in catalogue.GENERATIONS if generation.offered
}
SPOT, SERVING = "Preemptible", "Serving"
ANSWER_LIMIT_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackState:
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
    """A queued resource with its nodes (count), a node without one, or a group or instance of Compute Engine.

    label: the stack that its labels name. asked_by: the id of the queued resource that it is or was of.
    """

    kind: Literal["queued resource", "node", "group", "instance"]
    zone: str
    own_id: str
    accelerator_type: str
    count: int
    capacity: str
    state: str
    ownership: Ownership
    label: str
    asked_by: str

    @property
    def pool(self) -> tuple[str, str, bool]:
        """What a quota is for: zone, generation, and whether the chips are spot."""
        accelerator = catalogue.OFFERS["any"].get(self.accelerator_type)
        return self.zone, accelerator.generation.name if accelerator else "", self.capacity == "spot"

    @property
    def chips(self) -> int:
        """How many chips it has now."""
        accelerator = catalogue.OFFERS["any"].get(self.accelerator_type)
        return accelerator.chips * self.count if accelerator and self.state not in EMPTY_STATES else 0

    def delete(self, clients: Clients, backoff: Backoff, project: str, owner: str) -> None:
        """Have it removed, if it is the owner's. Raises CloudTpuError."""
        if self.kind in ("group", "instance"):
            groups = ComputeGroups(clients.compute, backoff)
            part = groups.removable_part(
                project, self.zone, self.own_id, owner, is_group=self.kind == "group"
            )
            Lifecycle(groups).remove(part)
            return
        api = QueuedResources(clients.tpu, backoff)
        lifecycle = Lifecycle(api)
        if self.kind == "node":
            name = f"projects/{project}/locations/{self.zone}/nodes/{self.own_id}"
            lifecycle.remove(api.removable_node(name, owner))
            return
        place = {"project": project, "zone": self.zone, "owner": owner}
        lifecycle.delete({**place, "queued_resource_id": self.own_id, "node_count": self.count})

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table that `fab zombies` prints."""
        label = f" ({self.label})" if self.ownership == "another stack's" else ""
        kind = f"{self.count} x {self.accelerator_type}" if self.count > 1 else self.accelerator_type
        unknown = "none yet" if self.state in WAITING_STATES else ""
        usd = unknown if self.usd_per_hour is None else f"{self.usd_per_hour:,.2f}"
        return (
            f"{self.ownership}{label}",
            self.zone,
            self.own_id,
            self.kind,
            kind,
            self.capacity,
            self.state,
            usd,
        )

    @property
    def usd_per_hour(self) -> float | None:
        price = pricing.listed_price(dataclasses.asdict(self)) if self.chips else None
        return price["usd_per_hour"] if price else None


def parse_export(stack: str, text: str) -> StackState:
    """Return what the output of `pulumi stack export` says. Pure.

    Raises:
        RequestError: it is none, or its inventory cannot be read.
    """
    try:
        state = json.loads(text)["deployment"]
        resources = [
            (resource["type"], resource.get("outputs") or {}) for resource in state.get("resources") or ()
        ]
        pending = [str(resource["resource"]["urn"]) for resource in state.get("pending_operations") or ()]
        names = {
            f"{zone}/{outputs['queued_resource_id']}"
            for kind, outputs in resources
            if kind == QUEUED_RESOURCE
            for zone in [outputs["zone"], *(outputs.get("zones") or ())]
        }
        names |= {
            f"{zone}/{name}"
            for kind, outputs in resources
            if kind == COMPUTE_SLICE
            for zone in [outputs["zone"], *(outputs.get("zones") or ())]
            for name in naming.part_names(str(outputs["slice_id"]), int(outputs.get("count") or 1))
        }
        names |= {f"{outputs['zone']}/{outputs['name']}" for kind, outputs in resources if kind == DIRECT}
        identity = next((outputs for kind, outputs in resources if kind == IDENTITY), None)
        owner, project = (str(identity["owner"]), str(identity.get("project", ""))) if identity else ("", "")
        inventory = next((outputs.get("inventory") for kind, outputs in resources if kind == STACK), None)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise RequestError(f"--stack {stack}: `pulumi stack export` printed no state of a stack") from None
    if inventory is not None:
        names |= zone_ids(inventories.parse(str(inventory), f"the stack {stack}"))
    return StackState(owner=owner, names=frozenset(names), pending=tuple(pending), project=project)


def zone_ids(inventory: Inventory) -> set[str]:
    """Return ZONE/ID of its slices, in all zones that they may be in."""
    names: set[str] = set()
    for one_slice in inventory.slices:
        kind, _, own_id = one_slice.origin.rpartition(" ")
        has_parts = kind in ("group", "instance")
        own_ids = naming.part_names(own_id, one_slice.count) if has_parts else (own_id,)
        names |= {
            f"{zone}/{resource_id}" for zone in (one_slice.zone, *one_slice.zones) for resource_id in own_ids
        }
    return names


def holdings(
    queued: Iterable[Json],
    nodes: Iterable[Json],
    stack: StackState,
    things: Sequence[Json] = (),
    template: Callable[[str], Json | None] = lambda _: None,
) -> list[Holding]:
    """Return all that a project holds, zombies first.

    things: groups and instances of Compute Engine. template: returns the one of a link, of which a group that waits for
    its machines will make them; None: it is not known.
    """
    queued = [*queued]
    serving = {
        str(resource["name"]).rpartition("/")[2]
        for resource in queued
        if tpu_request.resource_state(resource) == ACTIVE
        and "/".join(str(resource["name"]).split("/")[3::2]) in stack.names
    }
    held: dict[str, Holding] = {}
    for resource in queued:
        node, state, count = (
            tpu_request.requested_node(resource),
            tpu_request.resource_state(resource),
            len(tpu_request.node_ids(resource)),
        )
        capacity = (
            "spot" if "spot" in resource else "reserved" if resource.get("reservationName") else "on-demand"
        )
        if resource.get("provisioningModel") == "FLEX_START":
            capacity = "flex-start"
        holding = _holding("queued resource", resource, node, state, capacity, count or 1, stack)
        is_elsewhere = state != ACTIVE and holding.own_id in serving  # the slice is in another of its zones
        if holding.ownership == "in use" and is_elsewhere and tpu_request.is_owned(node, stack.owner):
            holding = dataclasses.replace(holding, ownership="zombie")  # which a race has left
        held[f"{holding.zone}/{holding.own_id}"] = holding
    direct = []
    for node in nodes:
        scheduling = node.get("schedulingConfig") or {}
        is_spot = scheduling.get("spot") or scheduling.get("preemptible")
        capacity = "spot" if is_spot else "reserved" if scheduling.get("reserved") else "on-demand"
        holding = _holding("node", node, node, str(node.get("state", "")), capacity, 1, stack)
        if f"{holding.zone}/{holding.asked_by}" not in held:
            direct.append(holding)
    return sorted(
        [*held.values(), *direct, *_on_compute(things, stack, template)],
        key=lambda holding: (holding.ownership != "zombie", holding.ownership, holding.zone, holding.own_id),
    )


def _on_compute(
    things: Sequence[Json], stack: StackState, template: Callable[[str], Json | None]
) -> list[Holding]:
    """Return the groups of TPU machines, and the TPU machines that are of none, whoever's they are."""
    machines: dict[tuple[str, str], list[Json]] = {}
    groups = {
        (compute_request.zone_of(thing), str(thing["name"])): thing
        for thing in filter(compute_request.is_group, things)
    }
    for thing in things:
        if not compute_request.is_group(thing) and _tpu(thing) is not None:
            machines.setdefault((compute_request.zone_of(thing), compute_request.part_of(thing)), []).append(
                thing
            )
    holdings = []
    for zone, name in sorted({*machines, *groups}):
        group, instances = groups.get((zone, name)), machines.get((zone, name), [])
        owner = compute_request.owner_of(group or instances[0])
        is_tpu = bool(instances) or bool((group or {}).get("resourcePolicies")) or bool(owner)
        if not is_tpu:
            continue
        labels = instances[0].get("labels", {}) if instances else {}
        ownership: Ownership = (
            "another stack's" if owner or naming.STACK_LABEL in labels else "not tpu-stack's"
        )
        if f"{zone}/{name}" in stack.names:
            ownership = "in use"
        elif owner and owner == stack.owner:
            ownership = "zombie"
        statuses = {str(instance.get("status")) for instance in instances}
        if group is not None and not instances:
            properties = (template(str(group.get("instanceTemplate", ""))) or {}).get("properties")
            instances = [properties] * int(group.get("targetSize", 0)) if properties else []
            labels = (group.get("allInstancesConfig") or {}).get("properties", {}).get("labels", {})
        holdings.append(
            Holding(
                kind="instance" if group is None else "group",
                zone=zone,
                own_id=name,
                accelerator_type=_accelerator_type(instances) if instances else "?",
                count=1,
                capacity=compute_request.capacity_of(instances[0]) if instances else "?",
                state=", ".join(sorted(statuses)) or compute_request.WAITING,
                ownership=ownership,
                label=str(labels.get(naming.STACK_LABEL, "")),
                asked_by=name,
            )
        )
    return holdings


def _tpu(instance: Json) -> tuple[str, int] | None:
    """Return generation and chips of an instance's machine type; None: it has no TPU."""
    machine_type = str(instance.get("machineType", "")).rpartition("/")[2]
    number = machine_type.rpartition("-")[2].removesuffix("t")
    prefixes = {
        generation.nodes.prefix: generation.name for generation in catalogue.GENERATIONS if generation.nodes
    }
    generation = prefixes.get(machine_type.rpartition("-")[0])
    return (generation, int(number)) if generation and number.isdecimal() else None


def _accelerator_type(instances: Sequence[Json]) -> str:
    """Return the type of a slice of these machines; its machine type where no slice is of so many chips."""
    chips = sum(tpu[1] for instance in instances if (tpu := _tpu(instance)) is not None)
    generation = (_tpu(instances[0]) or ("", 0))[0]
    types = [
        name
        for name, tpu in catalogue.OFFERS["any"].items()
        if tpu.generation.name == generation and tpu.chips == chips
    ]
    machine_type = str(instances[0].get("machineType", "")).rpartition("/")[2]
    return next(iter(types), f"{len(instances)} x {machine_type}")


def _holding(
    kind: Any, resource: Json, node: Json, state: str, capacity: str, count: int, stack: StackState
) -> Holding:
    _, _, _, zone, _, own_id = [*str(resource.get("name", "")).split("/"), *[""] * 6][:6]
    labels, config = node.get("labels") or {}, node.get("acceleratorConfig") or {}
    ownership: Ownership = "another stack's" if naming.STACK_LABEL in labels else "not tpu-stack's"
    if f"{zone}/{own_id}" in stack.names:  # a direct node has no owner label
        ownership = "in use"
    elif tpu_request.is_owned(node, stack.owner):
        ownership = "zombie"
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
        ownership=ownership,
        label=str(labels.get(naming.STACK_LABEL, "")),
        asked_by=str(resource.get("queuedResource", "")).rpartition("/")[2] or own_id,
    )


def limits(quotas: Sequence[Json], held: Sequence[Holding]) -> Iterator[str]:
    """Return a line for each quota that is told of the zones and generations that are held. Pure.

    A quota counts chips for some generations and cores for others, so what is left is for the reader to work out.
    """
    for pool in sorted({holding.pool for holding in held}):
        zone, generation, is_spot = pool
        chips = sum(holding.chips for holding in held if holding.pool == pool)
        for quota in quotas:
            own_id = str(quota.get("quotaId", ""))
            matches = own_id.startswith(QUOTA_PREFIXES.get(generation, "-")) and SERVING not in own_id
            if matches and (SPOT in own_id) == is_spot and (value := _value(quota, zone)) is not None:
                yield f"quota {own_id} in {zone}: {value}; {chips} chips are held"


def _value(quota: Json, zone: str) -> str | None:
    """Return its value for a zone: the zone's own, else that of a group of places with the zone."""
    infos = [entry for entry in quota.get("dimensionsInfos", []) if (entry.get("details") or {}).get("value")]
    own = [entry for entry in infos if (entry.get("dimensions") or {}).get("zone") == zone]
    shared = [
        entry
        for entry in infos
        if not entry.get("dimensions") and zone in entry.get("applicableLocations", [])
    ]
    return next((str(entry["details"]["value"]) for entry in own + shared), None)


def command(target: TargetRequest, *, remove: bool, yes: bool) -> int:
    """List what the project holds. remove: also remove the zombies, after a question unless `yes`; FAILED if one stays.

    Raises:
        RequestError: Pulumi did not make the stack, an update of it is under way, or Google does not answer.
    """
    stack = target.stack
    if stack == LOCAL or (inventories.is_file(stack) and target.preset is None):
        raise RequestError(
            f"--stack {stack}: Pulumi did not make it, so nothing says what is its own; "
            "name a Pulumi stack with --stack"
        )
    inventory = target.preset.inventory if target.preset else None  # a rehearsal's
    stack = inventory.stack if inventory else stack
    project = inventory.project if inventory else _exported(stack).project
    if not project:
        project = inventories.ask(["config", "get", PROJECT], stack, otherwise="then try again").strip()
    access, backoff = google_settings.read(lambda _: None), Backoff(say=say(terminal()))
    with contextlib.closing(Clients(lambda: access, backoff)) as clients:
        names = frozenset(zone_ids(inventory) if inventory else ())
        return _carry_out(stack, names, project, access, clients, backoff, remove=remove, yes=yes)


def _exported(stack: str) -> StackState:
    return parse_export(stack, inventories.ask(["stack", "export"], stack, otherwise="then try again"))


def _carry_out(
    stack: str,
    names: frozenset[str],
    project: str,
    access: google_settings.Settings,
    clients: Clients,
    backoff: Backoff,
    *,
    remove: bool,
    yes: bool,
) -> int:
    def look() -> tuple[StackState, list[Holding]]:
        try:
            queued, nodes = clients.tpu.queued_resources(project), clients.tpu.nodes(project)
            on_compute = ComputeGroups(clients.compute, backoff).listing(project)
        except CloudTpuError as error:
            raise RequestError(str(error)) from None
        if unknown := sorted({*queued.unreachable, *nodes.unreachable, *on_compute.unreachable}):
            backoff.say(
                f"warning: Google could not say what it holds in {', '.join(unknown)}; try again later"
            )
        # Read afterwards, so that it has whatever Pulumi had begun by then.
        state = _exported(stack)
        state = dataclasses.replace(state, names=state.names | names)
        return state, holdings(queued.items, nodes.items, state, on_compute.items, template)

    def template(link: str) -> Json | None:
        with contextlib.suppress(CloudTpuError):  # then nobody says what the group waits for
            return clients.compute.template(link)
        return None

    tell, (state, held) = backoff.say, look()
    rows = table("whose", "zone", "id", "is a", "type", "capacity", "state", "USD/hour")
    for holding in held:
        rows.add_row(*holding.cells)
    if held:
        terminal().print(rows)
    for line in _quota_lines(access, project, held) if held else ():
        tell(line)
    zombies = [holding for holding in held if holding.ownership == "zombie"]
    tell(f"{project} holds {len(held)}; {len(zombies)} are {stack}'s and nobody knows of them")
    if not state.owner:
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
    state, fresh = look()  # what Pulumi has begun meanwhile, it knows of
    if state.pending:
        raise RequestError(
            f"--remove: an update of {stack} is under way or was interrupted, and goes on with what is there; "
            f"first `pulumi up --stack {stack}`, or `pulumi destroy`, which removes it too. After an `up` that has "
            f"ended well, `pulumi refresh --clear-pending-creates --yes --stack {stack}` forgets the interrupted one"
        )
    failed = False
    for holding in [holding for holding in fresh if holding in zombies]:
        try:
            holding.delete(clients, backoff, project, state.owner)
            tell(f"{holding.zone}/{holding.own_id}: removed")
        except CloudTpuError as error:
            tell(f"{holding.zone}/{holding.own_id}: {error}")
            failed = True
    return FAILED if failed else DONE


def _quota_lines(access: google_settings.Settings, project: str, held: Sequence[Holding]) -> Iterator[str]:
    """Return the lines about quotas from Google's Cloud Quotas API, or why there are none."""
    if access.is_rehearsal:
        return
    import google.auth.exceptions
    import google.auth.transport.requests

    try:
        session = google.auth.transport.requests.AuthorizedSession(google_settings.credentials(access))  # type: ignore[no-untyped-call]
        answer = session.get(QUOTAS.format(project), params={"pageSize": 1000}, timeout=ANSWER_LIMIT_S)
        if answer.status_code == 200:
            yield from limits(answer.json().get("quotaInfos", []), held)
            return
        reason = f"HTTP {answer.status_code}"
    except (OSError, ValueError, CloudTpuError, google.auth.exceptions.GoogleAuthError) as error:
        reason = type(error).__name__
    yield (
        f"quotas are not told ({reason}): `gcloud services enable cloudquotas.googleapis.com --project={project}`, or "
        f"see https://console.cloud.google.com/iam-admin/quotas?project={project}"
    )
