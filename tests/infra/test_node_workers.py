"""The workers of a node that another provider has made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from infra.cloud_tpu.errors import CloudTpuError
from infra.node_workers import NodeWorkersProvider
from rehearsal.tpu_api import Clock, TpuApi
from tests.infra.cloud_tpu.lab import PARENT, ZONE, Cloud

NODE = f"{PARENT}/nodes/main"
PROPS: dict[str, Any] = {
    "project": "grant",
    "zone": ZONE,
    "node_id": "main",
    "incarnation": "1",
    "wait_s": 60.0,
}


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    """With a node that has no queued resource."""
    clock = Clock(frozen_at=1_800_000_000.0)
    with TpuApi(clock=clock) as api:
        cloud = Cloud(api, clock)
        cloud.put_node("a1b2c3")
        api.control.advance(60)
        yield cloud
        cloud.client.close()


@pytest.fixture
def provider(cloud: Cloud) -> NodeWorkersProvider:
    made = NodeWorkersProvider()
    made._session = cloud.session
    return made


def test_names_addresses_and_keys_are_read(provider: NodeWorkersProvider) -> None:
    made = provider.create(dict(PROPS))
    assert made.id == NODE
    assert made.outs is not None and made.outs["state"] == "READY"
    assert [worker["index"] for worker in made.outs["workers"]] == [0, 1, 2, 3]
    assert all(worker["name"] and worker["host_keys"] for worker in made.outs["workers"])


def test_a_worker_that_does_not_publish_is_waited_for_so_long_and_found_by_a_refresh(
    cloud: Cloud, provider: NodeWorkersProvider
) -> None:
    attributes = cloud.api._server.cloud.node(NODE).attributes
    late = {key: attributes.pop(key) for key in list(attributes) if key[0] == 1}
    before = cloud.clock.now()
    made = provider.create(dict(PROPS))
    assert made.outs is not None and made.outs["workers"][1]["host_keys"] == []
    assert 50 <= cloud.clock.now() - before <= 70
    attributes.update(late)
    read = provider.read(made.id, dict(made.outs))
    assert read.outs is not None and read.outs["workers"][1]["host_keys"]


def test_a_node_that_is_gone_leaves_the_state(cloud: Cloud, provider: NodeWorkersProvider) -> None:
    made = provider.create(dict(PROPS))
    cloud.control.vanish(NODE)
    assert provider.read(made.id, dict(made.outs or {})).id == ""


def test_a_node_that_is_not_there_is_an_error(provider: NodeWorkersProvider) -> None:
    with pytest.raises(CloudTpuError, match="there is no such node"):
        provider.create({**PROPS, "node_id": "other"})


def test_another_node_of_the_same_name_is_read_again(cloud: Cloud, provider: NodeWorkersProvider) -> None:
    made = provider.create(dict(PROPS)).outs or {}
    found = provider.diff(NODE, made, {**PROPS, "incarnation": "2"})
    assert (found.changes, found.replaces) == (True, [])
    cloud.control.vanish(NODE)
    cloud.put_node("a1b2c3")
    cloud.control.advance(60)
    again = provider.update(NODE, made, {**PROPS, "incarnation": "2"}).outs or {}
    assert again["workers"][0]["name"] != made["workers"][0]["name"]


def test_nothing_changes_where_nothing_was_changed(provider: NodeWorkersProvider) -> None:
    assert provider.diff(NODE, {**PROPS, "state": "READY", "workers": []}, dict(PROPS)).changes is False


def test_deleting_it_deletes_nothing(cloud: Cloud, provider: NodeWorkersProvider) -> None:
    made = provider.create(dict(PROPS))
    provider.delete(made.id, made.outs or {})
    assert cloud.alive() == [NODE]
