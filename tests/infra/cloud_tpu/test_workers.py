"""The workers of a node as an inventory needs them."""

from __future__ import annotations

from typing import Any

import pytest

from infra.cloud_tpu import workers
from infra.cloud_tpu.errors import CloudTpuError
from tests.infra.cloud_tpu.lab import PARENT, Cloud

NODE = f"{PARENT}/nodes/main"


def published(*items: tuple[str, str, str]) -> dict[str, Any]:
    found = [{"namespace": namespace, "key": key, "value": value} for namespace, key, value in items]
    return {"queryPath": "", "queryValue": {"items": found}}


ENDPOINTS = [
    {"ipAddress": "10.0.0.2"},
    {"ipAddress": "10.0.0.3", "accessConfig": {"externalIp": "198.18.0.3"}},
]


def test_workers_come_in_order_with_addresses_name_and_keys() -> None:
    attributes = [
        published(
            ("instance", "hostname", "t1v-n-0-w-0"),
            ("hostkeys", "ssh-rsa", "BBBB"),
            ("hostkeys", "ssh-ed25519", "AAAA\n"),
            ("other", "ssh-ed25519", "CCCC"),
        ),
        published(("instance", "hostname", "t1v-n-0-w-1")),
    ]
    assert workers.described({"networkEndpoints": ENDPOINTS}, attributes) == [
        {
            "index": 0,
            "name": "t1v-n-0-w-0",
            "internal_address": "10.0.0.2",
            "external_address": "",
            "host_keys": ["ssh-ed25519 AAAA", "ssh-rsa BBBB"],
        },
        {
            "index": 1,
            "name": "t1v-n-0-w-1",
            "internal_address": "10.0.0.3",
            "external_address": "198.18.0.3",
            "host_keys": [],
        },
    ]


def test_workers_that_have_published_nothing_are_there_all_the_same() -> None:
    found = workers.described({"networkEndpoints": ENDPOINTS}, [])
    assert [(worker["index"], worker["name"], worker["host_keys"]) for worker in found] == [
        (0, "", []),
        (1, "", []),
    ]
    assert not workers.are_complete(found)
    assert not workers.are_complete([])


def unpublish(cloud: Cloud, worker: int) -> dict[tuple[int, str, str], str]:
    """As before its guest agent has run; what it would publish."""
    attributes = cloud.api._server.cloud.node(NODE).attributes
    return {key: attributes.pop(key) for key in list(attributes) if key[0] == worker}


def test_a_worker_that_publishes_late_is_waited_for(cloud: Cloud) -> None:
    outputs = cloud.create()
    late = unpublish(cloud, 2)
    cloud.at_sleep(3, lambda: cloud.api._server.cloud.node(NODE).attributes.update(late))
    again = cloud.update(outputs)
    assert again["nodes"] == outputs["nodes"]
    assert "has published no name" not in cloud.said


def test_a_worker_that_does_not_publish_is_a_warning_and_a_refresh_finds_it_later(cloud: Cloud) -> None:
    outputs = cloud.create()
    late = unpublish(cloud, 2)
    without = cloud.update(outputs)
    assert [bool(worker["host_keys"]) for worker in without["nodes"][0]["workers"]] == [
        True,
        True,
        False,
        True,
    ]
    assert "warning: main: worker 2 has published no name or host key yet" in cloud.said
    cloud.api._server.cloud.node(NODE).attributes.update(late)
    read = cloud.read(without)
    assert read is not None and read["nodes"] == outputs["nodes"]


def test_guest_attributes_that_cannot_be_read_do_not_fail_a_refresh(cloud: Cloud) -> None:
    outputs = cloud.create()
    cloud.control.inject("unavailable", "nodes.getGuestAttributes", 1000)
    read = cloud.read(outputs)
    assert read is not None and read["state"] == "ACTIVE"


def test_guest_attributes_that_are_refused_are_not_waited_for(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five minutes of silence would teach nobody anything; the refusal does."""
    outputs = cloud.create()

    def refused(name: str) -> list[Any]:
        raise CloudTpuError(f"{name}: may not be read", "PERMISSION_DENIED")

    monkeypatch.setattr(cloud.client, "guest_attributes", refused)
    since = cloud.clock.now()
    again = cloud.update(outputs)
    assert again["state"] == "ACTIVE"
    assert "may not be read" in cloud.said
    assert cloud.clock.now() - since < 60
