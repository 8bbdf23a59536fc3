"""`fab zombies`: whose TPUs are, by Pulumi's state and by labels, on the simulator; and that only the stack's go."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from backends.local.local_backend import on_this_machine
from contracts.errors import RequestError
from contracts.inventory import Slice, to_json
from infra import naming
from infra.cloud_tpu.tpu_request import SliceSpec, queued_resource
from infra.compute.groups import ComputeGroups
from infra.slice_apis.retry import Backoff
from keeper import zombies
from keeper.zombies import limits, parse_export
from launch import inventories
from launch.targets import TargetRequest
from rehearsal.simulated_cloud import Clock, SimulatedCloud
from tests.infra.compute.lab import A, B, opened_lab
from tests.launch.test_pricing import MAIN

OWNER, ZONE, OTHER_ZONE = "a1b2c3", "us-central1-a", "us-west4-a"
MULTI = {"node_count": 2, "accelerator_type": "v5litepod-8"}


def state(*more: dict[str, Any], pending: int = 0, slices: tuple[Slice, ...] | None = None) -> str:
    """slices: of the inventory; None: there is none (yet)."""
    here = on_this_machine(hosts="1", platform="cpu").inventory
    made = dataclasses.replace(here, stack="dev", project="grant", slices=slices or ())
    resources = [
        {"type": zombies.IDENTITY, "outputs": {"owner": OWNER, "project": "grant"}},
        {"type": zombies.STACK, "outputs": {} if slices is None else {"inventory": to_json(made)}},
        *more,
    ]
    return json.dumps(
        {"deployment": {"resources": resources, "pending_operations": [{"resource": {"urn": "u"}}] * pending}}
    )


def in_state(zone: str, own_id: str, **more: Any) -> dict[str, Any]:
    return {"type": zombies.QUEUED_RESOURCE, "outputs": {"zone": zone, "queued_resource_id": own_id, **more}}


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCloud]:
    clock = Clock(frozen_at=1_800_000_000.0)
    with SimulatedCloud(clock=clock) as made:
        monkeypatch.setenv("GOOGLE_TPU_V2_CUSTOM_ENDPOINT", made.url)
        monkeypatch.setenv("GOOGLE_COMPUTE_CUSTOM_ENDPOINT", f"{made.url}/compute/v1/")
        monkeypatch.setattr(
            zombies, "Backoff", lambda say: Backoff(say=say, now=clock.now, sleep=made.control.advance)
        )
        yield made


@pytest.fixture
def make(api: SimulatedCloud) -> Callable[..., None]:
    """Ask the simulator for one."""

    def ask(own_id: str, zone: str = ZONE, owner: str = OWNER, stack: str = "dev", **more: Any) -> None:
        labels = naming.labels(stack) if stack else {}
        spec = SliceSpec.from_props(
            {
                "project": "grant", "zone": zone, "queued_resource_id": own_id, "owner": owner, "labels": labels,
                "accelerator_type": "v5litepod-16", "runtime_version": "v2-alpha-tpuv5-lite", "capacity": "spot",
                **more,
            }
        )  # fmt: skip
        parent = f"/v2/projects/grant/locations/{zone}"
        body = json.dumps(queued_resource(spec)).encode()
        answered = api.server.answer("POST", f"{parent}/queuedResources?queuedResourceId={own_id}", body)
        assert answered is not None and answered[0] == 200, answered

    return ask


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Callable[..., TargetRequest]:
    def made(exported: str) -> TargetRequest:
        def ask(words: list[str], *_: object, **__: object) -> str:
            return exported if words == ["stack", "export"] else "grant\n"

        monkeypatch.setattr(inventories, "ask", ask)
        return TargetRequest(stack="dev")

    return made


def ids(api: SimulatedCloud) -> set[str]:
    alive = api.control.alive()
    return {"/".join(each["name"].split("/")[3:]) for each in [*alive["queuedResources"], *alive["nodes"]]}


def test_what_nobody_knows_of_is_removed_and_nothing_else(
    api: SimulatedCloud,
    make: Callable[..., None],
    stack: Callable[..., TargetRequest],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    make("main")  # in the inventory
    make("main", "europe-west4-b")  # where the same slice may be, as in a race
    make("second")  # in Pulumi's state
    make("left", OTHER_ZONE)
    make("many", OTHER_ZONE, **MULTI)
    make("theirs", owner="d4e5f6", stack="prod")
    make("foreign", owner="", stack="")
    api.control.advance(3600)
    before = ids(api)
    main = dataclasses.replace(MAIN, origin="queued-resource main", zones=(ZONE, "europe-west4-b"))
    exported = state(in_state(ZONE, "second"), slices=(main,))
    assert zombies.command(stack(exported), remove=False, yes=True) == 0
    said = capsys.readouterr().out
    assert ids(api) == before
    assert "grant holds 7; 2 are dev's and nobody knows of them" in said
    rows = [line for line in said.splitlines() if "queued resource" in line]
    assert [row.startswith("zombie") for row in rows] == [True, True, *[False] * 5]
    assert "another stack's (prod)" in said and "not tpu-stack's" in said
    assert any("left" in row and "3.92" not in row and "7.68" in row for row in rows)  # us-west4: 16 x 0.48

    assert zombies.command(stack(exported), remove=True, yes=True) == 0
    gone = {each for each in before if "/left" in each or "/many" in each}
    assert len(gone) == 5 and ids(api) == before - gone


def test_a_stack_without_an_inventory_is_known_by_its_state_and_one_without_a_state_by_its_configuration(
    api: SimulatedCloud,
    make: Callable[..., None],
    stack: Callable[..., TargetRequest],
    capsys: pytest.CaptureFixture[str],
) -> None:
    make("left")
    make("far", OTHER_ZONE)
    api.control.cut_off(OTHER_ZONE)
    assert zombies.command(stack(state()), remove=False, yes=True) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "grant holds 1; 1 are dev's and nobody knows of them" in said
    assert f"could not say what it holds in {OTHER_ZONE}" in said
    api.control.clear_faults()
    nothing = json.dumps({"deployment": {"resources": []}})
    assert zombies.command(stack(nothing), remove=False, yes=True) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "grant holds 2; 0 are dev's" in said and "Pulumi's state of dev has no id" in said


def test_nodes_that_their_queued_resource_has_left_behind_are_removed_as_one_that_was_direct_is(
    api: SimulatedCloud, make: Callable[..., None], stack: Callable[..., TargetRequest]
) -> None:
    make("many", **MULTI)
    api.control.advance(3600)
    with api.cloud.lock:
        parent = f"projects/grant/locations/{ZONE}"
        for name in (f"{parent}/queuedResources/many", f"{parent}/nodes/many-0"):
            del api.cloud.things[name]
    node = {"acceleratorType": "v5litepod-8", "runtimeVersion": "v2-alpha-tpuv5-lite"}
    body = json.dumps(node | {"labels": {naming.OWNER_LABEL: OWNER}}).encode()
    api.server.answer("POST", f"/v2/projects/grant/locations/{ZONE}/nodes?nodeId=direct", body)
    api.control.advance(3600)
    assert ids(api) == {f"{ZONE}/nodes/direct", f"{ZONE}/nodes/many-1"}
    assert zombies.command(stack(state()), remove=True, yes=True) == 0
    assert ids(api) == set()


def test_nothing_is_removed_while_an_update_goes_on_or_was_interrupted_or_without_an_owner(
    api: SimulatedCloud, make: Callable[..., None], stack: Callable[..., TargetRequest]
) -> None:
    make("left")
    with pytest.raises(RequestError, match="an update of dev is under way or was interrupted"):
        zombies.command(stack(state(pending=1)), remove=True, yes=True)
    nobody = json.dumps({"deployment": {"resources": []}})
    assert zombies.command(stack(nobody), remove=True, yes=True) == 0
    with pytest.raises(RequestError, match="printed no state of a stack"):
        zombies.command(stack("warning: nothing"), remove=True, yes=True)
    with pytest.raises(RequestError, match="Pulumi did not make it"):
        zombies.command(TargetRequest(stack="./inventory.json"), remove=True, yes=True)
    assert len(ids(api)) >= 1


def test_what_pulumi_has_is_known_by_name_and_place_in_all_zones_that_it_may_be_in() -> None:
    direct = {"type": zombies.DIRECT, "outputs": {"zone": ZONE, "name": "one"}}
    known = parse_export("dev", state(in_state(ZONE, "q", zones=[ZONE, OTHER_ZONE]), direct))
    assert known.owner == OWNER
    assert set(known.names) == {f"{ZONE}/q", f"{OTHER_ZONE}/q", f"{ZONE}/one"}


def test_a_request_that_another_zone_of_its_slice_serves_is_a_zombie_if_it_is_ours() -> None:
    known = parse_export("dev", state(in_state(ZONE, "q", zones=[ZONE, OTHER_ZONE])))

    def queued(zone: str, at: str, owner: str = OWNER) -> dict[str, Any]:
        spec = SliceSpec.from_props(
            {
                "project": "grant", "zone": zone, "queued_resource_id": "q", "owner": owner, "capacity": "spot",
                "accelerator_type": "v5litepod-16", "runtime_version": "r",
            }
        )  # fmt: skip
        return {**queued_resource(spec), "name": spec.name, "state": {"state": at}}

    for others, whose in (
        ([queued(OTHER_ZONE, "WAITING_FOR_RESOURCES")], "zombie"),
        ([queued(OTHER_ZONE, "WAITING_FOR_RESOURCES", "d4e5f6")], "in use"),
        ([queued(OTHER_ZONE, "ACTIVE")], "in use"),
    ):
        found = zombies.holdings([queued(ZONE, "ACTIVE"), *others], [], known)
        assert {each.zone: each.ownership for each in found} == {ZONE: "in use", OTHER_ZONE: whose}
    both = [queued(ZONE, "SUSPENDED"), queued(OTHER_ZONE, "ACCEPTED")]
    assert {each.ownership for each in zombies.holdings(both, [], known)} == {"in use"}


def test_a_quota_is_told_of_the_zone_the_generation_and_the_capacity_that_are_held() -> None:
    node = {
        "name": f"projects/p/locations/{ZONE}/nodes/n",
        "acceleratorType": "v5litepod-8",
        "state": "READY",
    }
    found = zombies.holdings([], [{**node, "schedulingConfig": {"spot": True}}], parse_export("dev", state()))

    def quota(own_id: str, value: str | None, zone: str | None, *others: str) -> dict[str, Any]:
        dimensions = {} if zone is None else {"dimensions": {"zone": zone}}
        return {
            "quotaId": own_id,
            "dimensionsInfos": [{**dimensions, "details": {"value": value}, "applicableLocations": others}],
        }

    of_spot = "TPUV5sLitepodPreemptiblePerProjectPerZoneForTPUAPI"
    quotas = [
        quota(of_spot, "64", ZONE),
        quota(of_spot, "1", OTHER_ZONE),
        quota("TPUV5sLitepodPerProjectPerZoneForTPUAPI", "2", ZONE),
        quota("TPUV6EPreemptiblePerProjectPerZoneForTPUAPI", "3", ZONE),
        quota("TPUV5sLitepodServingPreemptiblePerProjectPerZoneForTPUAPI", "4", ZONE),
        {"quotaId": of_spot},
        quota(of_spot, None, ZONE),
        quota(of_spot, "5", None, OTHER_ZONE),
    ]
    assert list(limits(quotas, found)) == [f"quota {of_spot} in {ZONE}: 64; 8 chips are held"]
    assert list(limits([quota(of_spot, "5", None, ZONE)], found)) == [
        f"quota {of_spot} in {ZONE}: 5; 8 chips are held"
    ]


# --- Compute Engine ---------------------------------------------------------------------------------------------------


def test_groups_and_instances_of_any_label_are_shown_and_only_ours_that_nobody_knows_of_go(
    monkeypatch: pytest.MonkeyPatch, stack: Callable[..., TargetRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with opened_lab() as lab:
        for name, origin in (("TPU_V2", "v2/"), ("COMPUTE", "compute/v1/")):
            monkeypatch.setenv(f"GOOGLE_{name}_CUSTOM_ENDPOINT", f"{lab.api.url}/{origin}")
        monkeypatch.setattr(zombies, "Backoff", lambda say: dataclasses.replace(lab.session.backoff, say=say))
        lab.create(slice_id="known", count=2)
        lab.create(slice_id="left")
        lab.create(slice_id="one", hosts=1, topology="2x2")
        lab.put_group(A, "theirs")
        lab.control.advance(60)
        outputs = {"zone": A, "slice_id": "known", "count": 2}
        wanted = stack(state({"type": zombies.COMPUTE_SLICE, "outputs": outputs}))
        lab.control.cut_off(B)
        assert zombies.command(wanted, remove=True, yes=True) == 0
        shown = capsys.readouterr().out
        assert f"Google could not say what it holds in {B}" in shown
        assert "v6e-16" in shown and "another stack's" in shown and "in use" in shown
        assert {*lab.groups()} == {f"{A}/known-0", f"{A}/known-1", f"{A}/theirs"}
        assert f"{A}/one" not in lab.machines()


@pytest.mark.parametrize("is_template_there", [True, False])
def test_a_group_that_waits_for_capacity_tells_what_it_is_and_that_it_costs_nothing_yet(
    is_template_there: bool,
) -> None:
    pool = f"{A}:v6e:flex-start"
    with opened_lab({pool: 0}) as lab:
        lab.create(slice_id="waits", capacity="flex-start", run_duration_s=86400, wait_s=60)
        client = lab.session.clients.compute
        things = ComputeGroups(client, lab.session.backoff).listing("grant").items
        known = parse_export("dev", state(slices=()))
        template = client.template if is_template_there else lambda _: None
        (held,) = zombies.holdings([], [], known, things, template)
        kind = ("v6e-16", "flex-start") if is_template_there else ("?", "?")
        assert held.cells == ("zombie", A, "waits", "group", *kind, "WAITING_FOR_RESOURCES", "none yet")
        lab.control.set_capacity(pool, 16)
        lab.control.advance(600)
        things = ComputeGroups(client, lab.session.backoff).listing("grant").items
        (held,) = zombies.holdings([], [], known, things, template)
        assert held.cells[4:7] == ("v6e-16", "flex-start", "RUNNING") and held.usd_per_hour is not None
