"""Queued resources of the Cloud TPU API as `infra.slice_apis.lifecycle` sees them, with their nodes."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from contracts.aliases import Json
from contracts.durations import spoken
from infra.cloud_tpu import tpu_request
from infra.cloud_tpu.tpu_request import SliceSpec
from infra.slice_apis import workers
from infra.slice_apis.retry import CHANGE_LIMIT_S, Backoff, CloudTpuError
from infra.slice_apis.slice_api import ACTIVE, Look, Props, Removable

if TYPE_CHECKING:
    from infra.cloud_tpu.tpu_client import Client
    from infra.slice_apis.google_api import Listing

PATIENCE_S = 300.0
PATCH_AGAIN_S = 10.0


class QueuedResources:
    """A `SliceApi`."""

    def __init__(self, client: Client, backoff: Backoff) -> None:
        self._client = client.under(backoff)
        self.backoff = backoff

    def now(self) -> datetime.datetime:
        return self._client.now()

    def spec(self, props: Props) -> SliceSpec:
        return SliceSpec.from_props(props)

    # --- what there is ----------------------------------------------------------------------------------------------

    def find(self, spec: SliceSpec, *, patience_s: float = PATIENCE_S) -> Json | None:
        return self._client.queued_resource(spec.name, patience_s=patience_s)

    def listing(self, project: str) -> Listing:
        return self._client.queued_resources(project)

    def in_listing(self, listing: Listing, spec: SliceSpec) -> Mapping[str, Json]:
        """A project may be called by its number there."""
        paths = [(resource["name"].split("/"), resource) for resource in listing.items]
        return {
            path[3]: resource
            for path, resource in paths
            if path[5] == spec.own_id and self.is_owned(resource, spec.owner)
        }

    def is_owned(self, resource: Json, owner: str) -> bool:
        return tpu_request.is_owned(tpu_request.requested_node(resource), owner)

    def is_being_deleted(self, resource: Json) -> bool:
        return tpu_request.resource_state(resource) == "DELETING"

    def is_partial(self, spec: SliceSpec, resource: Json) -> bool:  # noqa: ARG002
        return False

    def is_queued(self, spec: SliceSpec) -> bool:  # noqa: ARG002
        return True

    def glance(self, spec: SliceSpec, resource: Json) -> Look:  # noqa: ARG002
        return tpu_request.look(resource, {})

    def look(self, spec: SliceSpec, resource: Json) -> Look:
        nodes: dict[str, Json | None] = {}
        if tpu_request.resource_state(resource) == ACTIVE:
            nodes = {
                node_id: self._client.node(f"{spec.parent}/nodes/{node_id}")
                for node_id in tpu_request.node_ids(resource)
            }
        return tpu_request.look(resource, nodes)

    def differences(self, spec: SliceSpec, look: Look) -> tuple[str, ...]:
        return tpu_request.differences(spec, look.resource, waiting=look.kind == "waiting")

    # --- requests and deletions -------------------------------------------------------------------------------------

    def in_the_way(self, spec: SliceSpec) -> Iterator[Removable]:
        for node_id in spec.node_ids:
            name = f"{spec.parent}/nodes/{node_id}"
            node = self._client.node(name)
            if node is None:
                continue
            if tpu_request.is_owned(node, spec.owner) and node.get("state") in tpu_request.LOST_NODE:
                yield self.removable_node(name, spec.owner)
                continue
            raise CloudTpuError(
                f"{spec.parent}/nodes/{node_id}: there is a node of this name already ({node.get('state')}), not made"
                f" by the queued resource {spec.queued_resource_id}; it is left alone.\nIf it is this slice's own,"
                " which was direct before: remove the slice, `pulumi up`, add it again, `pulumi up`."
                "\nOtherwise give the slice another name, or, if nobody needs the node, delete it:"
                f" gcloud compute tpus tpu-vm delete {node_id} --project={spec.project} --zone={spec.zone}",
                "ALREADY_EXISTS",
            )

    def ask(self, spec: SliceSpec) -> str:
        body = tpu_request.queued_resource(spec)
        operation = self._client.create_queued_resource(
            spec.parent, spec.queued_resource_id, body, version=tpu_request.api_version(spec)
        )
        return str(operation["name"])

    def operation(self, name: str) -> Json | None:
        return self._client.operation(name)

    def removable(self, spec: SliceSpec) -> Removable:
        return self._removable(spec.name, spec.owner)

    def _removable(self, name: str, owner: str) -> Removable:
        def find() -> Json | None:
            resource = self._client.queued_resource(name)
            return resource if resource and self.is_owned(resource, owner) else None

        return Removable(
            name=name,
            find=find,
            get_state=tpu_request.resource_state,
            delete=lambda: self._client.delete_queued_resource(name),
        )

    def removable_node(self, name: str, owner: str) -> Removable:
        """A node, if it is the owner's."""

        def find() -> Json | None:
            node = self._client.node(name)
            return node if node and tpu_request.is_owned(node, owner) else None

        return Removable(
            name=name,
            find=find,
            get_state=lambda node: str(node.get("state")),
            delete=lambda: self._client.delete_node(name),
        )

    def remains(self, spec: SliceSpec) -> Iterator[Removable]:
        """Nodes that the queued resource has left behind, be they ours by label and by name."""
        for node_id in spec.node_ids:
            name = f"{spec.parent}/nodes/{node_id}"
            node = self._client.node(name)
            if node and tpu_request.is_owned(node, spec.owner) and tpu_request.belongs_to(node, spec):
                yield self.removable_node(name, spec.owner)

    def leftovers(self, project: str, owner: str, unreachable: set[str]) -> Iterable[Removable]:
        queued = self._client.queued_resources(project)
        unreachable |= {*queued.unreachable}
        for resource in queued.items:
            if self.is_owned(resource, owner):
                yield self._removable(resource["name"], owner)
        nodes = self._client.nodes(project)
        unreachable |= {*nodes.unreachable}
        for node in nodes.items:
            if tpu_request.is_owned(node, owner):
                yield self.removable_node(node["name"], owner)

    # --- nodes ------------------------------------------------------------------------------------------------------

    def adjusted(self, spec: SliceSpec, look: Look, before: Sequence[Props]) -> Look:
        """Each node by itself: the API has no change of a queued resource, and only those of its nodes can change."""
        was = [*before, tpu_request.requested_node(look.resource)]
        nodes = _in_order(spec, look)
        for node in nodes:
            mask, body = tpu_request.patch(spec, node, was)
            if mask:
                self._patch(_name(spec, node), mask, body)
        fresh = [self._client.node(_name(spec, node)) or node for node in nodes]
        return tpu_request.look(look.resource, {node["name"].rpartition("/")[2]: node for node in fresh})

    def _patch(self, name: str, mask: str, body: Json) -> None:
        until = self.backoff.now() + CHANGE_LIMIT_S
        while True:
            try:
                self._until_done(self._client.patch_node(name, mask, body))
                return
            except CloudTpuError as error:
                # A node under maintenance, or one that another change is under way on, takes it a little later.
                if error.status != "FAILED_PRECONDITION" or self.backoff.now() >= until:
                    raise
                left = spoken(until - self.backoff.now())
                self.backoff.say(f"{name.rpartition('/')[2]}: {error}; tried again for {left}")
            self.backoff.pause(PATCH_AGAIN_S)

    def _until_done(self, operation: Json) -> None:
        """Wait for an operation. Raises CloudTpuError if it fails or does not end in time."""
        ended = self.backoff.until_done(
            operation, self._client.operation, lambda current: bool(current.get("done"))
        )
        if ended is not None and "error" in ended:
            raise CloudTpuError(f"{operation['name']}: {ended['error'].get('message', 'it has failed')}")

    def workers(self, spec: SliceSpec, look: Look, *, limit_s: float) -> list[Json]:
        return workers.outputs(self._client, self.backoff, _in_order(spec, look), limit_s)

    def more_outputs(self, spec: SliceSpec, look: Look) -> dict[str, Any]:
        return {"ends_at": tpu_request.ends_at(spec, _in_order(spec, look) if look.kind == "active" else [])}


def _in_order(spec: SliceSpec, look: Look) -> list[Json]:
    return [look.nodes[node_id] for node_id in spec.node_ids if node_id in look.nodes]


def _name(spec: SliceSpec, node: Json) -> str:
    """The full name with the project's id: Google may write its number."""
    return f"{spec.parent}/nodes/{node['name'].rpartition('/')[2]}"
