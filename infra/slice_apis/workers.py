"""The workers of a node, in worker order, as an inventory needs them: addresses, instance name, host keys.

A worker's guest agent publishes its instance name (key `hostname`) and its SSH host keys (namespace `hostkeys`) as
guest attributes, some time after the node is READY.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from contracts.aliases import Json
from contracts.inventory import Host
from infra.slice_apis.retry import AbandonedError, Backoff, CloudTpuError

HOST_KEYS, OWN = "hostkeys", "tpu-stack"
"""Namespaces of guest attributes; in our own a machine of Compute Engine publishes its worker index."""
WORKER_INDEX = "worker-id"
LOOK_AGAIN_S = 5.0
# Not published yet, or no answer just now; after any other refusal there is nothing to wait for.
MAY_COME = ("NOT_FOUND", "UNAVAILABLE", "RESOURCE_EXHAUSTED")


class Attributes(Protocol):
    """Where guest attributes are read."""

    def guest_attributes(self, name: str) -> list[Json]:
        """Those of each worker of a node, in the order of its endpoints. Raises CloudTpuError."""
        ...


def described(node: Json, attributes: Sequence[Json]) -> list[Json]:
    """Describe each worker: index, name, internal_address, external_address ("": none), host_keys ("TYPE KEY"). Pure.

    attributes: of each worker, in the order of the endpoints; short where not all have published. That is the worker
    order, unless each worker has published its index.
    """
    workers, published = [], []
    for index, endpoint in enumerate(node.get("networkEndpoints", [])):
        items = attributes[index].get("queryValue", {}).get("items", []) if index < len(attributes) else []
        names = [item["value"] for item in items if item.get("key") == "hostname" and item.get("value")]
        published += [
            int(item["value"])
            for item in items
            if (item.get("namespace"), item.get("key")) == (OWN, WORKER_INDEX) and item["value"].isdecimal()
        ]
        keys = {
            item["key"]: item["value"]
            for item in items
            if item.get("namespace") == HOST_KEYS and item.get("value")
        }
        workers.append(
            {
                "index": index,
                "name": str(names[0]).strip() if names else "",
                "internal_address": endpoint.get("ipAddress", ""),
                "external_address": endpoint.get("accessConfig", {}).get("externalIp", ""),
                "host_keys": [f"{kind} {keys[kind].strip()}" for kind in sorted(keys)],
            }
        )
    if sorted(published) != list(range(len(workers))):
        return workers
    in_order = sorted(zip(published, workers, strict=True), key=lambda pair: pair[0])
    return [{**worker, "index": index} for index, worker in in_order]


def are_complete(workers: Sequence[Json]) -> bool:
    """Whether every worker is there with its name and a host key."""
    return bool(workers) and all(worker["name"] and worker["host_keys"] for worker in workers)


def read(client: Attributes, node: Json) -> list[Json]:
    """The current workers. Guest attributes that cannot be read count as not published yet."""
    return _read(client, node)[0]


def _read(client: Attributes, node: Json) -> tuple[list[Json], CloudTpuError | None]:
    """The workers, and why their guest attributes could not be read, or None."""
    try:
        return described(node, client.guest_attributes(node["name"])), None
    except AbandonedError:
        raise
    except CloudTpuError as error:
        return described(node, []), error


def awaited(client: Attributes, backoff: Backoff, nodes: Sequence[Json], limit_s: float) -> list[list[Json]]:
    """The workers of each node, once all have published, or as they are after `limit_s`, with a line that says so."""
    until = backoff.now() + limit_s
    first = [_read(client, node) for node in nodes]
    worker_lists = [workers for workers, _ in first]
    if refused := [error for _, error in first if error and error.status not in MAY_COME]:
        backoff.say(f"warning: {refused[0]}")
        until = backoff.now()
    while (
        not all(are_complete(workers) for workers in worker_lists) and backoff.now() + LOOK_AGAIN_S <= until
    ):
        backoff.pause(LOOK_AGAIN_S)
        worker_lists = [
            workers if are_complete(workers) else read(client, node)
            for node, workers in zip(nodes, worker_lists, strict=True)
        ]
    for node, workers in zip(nodes, worker_lists, strict=True):
        if not are_complete(workers):
            late = [
                str(worker["index"]) for worker in workers if not (worker["name"] and worker["host_keys"])
            ]
            backoff.say(
                f"warning: {node['name'].rpartition('/')[2]}: worker {', '.join(late) or 'list'} has published no name"
                " or host key yet; it cannot be reached until `pulumi up --refresh` has found them (under the"
                " organisation policy compute.disableGuestAttributesAccess it never publishes them: `fab trust`)"
            )
    return worker_lists


def outputs(client: Attributes, backoff: Backoff, nodes: Sequence[Json], limit_s: float) -> list[Json]:
    """The nodes with their workers, which are waited for as by `awaited`; 0.0: as they are now."""
    worker_lists = (
        awaited(client, backoff, nodes, limit_s) if limit_s else [read(client, node) for node in nodes]
    )
    return [output(node, workers) for node, workers in zip(nodes, worker_lists, strict=True)]


def output(node: Json, workers: list[Json]) -> Json:
    """A node as a resource's output has it."""
    return {
        "id": node["name"].rpartition("/")[2],
        "name": node["name"],
        "state": node.get("state", ""),
        "workers": workers,
    }


def inventory_hosts(nodes: Sequence[Mapping[str, Any]]) -> tuple[Host, ...]:
    """The hosts of a slice as the inventory has them, numbered through all its nodes. nodes: as `output` makes them."""
    workers = [worker for node in nodes for worker in node["workers"]]
    return tuple(
        Host(
            index=index,
            name=worker["name"],
            internal_address=worker["internal_address"],
            external_address=worker["external_address"] or None,
            user=None,
            host_keys=tuple(worker["host_keys"]),
            reach="iap",
        )
        for index, worker in enumerate(workers)
    )
