"""A slice on Compute Engine: asked for, waited for, lost and made again, deleted; against the simulator over HTTP."""

import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.documents import Documents, deleted_slices, stock_outs
from infra.slice_apis.retry import CloudTpuError, LostAgainError, RunningError
from rehearsal.simulated_cloud import Group, Instance
from tests.infra.cloud_tpu.lab import PowerCut, Stack, wire
from tests.infra.compute.lab import SPOT, ZONES, A, B, ComputeLab, compute_props, opened_lab

ONE_HOST = {"hosts": 1, "topology": "2x2"}


@pytest.fixture
def lab() -> Iterator[ComputeLab]:
    with opened_lab() as made:
        yield made


@pytest.fixture
def stack(lab: ComputeLab) -> Stack:
    return Stack(cloud=lab)


def names(zone: str, *parts: str, hosts: int = 4) -> set[str]:
    return {f"{zone}/{part}-w-{number:03d}" for part in parts for number in range(1, hosts + 1)}


# --- made, unchanged, deleted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "groups", "machines"),
    [
        (ONE_HOST, set(), {f"{A}/main"}),
        ({}, {f"{A}/main"}, names(A, "main")),
        ({"count": 2}, {f"{A}/main-0", f"{A}/main-1"}, names(A, "main-0", "main-1")),
        ({**ONE_HOST, "count": 2}, set(), {f"{A}/main-0", f"{A}/main-1"}),
        ({"capacity": "reserved"}, {f"{A}/main"}, names(A, "main")),
        ({"capacity": "flex-start", "run_duration_s": 86400}, {f"{A}/main"}, names(A, "main")),
        ({**ONE_HOST, "capacity": "flex-start"}, set(), {f"{A}/main"}),
    ],
)
def test_a_slice_is_made_whole_stays_as_it_is_and_goes_without_a_remainder(
    lab: ComputeLab, stack: Stack, config: dict[str, Any], groups: set[str], machines: set[str]
) -> None:
    stack.up(**config)
    assert stack.state is not None and stack.state["state"] == "ACTIVE", lab.said
    assert {*lab.groups()} == groups and lab.machines() == dict.fromkeys(machines, "RUNNING")
    hosts = [worker for node in stack.state["nodes"] for worker in node["workers"]]
    assert {f"{A}/{host['name']}" for host in hosts} == machines
    assert all(host["host_keys"] and host["internal_address"] for host in hosts)
    assert bool(stack.state["ends_at"]) is (config.get("capacity") == "flex-start")
    before = len(lab.control.journal())
    stack.up(**config)
    stack.refresh()
    stack.up(**config)
    assert len(lab.control.journal()) == before, "nothing is changed where nothing differs"
    stack.destroy()
    assert (lab.groups(), lab.machines()) == ({}, {})


def test_workers_are_in_the_order_that_the_machines_have_published(lab: ComputeLab, stack: Stack) -> None:
    lab.at_sleep(1, lambda: None)
    stack.up()
    for instance in lab.api.cloud.all(Instance):
        instance.worker = 3 - instance.worker
    stack.refresh()
    assert stack.state is not None
    workers = stack.state["nodes"][0]["workers"]
    assert [worker["name"][-1] for worker in workers] == ["4", "3", "2", "1"]
    assert [worker["index"] for worker in workers] == [0, 1, 2, 3]


def test_labels_and_the_template_change_in_place_and_keys_of_others_stay(
    lab: ComputeLab, stack: Stack
) -> None:
    stack.up(labels={"team": "old", "area": "a"}, metadata={"enable-oslogin": "TRUE"})
    lab.put_template("us-east5", "spot", "another")
    templates = dict.fromkeys(
        ("us-east5", "us-central1"), "projects/grant/regions/us-east5/instanceTemplates/another"
    )
    machine = lab.api.cloud.find(Instance, f"projects/grant/zones/{A}/instances/main-w-001")
    machine.properties["labels"]["theirs"] = "stays"
    stack.up(labels={"team": "new"}, metadata={"enable-oslogin": "TRUE"}, templates=templates)
    assert machine.labels == {
        "tpu-stack": "dev", "tpu-stack-owner": "a1b2c3", "team": "new", "theirs": "stays"
    }  # fmt: skip
    assert machine.metadata["enable-oslogin"] == "TRUE" and machine.metadata["created-by"].endswith("/main")
    (group,) = lab.api.cloud.all(Group)
    assert group.body["instanceTemplate"].endswith("/another") and {*lab.machines().values()} == {"RUNNING"}


def test_the_end_of_a_slice_that_runs_is_recorded_but_not_that_of_a_request_or_of_a_lost_one(
    lab: ComputeLab, stack: Stack, tmp_path: Path
) -> None:
    config = {"count": 2, "store_url": str(tmp_path)}
    lab.control.set_capacity(SPOT[A], 0)
    stack.up(**config, wait_s=60)
    assert stack.state is not None and stack.state["state"] != "ACTIVE"
    stack.destroy()

    lab.control.set_capacity(SPOT[A], 32)
    stack.up(**config)
    lab.control.preempt("main-1")
    stack.destroy()
    assert deleted_slices.read(Documents(str(tmp_path))) == [], "nobody knows when Google took it back"

    lab.control.set_capacity(SPOT[A], 0)
    stack.up(**config, wait_s=600)
    assert stack.state["active_at"] == "", "what waits costs nothing"
    lab.control.set_capacity(SPOT[A], 32)
    stack.up(**config)
    created = stack.state["create_time"]
    lab.control.advance(3600.0)
    stack.destroy()
    (record,) = deleted_slices.read(Documents(str(tmp_path)))
    kind = (record.accelerator_type, record.count, record.zone, record.capacity)
    assert (record.created, kind) == (created, ("v6e-16", 2, A, "spot"))
    moments = map(datetime.datetime.fromisoformat, (record.created, record.active_at, record.deleted))
    asked, active, deleted = (moment.timestamp() for moment in moments)
    assert active - asked >= 600 and 3600 <= deleted - active < 4200


# --- capacity ---------------------------------------------------------------------------------------------------------


def test_a_group_waits_whole_for_capacity_and_is_kept_when_the_wait_is_over() -> None:
    with opened_lab({SPOT[A]: 12}) as lab:
        stack = Stack(cloud=lab)
        stack.up(wait_s=600)
        assert stack.state is not None and stack.state["state"] == "WAITING_FOR_RESOURCES"
        assert lab.machines() == {} and lab.groups() == {f"{A}/main": "WAITING"}
        lab.at_sleep(2, lambda: lab.control.set_capacity(SPOT[A], 16))
        stack.up(wait_s=600)
        assert stack.state["state"] == "ACTIVE" and len(lab.machines()) == 4


def test_an_instance_that_is_refused_is_asked_for_again_while_somebody_waits(tmp_path: Any) -> None:
    with opened_lab({SPOT[A]: 0}) as lab:
        stack = Stack(cloud=lab)
        with pytest.raises(CloudTpuError, match="ZONE_RESOURCE_POOL_EXHAUSTED"):
            stack.up(**ONE_HOST, wait_s=300, store_url=str(tmp_path))
        assert stack.state is None and lab.machines() == {}
        (hours,) = stock_outs.read(Documents(str(tmp_path))).values()
        assert hours.out and not hours.served, "what the zone had is remembered"
        lab.at_sleep(5, lambda: lab.control.set_capacity(SPOT[A], 4))
        stack.up(**ONE_HOST, wait_s=3600)
        assert lab.machines() == {f"{A}/main": "RUNNING"}


@pytest.mark.parametrize("strategy", ["first", "race"])
@pytest.mark.parametrize("config", [{}, ONE_HOST])
def test_of_several_zones_one_has_the_slice(strategy: str, config: dict[str, Any]) -> None:
    with opened_lab({SPOT[A]: 0}) as lab:
        stack = Stack(cloud=lab)
        stack.up(**config, zones=list(ZONES), strategy=strategy, zone_wait_s=300, wait_s=3600)
        assert stack.state is not None and (stack.state["state"], stack.state["zone"]) == ("ACTIVE", B)
        lab.control.advance(60)
        assert {name.partition("/")[0] for name in [*lab.machines(), *lab.groups()]} == {B}
        stack.destroy()
        assert (lab.groups(), lab.machines()) == ({}, {})


def test_a_request_is_taken_back_at_its_valid_until() -> None:
    with opened_lab({SPOT[A]: 0}) as lab:
        with pytest.raises(CloudTpuError, match="could not be served before its valid-until time"):
            lab.create(valid_until_s=120, wait_s=600)
        assert lab.groups() == {}


# --- lost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "befalls", "state"),
    [
        ({}, lambda lab: lab.control.preempt("main"), "PREEMPTED"),
        (ONE_HOST, lambda lab: lab.control.preempt("main"), "PREEMPTED"),
        ({"count": 2}, lambda lab: lab.control.preempt("main-1"), "PREEMPTED"),
        ({"capacity": "on-demand"}, lambda lab: lab.control.terminate("main-w-002"), "STOPPED"),
        ({}, lambda lab: lab.control.fail("main"), "FAILED"),
        ({}, lambda lab: lab.control.vanish("main-w-003"), "INCOMPLETE"),
        ({"count": 2}, lambda lab: lab.control.vanish("main-0"), "MISSING"),
    ],
)
def test_a_slice_that_is_lost_is_drift_and_the_next_up_makes_it_again(
    lab: ComputeLab, stack: Stack, config: dict[str, Any], befalls: Callable[[ComputeLab], None], state: str
) -> None:
    stack.up(**config)
    befalls(lab)
    lab.control.advance(120)
    stack.refresh()
    assert stack.state is not None and stack.state["state"] == state, lab.said
    stack.up(**config)
    assert stack.state["state"] == "ACTIVE" and {*lab.machines().values()} == {"RUNNING"}


def test_nothing_that_runs_goes_with_a_lost_machine_until_a_refresh_has_shown_it(
    lab: ComputeLab, stack: Stack
) -> None:
    stack.up()
    lab.control.vanish("main-w-003")
    lab.control.advance(120)
    running = lab.machines()
    with pytest.raises(
        RunningError, match="has 3 of 4 machines, and its other nodes run.*\n`pulumi up --refresh`"
    ):
        stack.up(labels={"team": "nlp"})
    assert lab.machines() == running
    stack.refresh()
    stack.up(labels={"team": "nlp"})
    assert len(lab.machines()) == 4 and {*lab.machines().values()} == {"RUNNING"}


def test_one_that_is_taken_back_in_its_first_minute_is_lost_at_once(lab: ComputeLab, stack: Stack) -> None:
    lab.put_template("us-east5", "spot", "deletes", scheduling={
        "provisioningModel": "SPOT", "instanceTerminationAction": "DELETE"
    })  # fmt: skip
    templates = {"us-east5": "projects/grant/regions/us-east5/instanceTemplates/deletes"}
    stack.up(templates=templates)
    lab.control.preempt("main")
    lab.control.advance(5)
    assert lab.machines() == {}
    stack.refresh()
    assert stack.state is not None and stack.state["state"] == "INCOMPLETE"
    stack.up(templates=templates)
    assert stack.state["state"] == "ACTIVE" and {*lab.machines().values()} == {"RUNNING"}


def test_a_host_that_google_repairs_is_waited_for(lab: ComputeLab, stack: Stack) -> None:
    stack.up(capacity="on-demand")
    lab.control.maintain("main", 300.0)
    stack.refresh()
    assert stack.state is not None and stack.state["state"] == "PROVISIONING"
    stack.up(capacity="on-demand")
    assert stack.state["state"] == "ACTIVE"
    assert "DELETING" not in [line.state for line in lab.control.journal()]


def test_one_that_is_taken_back_before_it_is_whole_is_told_so(lab: ComputeLab) -> None:
    lab.at_sleep(2, lambda: lab.control.preempt("main"))
    with pytest.raises(LostAgainError, match="is not available: main has lost"):
        lab.create()
    assert (lab.groups(), lab.machines()) == ({}, {})


# --- interrupted, and of others ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sleeps", [1, 2])
def test_what_an_interrupted_up_has_left_is_adopted_and_completed(
    lab: ComputeLab, stack: Stack, sleeps: int
) -> None:
    def cut() -> None:
        raise PowerCut

    lab.at_sleep(sleeps, cut)
    with pytest.raises(PowerCut):
        stack.up(count=2)
    lab.while_sleeping = lambda: None
    lab.control.vanish("main-1")  # as if it had been cut off between the two
    lab.control.advance(600)
    stack.up(count=2)
    assert {*lab.groups()} == {f"{A}/main-0", f"{A}/main-1"} and len(lab.machines()) == 8
    asked = [line.name for line in lab.control.journal() if line.state == "WAITING"]
    assert sum(name.endswith("main-0") for name in asked) == 1, "what is there is not asked for again"


def test_one_that_runs_with_another_hardware_is_left_to_a_person(lab: ComputeLab) -> None:
    lab.create()
    with pytest.raises(RunningError, match="with another capacity, and it is ACTIVE"):
        lab.create(capacity="on-demand")
    assert {*lab.machines().values()} == {"RUNNING"}


def test_a_group_that_runs_is_not_taken_for_the_instance_of_its_name_nor_that_for_a_group(
    lab: ComputeLab,
) -> None:
    lab.create()
    with pytest.raises(RunningError, match="with another hosts"):
        lab.create(**ONE_HOST)
    lab.create(slice_id="one", **ONE_HOST)
    with pytest.raises(RunningError, match="with another hosts"):
        lab.create(slice_id="one")
    assert {*lab.machines().values()} == {"RUNNING"} and len(lab.machines()) == 5


def test_a_second_part_that_is_refused_leaves_no_first_one(lab: ComputeLab, stack: Stack) -> None:
    lab.put_group(A, "main-1")
    with pytest.raises(CloudTpuError):
        stack.up(count=2)
    lab.control.advance(60)
    assert {*lab.groups()} == {f"{A}/main-1"}


def test_leftovers_go_with_the_stack_and_an_unreachable_zone_keeps_it(lab: ComputeLab) -> None:
    lab.create()
    lab.create(slice_id="other", **ONE_HOST)
    lab.control.cut_off(B)
    with pytest.raises(CloudTpuError, match=f"could not say what it holds in {B}"):
        lab.lifecycle().remove_all("grant", "a1b2c3", [A, B])
    assert (lab.groups(), lab.machines()) == ({}, {})
    lab.lifecycle().remove_all("grant", "a1b2c3", [A])


def test_what_is_somebody_elses_is_never_touched(lab: ComputeLab, stack: Stack) -> None:
    lab.put_group(A, "main")
    with pytest.raises(CloudTpuError, match="belongs to another stack; it is left alone"):
        stack.up()
    lab.put_group(A, "main-1")
    with pytest.raises(CloudTpuError, match="main-1 exists already|belongs to another"):
        stack.up(slice_id="main", count=2)
    lab.delete(wire(compute_props()))
    lab.control.advance(60)
    assert set(lab.groups()) >= {f"{A}/main", f"{A}/main-1"}
    lab.lifecycle().remove_all("grant", "a1b2c3")
    assert {*lab.groups()} == {f"{A}/main", f"{A}/main-1"} and len(lab.machines()) == 8


def test_a_zone_that_does_not_answer_is_not_an_empty_one(lab: ComputeLab, stack: Stack) -> None:
    stack.up()
    lab.control.cut_off(A)
    before = len(lab.control.journal())
    for act in (stack.refresh, stack.destroy, lambda: stack.up(labels={"a": "b"})):
        with pytest.raises(CloudTpuError, match="cannot be reached"):
            act()
    assert len(lab.control.journal()) == before and stack.state is not None
