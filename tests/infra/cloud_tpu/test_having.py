"""A queued resource that is there: changed in place, looked at, lost and made again, deleted."""

from __future__ import annotations

from typing import Any

import pytest

from infra.cloud_tpu.errors import CloudTpuError
from tests.infra.cloud_tpu.conftest import CloudFactory
from tests.infra.cloud_tpu.engine import Stack
from tests.infra.cloud_tpu.lab import PARENT, POOL

QR = f"{PARENT}/queuedResources/main"
NODE = f"{PARENT}/nodes/main"


# --- update ---


def test_an_up_without_changes_does_nothing(stack: Stack) -> None:
    stack.up()
    before = stack.state
    stack.cloud.control.inject("unavailable", times=1)
    stack.up()
    assert stack.state == before
    assert len(stack.cloud.control.alive()["faults"]) == 1  # no request was sent


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"labels": {"team": "nlp"}}, "labels", {"team": "nlp", "tpu-stack-owner": "a1b2c3"}),
        ({"metadata": {"startup-script": "true"}}, "metadata", {"startup-script": "true"}),
        ({"tags": ["tpu-stack-tpu"]}, "tags", ["tpu-stack-tpu"]),
        ({"description": "of ada"}, "description", "of ada"),
    ],
)
def test_a_change_in_place_reaches_every_node(stack: Stack, change: Any, field: str, value: Any) -> None:
    stack.up(node_count=2)
    stack.up(node_count=2, **change)
    for node_id in ("main-0", "main-1"):
        node = stack.cloud.node(node_id)
        assert node is not None and node[field] == value
    assert stack.cloud.history().count("ACCEPTED") == 1


def test_external_addresses_come_and_go_in_place(stack: Stack) -> None:
    def external() -> list[str]:
        assert stack.state is not None
        return [worker["external_address"] for worker in stack.state["nodes"][0]["workers"]]

    stack.up()
    stack.up(external_addresses=True)
    assert all(external())
    stack.up()
    assert external() == [""] * 4
    assert stack.cloud.history().count("ACCEPTED") == 1


def test_labels_that_are_not_wanted_any_more_go_and_those_of_others_stay(stack: Stack) -> None:
    stack.up(labels={"team": "nlp"})
    node = stack.cloud.node()
    assert node is not None
    stack.cloud.client.patch_node(NODE, "labels", {"labels": node["labels"] | {"goog-x": "1"}})
    stack.cloud.control.advance(10)
    stack.up(labels={"area": "b"})
    after = stack.cloud.node()
    assert after is not None
    assert after["labels"] == {"area": "b", "goog-x": "1", "tpu-stack-owner": "a1b2c3"}


def test_labels_that_change_while_it_waits_are_on_the_nodes_in_the_end(new_cloud: CloudFactory) -> None:
    cloud = new_cloud(capacity={POOL: 0})
    stack = Stack(cloud=cloud)
    stack.up(wait_s=60, labels={"team": "nlp"})
    stack.up(wait_s=60, labels={"area": "b"})
    cloud.control.set_capacity(POOL, 16)
    stack.up(wait_s=60, labels={"area": "b"})
    node = cloud.node()
    assert node is not None and node["labels"] == {"area": "b", "tpu-stack-owner": "a1b2c3"}
    assert cloud.history().count("ACCEPTED") == 1


def test_a_node_under_maintenance_is_changed_when_it_is_back(stack: Stack) -> None:
    stack.up()
    stack.cloud.control.maintain(NODE, 120)
    stack.up(labels={"team": "nlp"})
    node = stack.cloud.node()
    assert node is not None and node["labels"]["team"] == "nlp"


def test_another_type_replaces_and_the_old_one_is_gone_first(new_cloud: CloudFactory) -> None:
    cloud = new_cloud(capacity={POOL: 16})
    stack = Stack(cloud=cloud)
    stack.up()
    stack.up(accelerator_type="v5litepod-8")
    assert cloud.history() == [
        *("ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE", "DELETING", "gone"),
        *("ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"),
    ]


def test_an_update_of_one_that_was_suspended_meanwhile_makes_it_again(stack: Stack) -> None:
    stack.up()
    stack.cloud.control.preempt(QR)
    stack.cloud.control.advance(60)
    stack.up(labels={"team": "nlp"})
    assert stack.state is not None and stack.state["state"] == "ACTIVE"
    assert stack.cloud.history().count("ACTIVE") == 2


def test_an_update_does_not_delete_nodes_that_run_beside_a_missing_one(stack: Stack) -> None:
    stack.up(node_count=2)
    stack.cloud.control.vanish(f"{PARENT}/nodes/main-1")
    with pytest.raises(
        CloudTpuError, match=r"node main-1 is gone, and its other nodes run[\s\S]*pulumi up --refresh"
    ):
        stack.up(node_count=2, labels={"team": "nlp"})
    assert stack.cloud.alive() == [f"{PARENT}/nodes/main-0", QR]


# --- read ---


def test_a_refresh_of_one_that_is_all_right_changes_nothing(stack: Stack) -> None:
    stack.up()
    before = stack.state
    stack.refresh()
    assert stack.state == before


@pytest.mark.parametrize("leave_nodes", [False, True])
def test_a_preempted_one_is_made_again_after_a_refresh(stack: Stack, leave_nodes: bool) -> None:
    stack.up(labels={"team": "nlp"})
    stack.cloud.control.preempt(QR, leave_nodes)
    stack.cloud.control.advance(60)
    stack.refresh()
    assert stack.state is not None
    assert (stack.state["state"], stack.state["nodes"]) == ("SUSPENDED", [])
    stack.up(labels={"team": "nlp"})
    assert stack.state["state"] == "ACTIVE"
    assert stack.cloud.history().count("ACTIVE") == 2


def test_a_lost_one_that_was_refreshed_is_removed_by_destroy(stack: Stack) -> None:
    stack.up()
    stack.cloud.control.preempt(QR, True)
    stack.cloud.control.advance(60)
    stack.refresh()
    stack.destroy()
    assert stack.cloud.alive() == []


def test_one_that_vanished_leaves_the_state_and_is_made_again(stack: Stack) -> None:
    stack.up()
    stack.cloud.control.vanish(QR)
    stack.refresh()
    assert stack.state is None
    stack.up()
    assert stack.cloud.state() == "ACTIVE"


def test_one_whose_name_someone_else_has_taken_leaves_the_state(stack: Stack) -> None:
    stack.up()
    stack.cloud.control.vanish(QR)
    stack.cloud.put(owner="someone-else")
    stack.refresh()
    assert stack.state is None


def test_maintenance_is_no_loss(stack: Stack) -> None:
    stack.up()
    stack.cloud.control.maintain(NODE, 3600)
    stack.refresh()
    assert stack.state is not None
    assert (stack.state["state"], stack.state["nodes"][0]["state"]) == ("ACTIVE", "REPAIRING")


def test_a_missing_node_is_a_loss_only_if_it_stays_away(stack: Stack) -> None:
    stack.up(node_count=2)
    stack.cloud.control.vanish(f"{PARENT}/nodes/main-0")
    before = stack.cloud.clock.now()
    stack.refresh()
    assert stack.state is not None and stack.state["state"] == "MISSING"
    assert stack.cloud.clock.now() - before >= 60
    stack.up(node_count=2)
    assert [node["id"] for node in stack.state["nodes"]] == ["main-0", "main-1"]


@pytest.mark.parametrize("kind", ["unavailable", "cut-before", "too-many-requests"])
@pytest.mark.parametrize("method", ["queuedResources.get", "nodes.get"])
def test_a_refresh_that_gets_no_answer_is_an_error_and_no_loss(stack: Stack, kind: str, method: str) -> None:
    stack.up()
    before = stack.state
    stack.cloud.control.inject(kind, method, times=1000)  # type: ignore[arg-type]
    with pytest.raises(CloudTpuError, match="tried"):
        stack.refresh()
    assert stack.state == before


def test_a_refresh_finds_that_one_which_waited_is_active(new_cloud: CloudFactory) -> None:
    cloud = new_cloud(capacity={POOL: 0})
    stack = Stack(cloud=cloud)
    stack.up(wait_s=60)
    cloud.control.set_capacity(POOL, 16)
    cloud.control.advance(60)
    stack.refresh()
    assert stack.state is not None
    assert (stack.state["state"], len(stack.state["nodes"])) == ("ACTIVE", 1)
    stack.up(wait_s=60)
    assert cloud.history().count("ACCEPTED") == 1


def test_a_refresh_deletes_nothing(stack: Stack) -> None:
    stack.up()
    stack.cloud.control.preempt(QR, True)
    stack.cloud.control.advance(60)
    stack.refresh()
    assert stack.cloud.alive() == [NODE, QR]


# --- delete ---


def test_it_is_deleted_with_its_nodes_and_gone_when_that_is_said(stack: Stack) -> None:
    stack.up(node_count=2)
    stack.destroy()
    assert stack.cloud.alive() == []


def test_one_that_is_gone_already_is_deleted_at_once(stack: Stack) -> None:
    stack.up()
    stack.cloud.control.vanish(QR)
    before = stack.cloud.clock.now()
    stack.destroy()
    assert stack.cloud.clock.now() == before


def test_one_that_someone_is_deleting_is_waited_for(stack: Stack) -> None:
    stack.up()
    stack.cloud.client.delete_queued_resource(QR)
    stack.destroy()
    assert stack.cloud.alive() == []


def test_what_someone_else_has_made_under_the_name_is_left_alone(stack: Stack) -> None:
    stack.up()
    stack.cloud.control.vanish(QR)
    stack.cloud.put(owner="someone-else")
    stack.cloud.control.advance(60)
    stack.destroy()
    assert stack.cloud.state() == "ACTIVE"
    assert "is not of this stack any more; it is left alone" in stack.cloud.said


@pytest.mark.parametrize("kind", ["cut-before", "cut-after", "unavailable", "too-many-requests"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_deletion_that_goes_wrong_for_a_while_is_done_in_the_end(
    stack: Stack, kind: str, times: int
) -> None:
    stack.up()
    stack.cloud.control.inject(kind, "queuedResources.delete", times)  # type: ignore[arg-type]
    stack.destroy()
    assert stack.cloud.alive() == []


def test_a_deletion_that_does_not_end_is_an_error_and_stays_in_the_state(new_cloud: CloudFactory) -> None:
    from rehearsal.tpu_api import Delays

    stack = Stack(cloud=new_cloud(delays=Delays(delete_s=100_000)))
    stack.up()
    with pytest.raises(CloudTpuError, match=r"it is still DELETING after 30 min"):
        stack.destroy()
    assert stack.state is not None


def test_what_someone_else_makes_under_the_name_while_ours_is_being_deleted_is_left_alone(
    stack: Stack,
) -> None:
    def taken() -> None:
        stack.cloud.control.vanish(QR)
        stack.cloud.put(owner="someone-else")

    stack.up()
    stack.cloud.at_sleep(1, taken)
    stack.destroy()
    stack.cloud.control.advance(60)
    assert stack.cloud.state() == "ACTIVE"


def test_a_node_that_is_left_of_ours_is_deleted_with_it(stack: Stack) -> None:
    stack.up()
    name = stack.cloud.api._server.cloud.node(NODE).queued_resource
    stack.cloud.api._server.cloud.queued_resources.pop(name)  # type: ignore[arg-type]
    stack.destroy()
    assert stack.cloud.alive() == []
