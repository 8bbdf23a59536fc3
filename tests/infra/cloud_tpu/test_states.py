"""What the states of a queued resource and of its nodes come to."""

from __future__ import annotations

from typing import Any

import pytest

from infra.cloud_tpu import states


def queued(state: str, **more: Any) -> dict[str, Any]:
    return {"state": {"state": state, **more}}


@pytest.mark.parametrize(
    "state", ["CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "STATE_UNSPECIFIED"]
)
def test_what_has_not_been_served_waits(state: str) -> None:
    assert states.look(queued(state), {}).kind == "waiting"


def test_a_state_that_nobody_knows_yet_waits() -> None:
    assert states.look(queued("BRAND_NEW"), {}).kind == "waiting"
    assert states.look({}, {}).kind == "waiting"


@pytest.mark.parametrize("state", ["SUSPENDING", "SUSPENDED", "FAILED", "DELETING"])
def test_what_is_never_served_again_is_lost(state: str) -> None:
    look = states.look(queued(state), {})
    assert (look.kind, look.state) == ("lost", state)
    assert states.kind_of(state) == "lost"


@pytest.mark.parametrize(
    "state",
    ["READY", "REPAIRING", "RESTARTING", "REIMAGING", "STOPPED", "STARTING", "HIDDEN", "UNKNOWN", "CREATING"],
)
def test_an_active_one_whose_nodes_may_come_back_is_active(state: str) -> None:
    look = states.look(queued("ACTIVE"), {"n": {"state": state}})
    assert (look.kind, look.may_be_running) == ("active", True)


@pytest.mark.parametrize("state", ["PREEMPTED", "TERMINATED", "DELETING"])
def test_an_active_one_with_a_dead_node_is_lost(state: str) -> None:
    look = states.look(queued("ACTIVE"), {"a": {"state": "READY"}, "b": {"state": state}})
    assert (look.kind, look.state, look.why) == ("lost", state, f"node b is {state}")


def test_a_node_that_says_that_it_is_over_counts_more_than_one_that_is_missing() -> None:
    look = states.look(queued("ACTIVE"), {"a": None, "b": {"state": "PREEMPTED"}})
    assert (look.state, look.may_be_running) == ("PREEMPTED", False)


def test_others_may_run_beside_a_missing_node() -> None:
    assert states.look(queued("ACTIVE"), {"a": None, "b": {"state": "READY"}}).may_be_running
    assert not states.look(queued("ACTIVE"), {"a": None}).may_be_running


def test_the_reason_of_a_failure_is_told() -> None:
    look = states.look(queued("FAILED", failedData={"error": {"code": 9, "message": "no such network"}}), {})
    assert look.why == "it is FAILED: no such network"


def test_one_that_a_user_has_suspended_says_so() -> None:
    assert states.look(queued("SUSPENDED", stateInitiator="USER"), {}).why == "it is SUSPENDED by a user"


def test_every_state_of_the_api_is_decided_upon() -> None:
    from rehearsal.tpu_api import discovery

    known = discovery.shipped().schemas["QueuedResourceState"]["properties"]["state"]["enum"]
    assert {"SUSPENDING", "SUSPENDED", "FAILED", "DELETING"} == states.LOST & set(known)
    assert states.ACTIVE in known
