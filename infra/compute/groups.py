"""Groups and instances of Compute Engine as `infra.slice_apis.lifecycle` sees them."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from contracts.aliases import Json
from infra import naming
from infra.compute import compute_request
from infra.compute.compute_request import GroupSpec
from infra.slice_apis import workers
from infra.slice_apis.google_api import Listing
from infra.slice_apis.retry import AbandonedError, Backoff, CloudTpuError
from infra.slice_apis.slice_api import Look, Props, Removable

if TYPE_CHECKING:
    from infra.compute.compute_client import ComputeClient

PATIENCE_S = 300.0
NAMESPACES = (workers.HOST_KEYS, workers.OWN)


class ComputeGroups:
    """A `SliceApi`. It remembers the operations by which it has asked: a request that fails leaves no other trace."""

    def __init__(self, client: ComputeClient, backoff: Backoff) -> None:
        self._client = client.under(backoff)
        self.backoff = backoff
        self._operations: dict[tuple[str, str], str] = {}  # by zone and part

    def now(self) -> datetime.datetime:
        return self._client.now()

    def spec(self, props: Props) -> GroupSpec:
        return GroupSpec.from_props(props)

    # --- what there is ----------------------------------------------------------------------------------------------

    def find(self, spec: GroupSpec, *, patience_s: float = PATIENCE_S) -> Json | None:
        resource = compute_request.gathered(spec, self._things(spec, patience_s))
        failed = self._failed(spec, resource)
        if resource is None and failed:
            resource = {"name": spec.name, "parts": {}, "others": [], "createTime": ""}
        return None if resource is None else resource | {"failed": failed}

    def _things(self, spec: GroupSpec, patience_s: float) -> list[Json]:
        place = (spec.project, spec.zone)
        label = (naming.OWNER_LABEL, spec.owner)
        # Both kinds of parts: an interrupted `pulumi up` may have asked for the other one.
        groups = [self._client.group(*place, name, patience_s=patience_s) for name in spec.part_names]
        ours = self._client.zone_instances(*place, label, patience_s=patience_s)
        unlisted = [] if spec.is_group else {*spec.part_names} - {str(instance["name"]) for instance in ours}
        others = [self._client.instance(*place, name, patience_s=patience_s) for name in sorted(unlisted)]
        return [*(thing for thing in (*groups, *others) if thing is not None), *ours]

    def _failed(self, spec: GroupSpec, resource: Json | None) -> dict[str, str]:
        """Why parts that this process has asked for are not there: the errors of their operations."""
        failed = {}
        for name in spec.part_names:
            operation = self._operations.get((spec.zone, name))
            if operation is None or (resource is not None and name in resource["parts"]):
                continue
            current = self._client.operation(spec.project, spec.zone, operation)
            if error := _error(current):
                failed[name] = error
        return failed

    def listing(self, project: str) -> Listing:
        groups, instances = self._client.groups(project), self._client.instances(project)
        unreachable = sorted({*groups.unreachable, *instances.unreachable})
        return Listing(items=[*groups.items, *instances.items], unreachable=tuple(unreachable))

    def in_listing(self, listing: Listing, spec: GroupSpec) -> Mapping[str, Json]:
        by_zone: dict[str, list[Json]] = {}
        for thing in listing.items:
            by_zone.setdefault(compute_request.zone_of(thing), []).append(thing)
        resources = {
            zone: compute_request.gathered(spec.in_zone(zone), things) for zone, things in by_zone.items()
        }
        return {
            zone: resource
            for zone, resource in resources.items()
            if resource is not None and self.is_owned(resource, spec.owner)
        }

    def is_owned(self, resource: Json, owner: str) -> bool:
        return bool(owner) and (bool(resource["parts"]) or not resource["others"])

    def is_being_deleted(self, resource: Json) -> bool:
        """Groups say so; an instance that stops may be one that is deleted, and is deleted again at worst."""
        groups = [part["group"] for part in resource["parts"].values()]
        return bool(groups) and all(
            group is not None and group.get("currentActions", {}).get("deleting", 0) > 0 for group in groups
        )

    def is_partial(self, spec: GroupSpec, resource: Json) -> bool:
        parts = resource["parts"]
        kinds = [compute_request.part_standing(spec, part, self.now())[0] for part in parts.values()]
        return any(name not in parts for name in spec.part_names) and "lost" not in kinds

    def is_queued(self, spec: GroupSpec) -> bool:
        """A group waits for its machines, and so does an instance of capacity flex-start; another one is refused."""
        return spec.is_group or spec.capacity == "flex-start"

    def glance(self, spec: GroupSpec, resource: Json) -> Look:
        return compute_request.look(spec, resource, self.now())

    def look(self, spec: GroupSpec, resource: Json) -> Look:
        return compute_request.look(spec, resource, self.now())

    def differences(self, spec: GroupSpec, look: Look) -> tuple[str, ...]:
        return compute_request.differences(spec, look)

    # --- requests and deletions -------------------------------------------------------------------------------------

    def in_the_way(self, spec: GroupSpec) -> Iterator[Removable]:
        resource = compute_request.gathered(spec, self._things(spec, PATIENCE_S))
        if resource is not None and resource["others"]:
            raise CloudTpuError(
                f"{spec.name}: {', '.join(resource['others'])} exists already and does not belong to this stack; it is"
                f" left alone.\nGive the slice another name, or, if nobody needs the old one, delete it:"
                f" {spec.how_to_delete}",
                "ALREADY_EXISTS",
            )
        yield from ()

    def ask(self, spec: GroupSpec) -> str:
        """Of several parts all are asked for, or, if one is refused, none."""
        resource = compute_request.gathered(spec, self._things(spec, PATIENCE_S))
        present = resource["parts"] if resource else {}
        created: list[str] = []
        try:
            for name in spec.part_names:
                if name not in present:
                    self._operations[spec.zone, name] = self._insert(spec, name)
                    created.append(name)
        except AbandonedError:
            raise
        except CloudTpuError:
            for name in created:
                with contextlib.suppress(CloudTpuError):
                    self._delete(spec, name)
            raise
        return spec.zone

    def _insert(self, spec: GroupSpec, name: str) -> str:
        self.backoff.require_awaited()
        place = (spec.project, spec.zone)
        if spec.is_group:
            return str(self._client.insert_group(*place, compute_request.group(spec, name))["name"])
        return str(
            self._client.insert_instance(*place, compute_request.instance(spec, name), spec.template)["name"]
        )

    def operation(self, name: str) -> Json | None:  # noqa: ARG002
        """`find` shows what has failed."""
        return {}

    def removable(self, spec: GroupSpec) -> Removable:
        def find() -> Json | None:
            resource = compute_request.gathered(spec, self._things(spec, PATIENCE_S))
            return resource if resource is not None and resource["parts"] else None

        def delete() -> None:
            for name in spec.part_names:
                self._operations.pop((spec.zone, name), None)
                self._delete(spec, name)

        return Removable(
            name=spec.name,
            find=find,
            get_state=lambda resource: compute_request.look(spec, resource, self.now()).state,
            delete=delete,
        )

    def _delete(self, spec: GroupSpec, name: str) -> None:
        """Delete a part, be it the owner's. What is being deleted already answers that it is not ready."""
        place = (spec.project, spec.zone)
        resource = compute_request.gathered(spec, self._things(spec, PATIENCE_S)) or {"parts": {}}
        part = resource["parts"].get(name)
        if part is None:
            return
        with _while_it_is_deleted():
            if part["group"] is not None:
                self._client.delete_group(*place, name)
                return
        for instance in part["instances"]:
            with _while_it_is_deleted():
                self._client.delete_instance(*place, str(instance["name"]))

    def remains(self, spec: GroupSpec) -> Iterator[Removable]:  # noqa: ARG002
        """`removable` has deleted the instances with their groups."""
        yield from ()

    def leftovers(self, project: str, owner: str, unreachable: set[str]) -> Iterator[Removable]:
        listing = self.listing(project)
        unreachable |= {*listing.unreachable}
        ours = [thing for thing in listing.items if compute_request.owner_of(thing) == owner]
        parts = {
            (compute_request.zone_of(thing), name, compute_request.is_group(thing) or name != thing["name"])
            for thing in ours
            for name in [compute_request.part_of(thing)]
        }
        for zone, name, is_group in sorted(parts):
            yield self.removable_part(project, zone, name, owner, is_group=is_group)

    def removable_part(self, project: str, zone: str, name: str, owner: str, *, is_group: bool) -> Removable:
        """A group with its instances, or an instance, if it is the owner's."""
        props = {"project": project, "zone": zone, "slice_id": name, "owner": owner}
        return self.removable(GroupSpec.from_props(props | {"hosts": 2 if is_group else 1}))

    # --- instances --------------------------------------------------------------------------------------------------

    def adjusted(self, spec: GroupSpec, look: Look, before: Sequence[Props]) -> Look:
        """A group gets the template for machines that it makes later; those that run get labels, metadata and tags."""
        place = (spec.project, spec.zone)
        is_changed = False
        for name, part in look.resource["parts"].items():
            existing = part["group"]
            if (
                existing is not None
                and existing.get("instanceTemplate", "").rpartition("/")[2]
                != (spec.template.rpartition("/")[2])
            ):
                self._until_done(spec, self._client.set_template(*place, name, spec.template))
                is_changed = True
            for instance in part["instances"]:
                for method, body in compute_request.instance_changes(spec, instance, before).items():
                    operation = self._client.change_instance(*place, str(instance["name"]), method, body)
                    self._until_done(spec, operation)
                    is_changed = True
        if not is_changed:
            return look
        return compute_request.look(spec, self.find(spec) or look.resource, self.now())

    def _until_done(self, spec: GroupSpec, operation: Json) -> None:
        """Wait for an operation. Raises CloudTpuError if it fails or does not end in time."""
        ended = self.backoff.until_done(
            operation,
            lambda name: self._client.operation(spec.project, spec.zone, name),
            lambda current: current.get("status") == "DONE",
        )
        if error := _error(ended):
            raise CloudTpuError(f"{operation['name']}: {error}")

    def workers(self, spec: GroupSpec, look: Look, *, limit_s: float) -> list[Json]:
        instances = {
            name: sorted(look.nodes[name]["instances"], key=lambda instance: str(instance["name"]))
            for name in spec.part_names
            if name in look.nodes
        }
        kind = "instanceGroupManagers" if spec.is_group else "instances"
        nodes = [
            {
                "name": f"projects/{spec.project}/zones/{spec.zone}/{kind}/{name}",
                "state": "READY",
                "networkEndpoints": [_endpoint(instance) for instance in machines],
            }
            for name, machines in instances.items()
        ]
        published = _Published(client=self._client, spec=spec, instances=instances)
        return workers.outputs(published, self.backoff, nodes, limit_s)

    def more_outputs(self, spec: GroupSpec, look: Look) -> Json:  # noqa: ARG002
        return {"ends_at": compute_request.ends_at(look.resource)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Published:
    """What machines have published. instances: of each part, by its name."""

    client: ComputeClient
    spec: GroupSpec
    instances: Mapping[str, Sequence[Json]]

    def guest_attributes(self, name: str) -> list[Json]:
        """As the Cloud TPU API answers for a node. name: the full one of a part."""
        answers = []
        for instance in self.instances[name.rpartition("/")[2]]:
            own_name = str(instance["name"])
            items = [{"namespace": "instance", "key": "hostname", "value": own_name}]
            for namespace in NAMESPACES:
                items += self.client.guest_attributes(self.spec.project, self.spec.zone, own_name, namespace)
            answers.append({"queryValue": {"items": items}})
        return answers


def _endpoint(instance: Json) -> Json:
    interface: Json = next(iter(instance.get("networkInterfaces", [])), {})
    external = next(
        (access["natIP"] for access in interface.get("accessConfigs", []) if "natIP" in access), ""
    )
    return {"ipAddress": interface.get("networkIP", ""), "accessConfig": {"externalIp": external}}


def _error(operation: Json | None) -> str:
    """Why an operation has failed, with Google's code; "": it has not."""
    errors = (operation or {}).get("error", {}).get("errors", [])
    return "; ".join(f"{error.get('code', '')}: {error.get('message', '')}" for error in errors)


@contextlib.contextmanager
def _while_it_is_deleted() -> Iterator[None]:
    try:
        yield
    except CloudTpuError as error:
        if error.status not in ("NOT_FOUND", "FAILED_PRECONDITION"):
            raise
