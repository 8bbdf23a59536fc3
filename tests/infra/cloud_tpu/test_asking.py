"""A queued resource that is asked for: waited for, given up, taken over, replaced, or left to whom it belongs."""

from __future__ import annotations

import pytest

from infra.cloud_tpu.errors import AbandonedError, CloudTpuError
from tests.infra.cloud_tpu.conftest import CloudFactory
from tests.infra.cloud_tpu.engine import Stack
from tests.infra.cloud_tpu.lab import OWNER, PARENT, POOL, Cloud

QR = f"{PARENT}/queuedResources/main"


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


def test_destroy_gives_up_what_still_waits(new_cloud: CloudFactory) -> None:
    cloud = new_cloud(capacity={POOL: 0})
    stack = Stack(cloud=cloud)
    stack.up(wait_s=60)
    stack.destroy()
    assert cloud.alive() == []


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


@pytest.mark.parametrize("leave_nodes", [False, True])
@pytest.mark.parametrize("later_s", [0, 60])
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
@pytest.mark.parametrize("method", ["queuedResources.create", "queuedResources.get", "nodes.get"])
@pytest.mark.parametrize("times", [1, 3])
def test_what_goes_wrong_for_a_while_is_not_seen(cloud: Cloud, kind: str, method: str, times: int) -> None:
    cloud.control.inject(kind, method, times)  # type: ignore[arg-type]
    assert cloud.create()["state"] == "ACTIVE"
    assert cloud.history().count("ACCEPTED") == 1


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
