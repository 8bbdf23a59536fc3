"""The workers of a node as an inventory needs them, whoever has made the node."""

from typing import Any

import pytest

from infra.node_workers import NodeWorkersProvider
from infra.slice_apis import workers
from infra.slice_apis.retry import CloudTpuError
from rehearsal.simulated_cloud import Node
from tests.infra.cloud_tpu.lab import PARENT, ZONE, Cloud

NODE = f"{PARENT}/nodes/main"


def published(*items: tuple[str, str, str]) -> dict[str, Any]:
    found = [{"namespace": namespace, "key": key, "value": value} for namespace, key, value in items]
    return {"queryPath": "", "queryValue": {"items": found}}


def test_workers_come_in_order_with_addresses_name_and_keys() -> None:
    external = {"ipAddress": "10.0.0.3", "accessConfig": {"externalIp": "198.18.0.3"}}
    node = {"networkEndpoints": [{"ipAddress": "10.0.0.2"}, external]}
    attributes = [
        published(
            ("instance", "hostname", "t1v-n-0-w-0"),
            ("hostkeys", "ssh-rsa", "BBBB"),
            ("hostkeys", "ssh-ed25519", "AAAA\n"),
            ("other", "ssh-ed25519", "CCCC"),
        ),
        published(("instance", "hostname", "t1v-n-0-w-1")),
    ]
    found = workers.described(node, attributes)
    assert [tuple(each.values()) for each in found] == [
        (0, "t1v-n-0-w-0", "10.0.0.2", "", ["ssh-ed25519 AAAA", "ssh-rsa BBBB"]),
        (1, "t1v-n-0-w-1", "10.0.0.3", "198.18.0.3", []),
    ]
    assert list(found[0]) == ["index", "name", "internal_address", "external_address", "host_keys"]
    unpublished = workers.described(node, [])
    assert [(worker["index"], worker["name"]) for worker in unpublished] == [(0, ""), (1, "")]
    assert not workers.are_complete(unpublished) and not workers.are_complete([])


def unpublish(cloud: Cloud, worker: int) -> dict[tuple[int, str, str], str]:
    """As before its guest agent has run; what it would publish."""
    attributes = cloud.api.cloud.find(Node, NODE).attributes
    return {key: attributes.pop(key) for key in list(attributes) if key[0] == worker}


def test_a_worker_that_publishes_late_is_waited_for_and_one_that_does_not_is_found_by_a_refresh(
    cloud: Cloud,
) -> None:
    outputs = cloud.create()
    late = unpublish(cloud, 2)
    cloud.at_sleep(3, lambda: cloud.api.cloud.find(Node, NODE).attributes.update(late))
    assert cloud.update(outputs)["nodes"] == outputs["nodes"]
    assert "has published no name" not in cloud.said
    unpublish(cloud, 2)
    cloud.while_sleeping = lambda: None
    without = cloud.update(outputs)
    has_keys = [bool(worker["host_keys"]) for worker in without["nodes"][0]["workers"]]
    assert has_keys == [True, True, False, True]
    assert "warning: main: worker 2 has published no name or host key yet" in cloud.said
    cloud.api.cloud.find(Node, NODE).attributes.update(late)
    read = cloud.read(without)
    assert read is not None and read["nodes"] == outputs["nodes"]


def test_guest_attributes_that_cannot_be_read_fail_no_refresh_and_when_refused_are_not_waited_for(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five minutes of silence would teach nobody anything; the refusal does."""
    outputs = cloud.create()
    cloud.control.inject("unavailable", "nodes.getGuestAttributes", 1000)
    read = cloud.read(outputs)
    assert read is not None and read["state"] == "ACTIVE"

    def refused(name: str) -> list[Any]:
        raise CloudTpuError(f"{name}: may not be read", "PERMISSION_DENIED")

    monkeypatch.setattr(cloud.client, "guest_attributes", refused)
    since = cloud.clock.now()
    assert cloud.update(outputs)["state"] == "ACTIVE"
    assert "may not be read" in cloud.said
    assert cloud.clock.now() - since < 60


# --- of a node that another provider has made -------------------------------------------------------------------


NODE_PROPS: dict[str, Any] = {
    "project": "grant", "zone": ZONE, "node_id": "main", "incarnation": "1", "wait_s": 60.0
}  # fmt: skip


@pytest.fixture
def with_node(cloud: Cloud) -> Cloud:
    """With a node that has no queued resource."""
    cloud.put_node("a1b2c3")
    cloud.control.advance(60)
    return cloud


@pytest.fixture
def provider(with_node: Cloud) -> NodeWorkersProvider:
    made = NodeWorkersProvider()
    made._session = with_node.session
    return made


def test_a_node_s_workers_are_read_kept_and_dropped_with_it_and_nothing_is_deleted(
    with_node: Cloud, provider: NodeWorkersProvider
) -> None:
    made = provider.create(dict(NODE_PROPS))
    assert made.id == NODE
    assert made.outs is not None and made.outs["state"] == "READY"
    assert [worker["index"] for worker in made.outs["workers"]] == [0, 1, 2, 3]
    assert all(worker["name"] and worker["host_keys"] for worker in made.outs["workers"])
    assert provider.diff(NODE, made.outs, dict(NODE_PROPS)).changes is False
    provider.delete(made.id, made.outs)
    assert with_node.alive() == [NODE]
    with_node.control.vanish(NODE)
    assert provider.read(made.id, dict(made.outs)).id == ""
    with pytest.raises(CloudTpuError, match="there is no such node"):
        provider.create(dict(NODE_PROPS))


def test_a_worker_that_does_not_publish_is_waited_for_so_long_and_found_by_a_refresh(
    with_node: Cloud, provider: NodeWorkersProvider
) -> None:
    late = unpublish(with_node, 1)
    before = with_node.clock.now()
    made = provider.create(dict(NODE_PROPS))
    assert made.outs is not None and made.outs["workers"][1]["host_keys"] == []
    assert 50 <= with_node.clock.now() - before <= 70
    with_node.api.cloud.find(Node, NODE).attributes.update(late)
    read = provider.read(made.id, dict(made.outs))
    assert read.outs is not None and read.outs["workers"][1]["host_keys"]


def test_another_node_of_the_same_name_is_read_again(with_node: Cloud, provider: NodeWorkersProvider) -> None:
    made = provider.create(dict(NODE_PROPS)).outs or {}
    found = provider.diff(NODE, made, {**NODE_PROPS, "incarnation": "2"})
    assert (found.changes, found.replaces) == (True, [])
    with_node.control.vanish(NODE)
    with_node.put_node("a1b2c3")
    with_node.control.advance(60)
    again = provider.update(NODE, made, {**NODE_PROPS, "incarnation": "2"}).outs or {}
    assert again["workers"][0]["name"] != made["workers"][0]["name"]
