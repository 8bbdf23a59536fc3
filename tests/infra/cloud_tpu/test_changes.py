"""From what Pulumi remembers to what is configured now: nothing, in place, or another one instead."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from pulumi.output import Unknown

from infra.cloud_tpu import changes
from infra.queued_resource import QueuedResourceArgs
from tests.infra.cloud_tpu.lab import wanted_props

UNKNOWN = Unknown()  # type: ignore[no-untyped-call]
ACTIVE = {"state": "ACTIVE", "nodes": [], "create_time": "t"}
OTHER: dict[str, Any] = {
    "node_count": 2.0,
    "guaranteed_s": 60.0,
    "data_disks": [{"source_disk": "d", "mode": "read-only"}],
}


def between(state: str, **more: Any) -> changes.Changes:
    return changes.between({**wanted_props(), **ACTIVE, "state": state}, wanted_props(**more))


def test_every_property_is_either_changed_in_place_or_replaces() -> None:
    names = {field.name for field in dataclasses.fields(QueuedResourceArgs)}
    assert names == {*changes.REPLACING, *changes.IN_PLACE, changes.TIMING}
    assert not changes.IN_PLACE & {*changes.REPLACING}


def test_the_same_is_no_change() -> None:
    assert between("ACTIVE") == changes.Changes(any=False, replaces=())


def test_absent_empty_and_default_are_the_same() -> None:
    assert not between(
        "ACTIVE", labels={}, tags=[], description="", external_addresses=False, node_count=1
    ).any


@pytest.mark.parametrize("name", changes.REPLACING)
def test_what_cannot_change_in_place_replaces(name: str) -> None:
    found = between("ACTIVE", **{name: OTHER.get(name, "another")})
    assert found == changes.Changes(any=True, replaces=(name,))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("labels", {"a": "b"}),
        ("metadata", {"a": "b"}),
        ("tags", ["a"]),
        ("description", "a"),
        ("external_addresses", True),
        ("wait_s", 7200.0),
    ],
)
def test_what_can_change_in_place_does(name: str, value: Any) -> None:
    assert between("ACTIVE", **{name: value}) == changes.Changes(any=True, replaces=())


@pytest.mark.parametrize("state", ["ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "UNREAD"])
def test_one_that_waits_is_waited_for_by_an_update(state: str) -> None:
    assert between(state) == changes.Changes(any=True, replaces=())


@pytest.mark.parametrize(
    "state", ["SUSPENDING", "SUSPENDED", "FAILED", "DELETING", "PREEMPTED", "TERMINATED", "MISSING"]
)
def test_one_that_is_lost_is_replaced(state: str) -> None:
    assert between(state) == changes.Changes(any=True, replaces=("state",))


def test_a_deadline_matters_only_to_what_still_waits() -> None:
    assert between("ACTIVE", valid_until_s=60.0) == changes.Changes(any=True, replaces=())
    assert between("WAITING_FOR_RESOURCES", valid_until_s=60.0).replaces == ("valid_until_s",)


def test_what_is_not_known_yet_may_be_another() -> None:
    assert between("ACTIVE", network=UNKNOWN).replaces == ("network",)
    assert between("ACTIVE", labels={"a": UNKNOWN}) == changes.Changes(any=True, replaces=())
