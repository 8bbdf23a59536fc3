"""A queued resource asked for, waited for, taken over, changed in place, looked at, lost and made again, deleted."""

from __future__ import annotations

from typing import Any

import pytest

from infra.cloud_tpu.refusal import AbandonedError, CloudTpuError
from tests.infra.cloud_tpu.conftest import CloudFactory
from tests.infra.cloud_tpu.lab import OWNER, PARENT, POOL, Cloud, Stack

QR = f"{PARENT}/queuedResources/main"
NODE = f"{PARENT}/nodes/main"


# --- waiting ---


def test_it_is_waited_for_until_it_is_active(cloud: Cloud) -> None:
    outputs = cloud.create()
    assert outputs["state"] == "ACTIVE" == cloud.state()
    assert [node["state"] for node in outputs["nodes"]] == ["READY"]
    assert len(outputs["nodes"][0]["workers"]) == 4


def test_a_stock_out_is_waited_out(new_cloud: CloudFactory) -> None:
    cloud = new_cloud(capacity={POOL: 0})
    cloud.at_sleep(40, lambda: cloud.control.set_capacity(POOL, 16))
    outputs = cloud.create()
    assert outputs["state"] == "ACTIVE"
    assert "WAITING_FOR_RESOURCES for v5litepod-16 (spot) in us-central1-a; waited 10 min" in cloud.said


def test_the_user_hears_of_every_new_state_and_else_every_five_minutes(new_cloud: CloudFactory) -> None:
    cloud = new_cloud(capacity={POOL: 0})
    cloud.create()
    progress = [line for line in cloud.lines if "; waited" in line]
    assert [line.split()[1] for line in progress[:2]] == ["ACCEPTED", "WAITING_FOR_RESOURCES"]
    assert 11 <= len(progress) <= 14  # in an hour


def test_one_that_waits_longer_than_wait_s_stays_in_the_queue_and_in_the_state(
    new_cloud: CloudFactory,
) -> None:
    cloud = new_cloud(capacity={POOL: 0})
    outputs = cloud.create(wait_s=600)
    assert cloud.clock.now() == pytest.approx(1_800_000_600, abs=30)
    assert (outputs["state"], outputs["nodes"]) == ("WAITING_FOR_RESOURCES", [])
    assert cloud.state() == "WAITING_FOR_RESOURCES"
    assert "`pulumi up` waits on, `pulumi destroy` gives it up" in cloud.lines[-1]


def test_the_next_up_waits_on_for_what_still_waits(new_cloud: CloudFactory) -> None:
    cloud = new_cloud(capacity={POOL: 0})
    stack = Stack(cloud=cloud)
    stack.up(wait_s=600)
    cloud.control.set_capacity(POOL, 16)
    stack.up(wait_s=600)
    assert stack.state is not None
    assert (stack.state["state"], len(stack.state["nodes"])) == ("ACTIVE", 1)
    assert cloud.history().count("ACCEPTED") == 1  # it has kept its place


def test_one_that_is_not_served_before_valid_until_is_an_error_and_nothing_is_left(
    new_cloud: CloudFactory,
) -> None:
    cloud = new_cloud(capacity={POOL: 0})
    with pytest.raises(
        CloudTpuError, match=r"FAILED: the request could not be served before its valid-until time"
    ):
        cloud.create(valid_until_s=600)
    assert cloud.alive() == []


def test_one_that_fails_is_an_error_that_says_why_and_nothing_is_left(new_cloud: CloudFactory) -> None:
    cloud = new_cloud(capacity={POOL: 0})
    cloud.at_sleep(3, lambda: cloud.control.fail(QR, "no such network"))
    with pytest.raises(CloudTpuError, match="no such network"):
        cloud.create()
    assert cloud.alive() == []


def test_one_that_someone_deletes_while_it_waits_is_an_error(new_cloud: CloudFactory) -> None:
    cloud = new_cloud(capacity={POOL: 0})
    cloud.at_sleep(3, lambda: cloud.control.vanish(QR))
    with pytest.raises(CloudTpuError, match=r"someone else has deleted it\. `pulumi up` asks for it again"):
        cloud.create()


def test_a_network_that_is_down_for_longer_than_a_retry_lasts_does_not_end_a_wait(
    new_cloud: CloudFactory,
) -> None:
    cloud = new_cloud(capacity={POOL: 0})
    cloud.at_sleep(3, lambda: cloud.control.inject("unavailable", "queuedResources.get", times=40))
    cloud.create(wait_s=7200)
    assert cloud.state() == "WAITING_FOR_RESOURCES"
    assert "try 31 in" in cloud.said


def test_a_network_that_does_not_come_back_leaves_the_request_in_the_state(new_cloud: CloudFactory) -> None:
    cloud = new_cloud(capacity={POOL: 0})
    cloud.at_sleep(3, lambda: cloud.control.inject("unavailable", "queuedResources.get", times=10_000))
    outputs = cloud.create(wait_s=600)
    assert outputs["state"] == "WAITING_FOR_RESOURCES"


def test_nodes_that_cannot_be_read_leave_the_request_in_the_state(cloud: Cloud) -> None:
    cloud.at_sleep(2, lambda: cloud.control.inject("unavailable", "nodes.get", times=10_000))
    outputs = cloud.create(wait_s=600)
    assert cloud.state() == "ACTIVE"
    cloud.control.clear_faults()
    stack = Stack(cloud=cloud, state=outputs)
    stack.up(wait_s=600)
    assert stack.state is not None and stack.state["state"] == "ACTIVE"
    assert cloud.history().count("ACCEPTED") == 1


# --- adoption ---


def test_an_interrupted_up_is_taken_over_by_the_next(new_cloud: CloudFactory) -> None:
    cloud = new_cloud(capacity={POOL: 0})
    stack = Stack(cloud=cloud)
    interrupted_up(stack)
    cloud.control.set_capacity(POOL, 16)
    stack.up()
    assert stack.state is not None and stack.state["state"] == "ACTIVE"
    assert cloud.history().count("ACCEPTED") == 1
    assert "taken over from an earlier `pulumi up`" in cloud.said


def interrupted_up(stack: Stack, **more: object) -> None:
    """A second Ctrl-C, or a power cut, while it waits: nothing of ours runs any more."""
    with pytest.raises(PowerCut):
        stack.cloud.at_sleep(4, power_cut)
        stack.up(**more)
    stack.cloud.while_sleeping = lambda: None


class PowerCut(BaseException):
    pass


def power_cut() -> None:
    raise PowerCut


def test_one_that_became_active_after_an_interrupted_up_is_taken_over(new_cloud: CloudFactory) -> None:
    cloud = new_cloud(capacity={POOL: 0})
    stack = Stack(cloud=cloud)
    interrupted_up(stack)
    cloud.control.set_capacity(POOL, 16)
    cloud.control.advance(3600)
    assert cloud.state() == "ACTIVE"
    stack.up(labels={"team": "nlp"})
    assert cloud.history().count("ACCEPTED") == 1
    node = cloud.node()
    assert node is not None and node["labels"]["team"] == "nlp"


def test_a_waiting_one_of_ours_that_asks_for_something_else_is_replaced(new_cloud: CloudFactory) -> None:
    cloud = new_cloud(capacity={POOL: 0})
    stack = Stack(cloud=cloud)
    interrupted_up(stack)
    cloud.control.set_capacity(POOL, 64)
    cloud.at_sleep(1, lambda: None)
    stack.up(accelerator_type="v5litepod-8")
    node = cloud.node()
    assert node is not None and node["acceleratorType"] == "v5litepod-8"
    assert "asked for another accelerator_type; that request is withdrawn" in cloud.said


def test_an_active_one_of_ours_that_asks_for_something_else_is_refused_and_stays(cloud: Cloud) -> None:
    cloud.create()
    with pytest.raises(
        CloudTpuError, match=r"another accelerator_type, and it is ACTIVE[\s\S]*gcloud compute tpus queued"
    ) as caught:
        cloud.create(accelerator_type="v5litepod-8")
    assert "--force" in str(caught.value)
    assert cloud.state() == "ACTIVE"


@pytest.mark.parametrize(("leave_nodes", "later_s"), [(False, 0), (True, 60)])
def test_a_dead_one_of_ours_is_removed_and_made_again(
    cloud: Cloud, leave_nodes: bool, later_s: float
) -> None:
    cloud.create()
    cloud.control.preempt(QR, leave_nodes)
    cloud.control.advance(later_s)
    outputs = cloud.create()
    assert outputs["state"] == "ACTIVE"
    assert cloud.history().count("ACTIVE") == 2


def test_one_of_ours_that_is_being_deleted_is_waited_for_and_made_again(cloud: Cloud) -> None:
    cloud.create()
    cloud.client.delete_queued_resource(QR)
    assert cloud.state() == "DELETING"
    cloud.create()
    assert cloud.state() == "ACTIVE"


@pytest.mark.parametrize("owner", [None, "someone-else"])
def test_one_of_someone_else_is_refused_and_left_alone(cloud: Cloud, owner: str | None) -> None:
    cloud.put(owner=owner)
    cloud.control.advance(60)
    with pytest.raises(CloudTpuError, match="not of this stack; it is left alone"):
        cloud.create()
    assert cloud.state() == "ACTIVE"


def test_a_node_of_that_name_that_runs_is_refused_and_left_alone(cloud: Cloud) -> None:
    cloud.put_node(OWNER)
    cloud.control.advance(60)
    with pytest.raises(CloudTpuError, match=r"there is a node of this name already \(READY\)"):
        cloud.create()
    assert cloud.alive() == [f"{PARENT}/nodes/main"]


def test_a_node_name_that_someone_elses_request_waits_for_is_refused(new_cloud: CloudFactory) -> None:
    cloud = new_cloud(capacity={POOL: 0})
    cloud.put("other", node_id="main")
    with pytest.raises(CloudTpuError, match="the name is taken, and shows nothing of that name"):
        cloud.create()
    assert cloud.alive() == [f"{PARENT}/queuedResources/other"]


# --- errors ---


@pytest.mark.parametrize("kind", ["cut-before", "cut-after", "unavailable", "too-many-requests"])
def test_what_goes_wrong_for_a_while_is_not_seen(cloud: Cloud, kind: str) -> None:
    for method in ("queuedResources.create", "queuedResources.get", "nodes.get", "queuedResources.delete"):
        cloud.control.inject(kind, method, 3)  # type: ignore[arg-type]
    outputs = cloud.create()
    assert outputs["state"] == "ACTIVE"
    assert cloud.history().count("ACCEPTED") == 1
    cloud.delete(outputs)
    assert cloud.alive() == []


def test_a_quota_that_is_too_small_is_an_error_at_once(new_cloud: CloudFactory) -> None:
    cloud = new_cloud(quota={POOL: 8})
    with pytest.raises(
        CloudTpuError, match=r"PreemptiblePerProjectPerZone[\s\S]*iam-admin/quotas\?project=grant"
    ):
        cloud.create()
    assert cloud.clock.now() == 1_800_000_000
    assert cloud.alive() == []


def test_what_google_refuses_is_an_error_at_once(cloud: Cloud) -> None:
    with pytest.raises(CloudTpuError, match="no-such-runtime"):
        cloud.create(runtime_version="no-such-runtime")
    assert cloud.alive() == []


def test_when_the_engine_is_gone_the_waiting_ends_and_nothing_is_deleted(new_cloud: CloudFactory) -> None:
    cloud = new_cloud(capacity={POOL: 0})

    def killed() -> None:
        cloud.engine_is_there = False
        cloud.control.fail(QR)

    cloud.at_sleep(3, killed)
    with pytest.raises(AbandonedError):
        cloud.create()
    assert cloud.state() == "FAILED"


def test_one_that_is_preempted_before_anyone_saw_it_active_is_an_error_and_nothing_is_left(
    cloud: Cloud,
) -> None:
    def preempted() -> None:
        cloud.control.advance(5.5)
        cloud.control.preempt(QR)

    cloud.at_sleep(1, preempted)
    with pytest.raises(CloudTpuError, match=r"was not to be had: it is SUSPEND(ING|ED)"):
        cloud.create()
    assert cloud.alive() == []


def test_what_was_served_is_not_given_back_because_a_node_is_shown_late(cloud: Cloud) -> None:
    nodes = cloud.api._server.cloud.nodes

    def hide() -> None:
        cloud.control.advance(5)
        hidden.update({name: nodes.pop(name) for name in list(nodes) if name.endswith("/main-1")})

    hidden: dict[str, object] = {}
    cloud.at_sleep(1, hide)
    stack = Stack(cloud=cloud)
    stack.up(node_count=2)
    assert stack.state is not None and (stack.state["state"], stack.state["nodes"]) == ("UNREAD", [])
    nodes.update(hidden)  # type: ignore[arg-type]
    stack.up(node_count=2)
    assert (stack.state["state"], len(stack.state["nodes"])) == ("ACTIVE", 2)
    assert cloud.history("main").count("ACCEPTED") == 1


def test_an_active_one_with_another_number_of_nodes_is_refused_and_stays(cloud: Cloud) -> None:
    cloud.create(node_count=2)
    with pytest.raises(CloudTpuError, match="another node_count, and it is ACTIVE"):
        cloud.create()
    assert cloud.state() == "ACTIVE"


# --- update ---


def test_what_changes_in_place_reaches_every_node_and_an_up_without_changes_sends_nothing(
    stack: Stack,
) -> None:
    change: dict[str, Any] = {
        "labels": {"team": "nlp"},
        "metadata": {"startup-script": "true"},
        "tags": ["tpu-stack-tpu"],
        "description": "of ada",
    }
    stack.up(node_count=2)
    stack.up(node_count=2, **change)
    for node_id in ("main-0", "main-1"):
        node = stack.cloud.node(node_id)
        assert node is not None
        assert {name: node[name] for name in change} == change | {
            "labels": {"team": "nlp", "tpu-stack-owner": OWNER}
        }
    assert stack.cloud.history().count("ACCEPTED") == 1
    before = stack.state
    stack.cloud.control.inject("unavailable", times=1)
    stack.up(node_count=2, **change)
    assert len(stack.cloud.control.alive()["faults"]) == 1  # no request was sent
    stack.cloud.control.clear_faults()
    stack.refresh()
    assert stack.state == before
    stack.destroy()
    assert stack.cloud.alive() == []


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


def test_a_node_under_maintenance_is_changed_when_it_is_back(stack: Stack) -> None:
    stack.up()
    stack.cloud.control.maintain(NODE, 120)
    stack.refresh()
    assert stack.state is not None  # maintenance is no loss
    assert (stack.state["state"], stack.state["nodes"][0]["state"]) == ("ACTIVE", "REPAIRING")
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


@pytest.mark.parametrize("leave_nodes", [False, True])
def test_a_preempted_one_is_made_again_after_a_refresh(stack: Stack, leave_nodes: bool) -> None:
    stack.up(labels={"team": "nlp"})
    stack.cloud.control.preempt(QR, leave_nodes)
    stack.cloud.control.advance(60)
    stack.refresh()
    assert stack.state is not None
    assert (stack.state["state"], stack.state["nodes"]) == ("SUSPENDED", [])
    assert stack.cloud.alive() == ([NODE, QR] if leave_nodes else [QR])  # a refresh deletes nothing
    stack.up(labels={"team": "nlp"})
    assert stack.state["state"] == "ACTIVE"
    assert stack.cloud.history().count("ACTIVE") == 2


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


def test_a_missing_node_is_a_loss_only_if_it_stays_away(stack: Stack) -> None:
    stack.up(node_count=2)
    stack.cloud.control.vanish(f"{PARENT}/nodes/main-0")
    before = stack.cloud.clock.now()
    stack.refresh()
    assert stack.state is not None and stack.state["state"] == "MISSING"
    assert stack.cloud.clock.now() - before >= 60
    stack.up(node_count=2)
    assert [node["id"] for node in stack.state["nodes"]] == ["main-0", "main-1"]


@pytest.mark.parametrize(
    ("kind", "method"), [("unavailable", "queuedResources.get"), ("cut-before", "nodes.get")]
)
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


# --- delete ---


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
