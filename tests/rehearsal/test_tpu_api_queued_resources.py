"""Queued resources of the simulator: the way through the queue, and every way out of it."""

from typing import Any

import pytest

from rehearsal.clock import timestamp

SPOT = "us-central1-a:v5litepod:spot"


def states(lab: Any, own_id: str) -> list[str]:
    return [line.state for line in lab.control.journal() if line.name.endswith(f"queuedResources/{own_id}")]


def test_a_request_goes_from_accepted_through_the_queue_to_active(new_lab: Any) -> None:
    lab = new_lab(capacity={SPOT: 0})
    operation = lab.enqueue("q")
    assert lab.queue_state("q") == "ACCEPTED"
    lab.control.advance(2)
    assert lab.queue_state("q") == "WAITING_FOR_RESOURCES"
    # The operation ends long before the queue is served, and gives back what was asked for.
    done = lab.operation(operation)
    assert done["done"] is True
    assert done["response"]["spot"] == {}
    assert done["response"]["tpu"]["nodeSpec"][0]["nodeId"] == "q-node"
    lab.control.set_capacity(SPOT, 16)
    assert lab.queue_state("q") == "PROVISIONING"
    assert lab.node_state("q-node") == "CREATING"
    lab.control.advance(5)
    assert lab.queue_state("q") == "ACTIVE"
    assert lab.node_state("q-node") == "READY"
    assert lab.node("q-node")["queuedResource"] == f"{lab.zone}/queuedResources/q"
    assert lab.node("q-node")["schedulingConfig"] == {"spot": True}


def test_a_request_that_does_not_fit_waits_and_lets_a_smaller_one_pass(new_lab: Any) -> None:
    lab = new_lab(capacity={SPOT: 16})
    lab.enqueue("large", lab.wanted("large-node", "v5litepod-32"))
    lab.enqueue("small")
    lab.control.advance(3600)
    assert (lab.queue_state("large"), lab.queue_state("small")) == ("WAITING_FOR_RESOURCES", "ACTIVE")


def test_of_two_that_fit_the_older_is_served(new_lab: Any) -> None:
    lab = new_lab(capacity={SPOT: 0})
    for own_id in ("second-by-name", "first-by-name"):
        lab.enqueue(own_id)
    lab.control.advance(2)
    lab.control.set_capacity(SPOT, 16)
    lab.control.advance(60)
    assert lab.queue_state("second-by-name") == "ACTIVE"
    assert lab.queue_state("first-by-name") == "WAITING_FOR_RESOURCES"


def test_chips_of_one_tier_do_not_serve_another(new_lab: Any) -> None:
    lab = new_lab(capacity={SPOT: 64, "us-central1-a:v5litepod:reserved": 64}, other_chips=0)
    on_demand = {"tpu": lab.wanted("d-node")["tpu"]}
    reserved = {**lab.wanted("r-node"), "reservationName": f"{lab.zone}/reservations/mine", "guaranteed": {}}
    del reserved["spot"]
    for own_id, body in {"s": None, "d": on_demand, "r": reserved}.items():
        lab.enqueue(own_id, body)
    lab.control.advance(60)
    assert [lab.queue_state(own_id) for own_id in "sdr"] == ["ACTIVE", "WAITING_FOR_RESOURCES", "ACTIVE"]


@pytest.mark.parametrize(
    "policy",
    [
        {"validUntilDuration": "3600s"},
        {"validUntilTime": timestamp(1_800_003_600.0)},
        {"validInterval": {"endTime": timestamp(1_800_003_600.0)}},
    ],
    ids=["duration", "time", "interval"],
)
def test_a_request_that_still_waits_when_its_time_is_over_fails_for_good(
    new_lab: Any, policy: dict[str, Any]
) -> None:
    lab = new_lab(capacity={SPOT: 0})
    lab.enqueue("q", lab.wanted("n", queueingPolicy=policy))
    lab.control.advance(3599)
    assert lab.queue_state("q") == "WAITING_FOR_RESOURCES"
    lab.control.advance(1)
    state = lab.queued("q")["state"]
    assert state["state"] == "FAILED"
    assert state["stateInitiator"] == "SERVICE"
    assert "valid-until" in state["failedData"]["error"]["message"]
    lab.control.set_capacity(SPOT, 16)
    lab.control.advance(3600)
    assert lab.queue_state("q") == "FAILED"


def test_a_request_that_was_served_in_time_outlives_its_valid_until(lab: Any) -> None:
    lab.active("q", lab.wanted("n", queueingPolicy={"validUntilDuration": "30s"}))
    assert lab.queue_state("q") == "ACTIVE"


def test_a_request_is_not_served_before_its_time(lab: Any) -> None:
    lab.enqueue("q", lab.wanted("n", queueingPolicy={"validAfterDuration": "100s"}))
    lab.control.advance(99)
    assert lab.queue_state("q") == "WAITING_FOR_RESOURCES"
    lab.control.advance(1)
    assert lab.queue_state("q") == "PROVISIONING"


def test_an_active_one_is_not_deleted_without_force(lab: Any) -> None:
    lab.active("q")
    error = lab.refused(lambda: lab.delete_queued("q"))
    assert (error["code"], error["status"]) == (400, "FAILED_PRECONDITION")
    assert lab.queue_state("q") == "ACTIVE"


def test_force_deletes_its_nodes_with_it(lab: Any) -> None:
    lab.active("q")
    operation = lab.delete_queued("q", force=True)
    assert (lab.queue_state("q"), lab.node_state("q-node")) == ("DELETING", "DELETING")
    lab.control.advance(2)
    assert lab.refused(lambda: lab.queued("q"))["code"] == 404
    assert lab.refused(lambda: lab.node("q-node"))["code"] == 404
    assert lab.operation(operation)["response"] == {"@type": "type.googleapis.com/google.protobuf.Empty"}


@pytest.mark.parametrize("state", ["ACCEPTED", "WAITING_FOR_RESOURCES", "FAILED", "SUSPENDED"])
def test_one_without_nodes_is_deleted_without_force(new_lab: Any, state: str) -> None:
    lab = new_lab(capacity={SPOT: 16 if state == "SUSPENDED" else 0})
    lab.enqueue("q", lab.wanted("n", queueingPolicy={"validUntilDuration": "100s"}))
    if state != "ACCEPTED":
        lab.control.advance(100 if state == "FAILED" else 10)
    if state == "SUSPENDED":
        lab.control.preempt("q")
        lab.control.advance(10)
    assert lab.queue_state("q") == state
    lab.delete_queued("q")
    lab.control.advance(2)
    assert lab.refused(lambda: lab.queued("q"))["status"] == "NOT_FOUND"
    lab.control.advance(3600)  # its own events that are still to come find nothing to do
    assert lab.control.alive()["queuedResources"] == []


def test_a_preempted_one_is_suspended_and_never_queued_again(lab: Any) -> None:
    lab.active("q")
    lab.control.preempt("q")
    assert (lab.queue_state("q"), lab.node_state("q-node")) == ("SUSPENDING", "PREEMPTED")
    lab.control.advance(1e6)
    assert lab.queued("q")["state"] == {
        "state": "SUSPENDED", "stateInitiator": "SERVICE", "suspendedData": {},
    }  # fmt: skip
    assert lab.refused(lambda: lab.node("q-node"))["code"] == 404
    assert states(lab, "q")[-3:] == ["ACTIVE", "SUSPENDING", "SUSPENDED"]


def test_preempted_nodes_that_are_left_keep_a_suspended_one_from_being_deleted_without_force(
    lab: Any,
) -> None:
    lab.active("q")
    lab.control.preempt("q", leave_nodes=True)
    lab.control.advance(60)
    assert (lab.queue_state("q"), lab.node_state("q-node")) == ("SUSPENDED", "PREEMPTED")
    assert lab.refused(lambda: lab.delete_queued("q"))["status"] == "FAILED_PRECONDITION"
    lab.delete_queued("q", force=True)
    lab.control.advance(60)
    assert lab.control.alive()["nodes"] == []


def test_a_preempted_ones_chips_serve_the_next_in_the_queue(new_lab: Any) -> None:
    lab = new_lab(capacity={SPOT: 16})
    lab.active("first")
    lab.enqueue("second")
    lab.control.advance(60)
    assert lab.queue_state("second") == "WAITING_FOR_RESOURCES"
    lab.control.preempt("first")
    lab.control.advance(60)
    assert lab.queue_state("second") == "ACTIVE"


def test_one_that_is_preempted_while_it_is_provisioned_is_suspended(lab: Any) -> None:
    lab.enqueue("q")
    lab.control.advance(2)
    assert lab.queue_state("q") == "PROVISIONING"
    lab.control.preempt("q")
    lab.control.advance(60)
    assert lab.queue_state("q") == "SUSPENDED"


def test_one_whose_node_is_deleted_is_suspended_by_the_user(lab: Any) -> None:
    lab.active("q")
    lab.delete_node("q-node")
    lab.control.advance(60)
    assert lab.queued("q")["state"]["state"] == "SUSPENDED"
    assert lab.queued("q")["state"]["stateInitiator"] == "USER"


def test_a_multislice_request_makes_all_its_nodes_or_none(new_lab: Any) -> None:
    lab = new_lab(capacity={SPOT: 47})
    node_spec = {
        "parent": lab.zone, "node": lab.spec(), "multisliceParams": {"nodeCount": 3, "nodeIdPrefix": "np"},
    }  # fmt: skip
    lab.enqueue("q", {"spot": {}, "tpu": {"nodeSpec": [node_spec]}})
    lab.control.advance(60)
    assert lab.control.alive()["nodes"] == []
    lab.control.set_capacity(SPOT, 48)
    lab.control.advance(60)
    nodes = [lab.node(f"np-{number}") for number in range(3)]
    assert {node["state"] for node in nodes} == {"READY"}
    assert all(node["multisliceNode"] for node in nodes)
    lab.control.preempt("np-1")
    assert {lab.node_state(f"np-{number}") for number in range(3)} == {"PREEMPTED"}
    lab.control.advance(60)
    assert lab.queue_state("q") == "SUSPENDED"


def test_a_multislice_request_without_a_prefix_names_its_nodes_after_itself(lab: Any) -> None:
    node_spec = {"parent": lab.zone, "node": lab.spec(), "multisliceParams": {"nodeCount": 2}}
    lab.active("q", {"spot": {}, "tpu": {"nodeSpec": [node_spec]}})
    assert [node["name"].rpartition("/")[2] for node in lab.control.alive()["nodes"]] == ["q-0", "q-1"]


def test_reset_restarts_the_nodes_of_an_active_one_alone(lab: Any) -> None:
    lab.enqueue("q")
    reset = lab.queue.reset(name=f"{lab.zone}/queuedResources/q", body={})
    assert lab.refused(reset)["status"] == "FAILED_PRECONDITION"
    lab.control.advance(60)
    reset.execute()
    assert (lab.queue_state("q"), lab.node_state("q-node")) == ("ACTIVE", "RESTARTING")
    lab.control.advance(5)
    assert lab.node_state("q-node") == "READY"
