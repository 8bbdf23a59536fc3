"""The workers of a TPU node that gcp.tpu.V2Vm has made: instance names and SSH host keys, which that does not give."""

from __future__ import annotations

import dataclasses
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, DiffResult, ReadResult, Resource, UpdateResult

from contracts.aliases import Json
from infra.slice_apis import plugin, workers
from infra.slice_apis.plugin import Provider
from infra.slice_apis.retry import CloudTpuError

INPUTS = ("project", "zone", "node_id", "incarnation", "wait_s")
OUTPUTS = ("state", "workers")
WAIT_S = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeWorkersArgs:
    """incarnation: something that is another when the node is another one, such as its addresses.

    wait_s: for how long to wait until all workers have published; without some, a refresh finds them later.
    """

    project: pulumi.Input[str]
    zone: pulumi.Input[str]
    node_id: pulumi.Input[str]
    incarnation: pulumi.Input[str]
    wait_s: pulumi.Input[int] = WAIT_S


class NodeWorkersProvider(Provider):
    """Only reads. Deleting it deletes nothing."""

    def create(self, props: Json) -> CreateResult:
        with plugin.plain_errors():
            return CreateResult(_node_name(props), self._awaited(props))

    def update(self, _id: str, _olds: Json, _news: Json) -> UpdateResult:
        with plugin.plain_errors():
            return UpdateResult(self._awaited(_news))

    def read(self, id_: str, props: Json) -> ReadResult:
        with plugin.plain_errors():
            client = self.require_session().client()
            node = client.node(_node_name(props))
            if node is None:
                return ReadResult("", {})
            return ReadResult(id_, {**props, **_outputs(node, workers.read(client, node))})

    def diff(self, _id: str, _olds: Json, _news: Json) -> DiffResult:
        changed = [name for name in INPUTS if _olds.get(name) != _news.get(name)]
        return DiffResult(
            changes=bool(changed),
            replaces=[name for name in changed if name in ("project", "zone", "node_id")],
        )

    def _awaited(self, props: Json) -> Json:
        session = self.require_session()
        client = session.client()
        node = client.node(_node_name(props))
        if node is None:
            raise CloudTpuError(
                f"{_node_name(props)}: there is no such node; `pulumi up --refresh` makes it again"
            )
        (node_workers,) = workers.awaited(client, session.backoff, [node], float(props.get("wait_s", WAIT_S)))
        return {**props, **_outputs(node, node_workers)}


class NodeWorkers(Resource, module="tpu_stack", name="NodeWorkers"):
    """workers: [{index, name, internal_address, external_address, host_keys}], see `infra.slice_apis.workers`."""

    state: pulumi.Output[str]
    workers: pulumi.Output[list[dict[str, Any]]]

    def __init__(self, name: str, args: NodeWorkersArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        inputs = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
        super().__init__(NodeWorkersProvider(), name, inputs | dict.fromkeys(OUTPUTS), opts)


def _node_name(props: Json) -> str:
    return f"projects/{props['project']}/locations/{props['zone']}/nodes/{props['node_id']}"


def _outputs(node: Json, node_workers: list[Json]) -> Json:
    return {"state": node.get("state", ""), "workers": node_workers}
