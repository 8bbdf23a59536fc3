"""A queued resource asked for, waited for, taken over, changed in place, looked at, lost and made again, deleted."""

import datetime
from collections.abc import Callable
from typing import Any

import pytest

from infra.slice_apis.retry import AbandonedError, CloudTpuError
from rehearsal.simulated_cloud import Delays, Node
from rehearsal.simulated_cloud.cloud import Thing
from tests.infra.cloud_tpu.conftest import CloudFactory
from tests.infra.cloud_tpu.lab import OWNER, PARENT, POOL, Cloud, PowerCut, Stack

QR = f"{PARENT}/queuedResources/main"
NODE = f"{PARENT}/nodes/main"


@pytest.fixture
def sold_out(new_cloud: CloudFactory) -> Cloud:
    return new_cloud(capacity={POOL: 0})


def is_active(stack: Stack, nodes: int = 1) -> bool:
    return stack.state is not None and (stack.state["state"], len(stack.state["nodes"])) == ("ACTIVE", nodes)


# --- waiting ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["up", "refresh"])
def test_a_stock_out_is_waited_out_for_wait_s_and_then_by_the_next_up(sold_out: Cloud, verb: str) -> None:
    stack = Stack(cloud=sold_out)
    stack.up(wait_s=3600)
    assert sold_out.clock.now() == pytest.approx(1_800_003_600, abs=30)
    assert stack.state is not None
    assert (stack.state["state"], stack.state["nodes"]) == ("WAITING_FOR_RESOURCES", [])
    # The user hears of every new state, and else every five minutes.
    progress = [line for line in sold_out.lines if "; waited" in line]
    assert [line.split()[1] for line in progress[:2]] == ["ACCEPTED", "WAITING_FOR_RESOURCES"]
    assert 11 <= len(progress) <= 14
    assert "WAITING_FOR_RESOURCES for v5litepod-16 (spot) in us-central1-a; waited 10 min" in sold_out.said
    assert "`pulumi up` waits on, `pulumi destroy` gives it up" in sold_out.lines[-1]
    sold_out.control.set_capacity(POOL, 16)
    if verb == "refresh":
        sold_out.control.advance(60)
        stack.refresh()
        assert is_active(stack)
    stack.up(wait_s=3600)
    assert is_active(stack)
    assert len(stack.state["nodes"][0]["workers"]) == 4
    assert sold_out.history().count("ACCEPTED") == 1  # it has kept its place
    moments = [datetime.datetime.fromisoformat(stack.state[name]) for name in ("create_time", "active_at")]
    assert moments[1] - moments[0] >= datetime.timedelta(hours=1), "the wait is no part of what costs"


def preempted_at_once(cloud: Cloud) -> None:
    cloud.control.set_capacity(POOL, 16)
    cloud.control.advance(8)
    cloud.control.preempt(QR)


@pytest.mark.parametrize(
    ("more", "befalls", "said"),
    [
        ({"valid_until_s": 600}, None, "FAILED: the request could not be served before its valid-until time"),
        ({}, lambda cloud: cloud.control.fail(QR, "no such network"), "no such network"),
        ({}, lambda cloud: cloud.control.vanish(QR), "someone else has deleted it. `pulumi up` asks for it again"),
        ({}, preempted_at_once, "is not available: it is SUSPEND"),
    ],
)  # fmt: skip
def test_one_that_will_not_come_is_an_error_that_says_why_and_nothing_is_left(
    sold_out: Cloud, more: dict[str, Any], befalls: Callable[[Cloud], None] | None, said: str
) -> None:
    if befalls is not None:
        sold_out.at_sleep(3, lambda: befalls(sold_out))
    with pytest.raises(CloudTpuError) as caught:
        sold_out.create(**more)
    assert said in str(caught.value)
    assert sold_out.alive() == []


@pytest.mark.parametrize(("times", "wait_s", "said"), [(40, 7200, "try 31 in"), (10_000, 600, "try 2 in")])
def test_a_network_that_is_down_for_longer_than_a_retry_lasts_does_not_end_a_wait(
    sold_out: Cloud, times: int, wait_s: float, said: str
) -> None:
    sold_out.at_sleep(3, lambda: sold_out.control.inject("unavailable", "queuedResources.get", times))
    assert sold_out.create(wait_s=wait_s)["state"] == "WAITING_FOR_RESOURCES"
    assert said in sold_out.said
    sold_out.control.clear_faults()
    assert sold_out.state() == "WAITING_FOR_RESOURCES"


def test_nodes_that_cannot_be_read_leave_the_request_in_the_state(cloud: Cloud) -> None:
    cloud.at_sleep(2, lambda: cloud.control.inject("unavailable", "nodes.get", times=10_000))
    outputs = cloud.create(wait_s=600)
    assert cloud.state() == "ACTIVE"
    cloud.control.clear_faults()
    stack = Stack(cloud=cloud, state=outputs)
    stack.up(wait_s=600)
    assert is_active(stack)
    assert cloud.history().count("ACCEPTED") == 1


# --- adoption ---------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupted(sold_out: Cloud) -> Stack:
    """An `up` was cut off while it waited; there is capacity now."""

    def cut() -> None:
        raise PowerCut

    stack = Stack(cloud=sold_out)
    sold_out.at_sleep(4, cut)
    with pytest.raises(PowerCut):
        stack.up()
    sold_out.while_sleeping = lambda: None
    sold_out.control.set_capacity(POOL, 64)
    return stack


@pytest.mark.parametrize(("later_s", "state"), [(0, "PROVISIONING"), (3600, "ACTIVE")])
def test_an_interrupted_up_is_taken_over_by_the_next(interrupted: Stack, later_s: float, state: str) -> None:
    cloud = interrupted.cloud
    cloud.control.advance(later_s)
    interrupted.up(labels={"team": "nlp"})
    assert is_active(interrupted)
    assert cloud.history().count("ACCEPTED") == 1
    assert f"taken over from an earlier `pulumi up`; it is {state}" in cloud.said
    node = cloud.node()
    assert node is not None and node["labels"]["team"] == "nlp"


def test_a_waiting_one_of_ours_that_asks_for_something_else_is_replaced_and_an_active_one_stays(
    interrupted: Stack,
) -> None:
    cloud = interrupted.cloud
    interrupted.up(accelerator_type="v5litepod-8")
    node = cloud.node()
    assert node is not None and node["acceleratorType"] == "v5litepod-8"
    assert "asked for another accelerator_type; that request is withdrawn" in cloud.said
    for name, then in (("accelerator_type", "v5litepod-16"), ("node_count", 2)):
        asked = {"accelerator_type": "v5litepod-8", name: then}
        with pytest.raises(
            CloudTpuError, match=rf"another {name}, and it is ACTIVE[\s\S]*tpus queued.* --force"
        ):
            cloud.create(**asked)
    assert cloud.state() == "ACTIVE"


# --- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, r"PreemptiblePerProjectPerZone[\s\S]*iam-admin/quotas\?project=grant"),
        ({"runtime_version": "no-such-runtime"}, "no-such-runtime"),
    ],
)
def test_a_quota_that_is_too_small_and_what_google_refuses_are_errors_at_once(
    new_cloud: CloudFactory, more: dict[str, Any], said: str
) -> None:
    cloud = new_cloud(quota={POOL: 8})
    with pytest.raises(CloudTpuError, match=said):
        cloud.create(**more)
    assert cloud.clock.now() == 1_800_000_000
    assert cloud.alive() == []


def test_when_the_engine_is_gone_the_waiting_ends_and_nothing_is_deleted(sold_out: Cloud) -> None:
    def killed() -> None:
        sold_out.engine_is_there = False
        sold_out.control.fail(QR)

    sold_out.at_sleep(3, killed)
    with pytest.raises(AbandonedError):
        sold_out.create()
    assert sold_out.state() == "FAILED"


def test_what_was_served_is_not_given_back_because_a_node_is_shown_late(cloud: Cloud) -> None:
    things = cloud.api.cloud.things

    def hide() -> None:
        cloud.control.advance(5)
        hidden.update({name: things.pop(name) for name in list(things) if name.endswith("/main-1")})

    hidden: dict[str, Thing] = {}
    cloud.at_sleep(1, hide)
    stack = Stack(cloud=cloud)
    stack.up(node_count=2)
    assert stack.state is not None and (stack.state["state"], stack.state["nodes"]) == ("UNREAD", [])
    things.update(hidden)
    stack.up(node_count=2)
    assert is_active(stack, nodes=2)
    assert cloud.history("main").count("ACCEPTED") == 1


# --- update -----------------------------------------------------------------------------------------------------


def test_what_changes_in_place_reaches_every_node_and_an_up_without_changes_sends_nothing(
    stack: Stack,
) -> None:
    change: dict[str, Any] = {
        "labels": {"team": "nlp"},
        "metadata": {"startup-script": "true"},
        "tags": ["tpu-stack-tpu"],
        "description": "of ada",
    }

    def external() -> set[bool]:
        assert stack.state is not None
        nodes = stack.state["nodes"]
        return {bool(worker["external_address"]) for node in nodes for worker in node["workers"]}

    stack.up(node_count=2)
    stack.up(node_count=2, **change, external_addresses=True)
    assert external() == {True}
    stack.up(node_count=2, **change)
    assert external() == {False}
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


def test_labels_that_are_not_asked_for_any_more_go_those_of_others_stay_and_maintenance_is_waited_out(
    stack: Stack,
) -> None:
    def labels() -> dict[str, str]:
        node = stack.cloud.node()
        assert node is not None
        return dict(node["labels"])

    stack.up(labels={"team": "nlp"})
    stack.cloud.client.patch_node(NODE, "labels", {"labels": labels() | {"goog-x": "1"}})
    stack.cloud.control.advance(10)
    stack.up(labels={"area": "b"})
    assert labels() == {"area": "b", "goog-x": "1", "tpu-stack-owner": OWNER}
    stack.cloud.control.maintain(NODE, 120)
    stack.refresh()
    assert stack.state is not None  # maintenance is no loss
    assert (stack.state["state"], stack.state["nodes"][0]["state"]) == ("ACTIVE", "REPAIRING")
    stack.up(labels={"team": "nlp"})
    assert labels()["team"] == "nlp"


def test_another_type_replaces_and_the_old_one_is_gone_first(new_cloud: CloudFactory) -> None:
    stack = Stack(cloud=new_cloud(capacity={POOL: 16}))
    stack.up()
    stack.up(accelerator_type="v5litepod-8")
    served = ["ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
    assert stack.cloud.history() == [*served, "DELETING", "gone", *served]


def test_an_update_makes_again_what_was_suspended_meanwhile_and_deletes_no_node_that_runs(
    stack: Stack,
) -> None:
    stack.up(node_count=2)
    stack.cloud.control.preempt(QR)
    stack.cloud.control.advance(60)
    stack.up(node_count=2, labels={"team": "nlp"})
    assert is_active(stack, nodes=2)
    assert stack.cloud.history().count("ACTIVE") == 2
    stack.cloud.control.vanish(f"{PARENT}/nodes/main-1")
    with pytest.raises(
        CloudTpuError, match=r"node main-1 is gone, and its other nodes run[\s\S]*pulumi up --refresh"
    ):
        stack.up(node_count=2, labels={"team": "vision"})
    assert stack.cloud.alive() == [f"{PARENT}/nodes/main-0", QR]


# --- read -------------------------------------------------------------------------------------------------------


def test_one_that_vanished_leaves_the_state_and_a_missing_node_is_a_loss_only_if_it_stays_away(
    stack: Stack,
) -> None:
    stack.up()
    stack.cloud.control.vanish(QR)
    stack.refresh()
    assert stack.state is None
    stack.up(node_count=2)
    stack.cloud.control.vanish(f"{PARENT}/nodes/main-0")
    before = stack.cloud.clock.now()
    stack.refresh()
    found = stack.state
    assert found is not None and found["state"] == "MISSING"
    assert stack.cloud.clock.now() - before >= 60
    stack.up(node_count=2)
    assert is_active(stack, nodes=2)


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


# --- delete -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("meanwhile", [False, True])
def test_what_someone_else_has_made_under_the_name_is_left_alone(stack: Stack, meanwhile: bool) -> None:
    def taken() -> None:
        stack.cloud.control.vanish(QR)
        stack.cloud.put(owner="someone-else")

    stack.up()
    if meanwhile:
        stack.cloud.at_sleep(1, taken)
    else:
        taken()
        stack.cloud.control.advance(60)
    stack.destroy()
    stack.cloud.control.advance(60)
    assert stack.cloud.state() == "ACTIVE"
    assert ("does not belong to this stack any more; it is left alone" in stack.cloud.said) != meanwhile


def test_a_deletion_that_does_not_end_is_an_error_and_stays_in_the_state(new_cloud: CloudFactory) -> None:
    stack = Stack(cloud=new_cloud(delays=Delays(delete_s=100_000)))
    stack.up()
    with pytest.raises(CloudTpuError, match=r"it is still DELETING after 30 min"):
        stack.destroy()
    assert stack.state is not None


def test_a_node_that_is_left_of_ours_is_deleted_with_it(stack: Stack) -> None:
    stack.up()
    name = stack.cloud.api.cloud.find(Node, NODE).queued_resource
    stack.cloud.api.cloud.things.pop(name or "")
    stack.destroy()
    assert stack.cloud.alive() == []


# --- flex-start -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node_count", [1, 2])
def test_a_flex_start_slice_tells_when_it_ends_and_is_made_again_after_that(
    stack: Stack, node_count: int
) -> None:
    more = {"capacity": "flex-start", "run_duration_s": 7200, "node_count": node_count}
    stack.up(**more)
    assert is_active(stack, node_count)
    assert stack.state is not None
    ends_s = datetime.datetime.fromisoformat(stack.state["ends_at"]).timestamp()
    assert stack.cloud.clock.now() < ends_s <= stack.cloud.clock.now() + 7200
    stack.up(**more)
    assert stack.cloud.history().count("ACTIVE") == 1  # an interrupted or second `up` adopts it
    stack.cloud.control.advance(7200)
    stack.refresh()
    assert stack.state["state"] in ("SUSPENDED", "SUSPENDING", "TERMINATED")
    stack.up(**more)
    assert is_active(stack, node_count)
    assert datetime.datetime.fromisoformat(stack.state["ends_at"]).timestamp() > ends_s
    stack.destroy()
    assert stack.cloud.alive() == []


def test_a_flex_start_slice_of_another_duration_is_another_slice(cloud: Cloud) -> None:
    cloud.create(capacity="flex-start", run_duration_s=7200)
    with pytest.raises(CloudTpuError, match="another run_duration_s, and it is ACTIVE"):
        cloud.create(capacity="flex-start", run_duration_s=3600)
    with pytest.raises(CloudTpuError, match="another capacity, run_duration_s, and it is ACTIVE"):
        cloud.create(capacity="spot")
