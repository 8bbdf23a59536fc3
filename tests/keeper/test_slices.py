"""How the slice of a wanted run stands follows from one listing of a project's requests."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import pytest

from infra import naming
from infra.cloud_tpu.client import Listing
from keeper import rules, slices
from keeper.store import Stack, Wanted
from tests.launch.slices import make_inventory

NOW = datetime.datetime(2026, 11, 23, 12, tzinfo=datetime.UTC)
WANTED = Wanted(
    run_id="r",
    stack="dev",
    slice="main",
    runs_url="gs://b/runs",
    project="p",
    origin="queued-resource dev-main",
)
PLACES = {"zones": ["a", "b"], "strategy": "first", "zone_wait_s": 600}
STACK = Stack(project="p", owner="ours", slices={"main": PLACES}, inventory=make_inventory())


def asked(
    state: str, zone: str = "a", *, owner: str = "ours", own_id: str = "dev-main", age_s: int = 0
) -> Any:
    """A queued resource as a listing has it."""
    return {
        "name": f"projects/p/locations/{zone}/queuedResources/{own_id}",
        "state": {"state": state},
        "createTime": (NOW - datetime.timedelta(seconds=age_s)).isoformat(),
        "tpu": {"nodeSpec": [{"node": {"labels": {naming.OWNER_LABEL: owner}}}]},
    }


WAITS = "WAITING_FOR_RESOURCES"


@pytest.mark.parametrize(
    ("places", "found", "stands"),
    [
        (PLACES, [], "absent"),
        (PLACES, [asked("ACTIVE", own_id="dev-other")], "absent"),
        (PLACES, [asked("SUSPENDED")], "lost"),
        (PLACES, [asked("SUSPENDED"), asked("ACTIVE", "b", owner="theirs")], "lost"),
        (PLACES, [asked(WAITS, owner="theirs")], "absent"),
        (PLACES, [asked(WAITS, age_s=599)], "waiting"),
        (PLACES, [asked(WAITS, age_s=600)], "overdue"),
        (PLACES, [asked("PROVISIONING", age_s=6000)], "waiting"),
        (PLACES | {"strategy": "race"}, [asked(WAITS, age_s=600), asked(WAITS, "b", age_s=600)], "waiting"),
        ({}, [asked(WAITS, age_s=6000)], "waiting"),
        (PLACES, [asked("ACTIVE"), asked("PROVISIONING", "b")], "doubled"),
        (PLACES, [asked("ACTIVE"), asked("ACTIVE", "b")], "doubled"),
        (PLACES, [asked("ACTIVE"), asked("DELETING", "b")], "active"),
        (PLACES, [asked("ACTIVE"), asked("ACTIVE", "b", owner="theirs")], "active"),
    ],
)
def test_a_slice_stands_as_the_requests_of_its_own_stack_do_in_all_its_zones(
    places: dict[str, Any], found: list[Any], stands: rules.Slice
) -> None:
    stack = dataclasses.replace(STACK, slices={"main": places})
    assert slices.standing(WANTED, {"p": Listing(found=found)}, lambda: stack, lambda: NOW) == stands
    seen = slices.standing(
        WANTED, {"p": Listing(found=found, unreachable=("b",))}, lambda: stack, lambda: NOW
    )
    assert seen == (stands if stands in ("active", "doubled") else "unread") or "theirs" in str(found)


def test_the_stack_is_not_read_while_there_is_one_request_which_is_active() -> None:
    def refused() -> Any:
        pytest.fail("it was read")

    assert slices.standing(WANTED, {"p": Listing(found=[asked("ACTIVE")])}, refused, refused) == "active"
    assert slices.standing(WANTED, {}, refused, refused) == "unread"
    assert (
        slices.standing(
            dataclasses.replace(WANTED, origin="node x"), {"p": Listing(found=[])}, refused, refused
        )
        == "none"
    )
