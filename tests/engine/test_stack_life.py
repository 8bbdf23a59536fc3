"""The life of a stack: the whole program on the real engine, the simulated Cloud TPU API and a stand-in for gcp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from contracts import inventory
from infra import slices
from infra.program import declare
from rehearsal.engine import ACCESS_TOKEN, Engine
from rehearsal.engine_report import Report
from rehearsal.tpu_api import FaultKind, TpuApi
from tests.engine.conftest import EngineFactory

ROOT = Path(__file__).resolve().parents[2]
SPOT = "us-central1-a:v5litepod:spot"
NAME = "tpu-stack-dev-main"
FULL_NAME = f"projects/my-project/locations/us-central1-a/queuedResources/{NAME}"
QUEUED = "pulumi-python:dynamic/tpu_stack:QueuedResource"


def configuration(*, slices: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    """Of one spot slice on an existing network without storage, which is quick, and with nothing protected."""
    keys: dict[str, Any] = {
        "zone": "us-central1-a",
        "slices": slices if slices is not None else [a_slice()],
        "network": {"existing": "default"},
        "storage": {"bucket": False, "nfs": {"kind": "none"}},
        "protect": False,
        **{key.replace("_", "-"): value for key, value in more.items()},
    }
    return {"gcp:project": "my-project", **{f"tpu-stack:{key}": value for key, value in keys.items()}}


def a_slice(**changes: Any) -> dict[str, Any]:
    keys = {key.replace("_", "-"): value for key, value in changes.items()}
    return {"name": "main", "accelerator": "v5litepod-16", "capacity": "spot", "wait": "5m", **keys}


@pytest.fixture
def engine(new_engine: EngineFactory) -> Engine:
    made = new_engine(declare, project_file=ROOT / "Pulumi.yaml")
    made.configure(configuration())
    return made


def alive(api: TpuApi) -> tuple[list[str], list[str]]:
    """The names of queued resources and nodes."""
    there = api.control.alive()
    return (
        sorted(each["name"].rpartition("/")[2] for each in there["queuedResources"]),
        sorted(each["name"].rpartition("/")[2] for each in there["nodes"]),
    )


def done(report: Report, op: str) -> list[str]:
    """The names of the resources with which that was done, the engine's own providers left out."""
    return sorted(each.name for each in report.steps if each.op == op and "providers:" not in each.type)


def created(api: TpuApi) -> int:
    """How often a queued resource of this name has been made."""
    return sum(each.name == FULL_NAME and each.state == "ACCEPTED" for each in api.control.journal())


def hosts(outputs: Any) -> list[str]:
    (one,) = inventory.from_json(outputs["inventory"]).slices
    return [host.name for host in one.hosts]


# --- an ordinary life ---------------------------------------------------------------------------------------------


def test_a_slice_is_made_kept_relabelled_replaced_and_destroyed(engine: Engine, api: TpuApi) -> None:
    preview = engine.preview()
    assert preview.ok and alive(api) == ([], []), preview.text

    first = engine.up()
    assert first.ok, first.text
    assert alive(api) == ([NAME], [NAME])
    assert QUEUED in {each["type"] for each in engine.resources()}
    assert len(hosts(first.outputs)) == 4

    again = engine.up()
    assert again.ok and set(again.changes) == {"same"}, again.text

    engine.configure(configuration(slices=[a_slice(labels={"team": "nlp"})]))
    labelled = engine.up()
    assert labelled.ok and done(labelled, "update") == ["main"], labelled.text
    assert created(api) == 1
    (node,) = api.control.alive()["nodes"]
    assert node["labels"]["team"] == "nlp"

    # There is room for one of the two only: the old one has to go before the new one is asked for.
    api.control.set_capacity(SPOT, 16)
    engine.configure(configuration(slices=[a_slice(accelerator="v5litepod-8")]))
    replaced = engine.up()
    assert replaced.ok and done(replaced, "delete-replaced") == ["main"], replaced.text
    assert created(api) == 2
    assert len(hosts(replaced.outputs)) == 1

    assert engine.destroy().ok
    assert alive(api) == ([], [])
    assert engine.resources() == []
    assert engine.world.things() == {}


def test_a_whole_stack_is_destroyed_once_its_data_may_go(engine: Engine, api: TpuApi) -> None:
    storage = {"bucket": {"name": "our-runs"}, "nfs": {"kind": "gateway"}}
    engine.configure(configuration(network={}, storage=storage, protect=True))
    made = engine.up()
    assert made.ok, made.text
    mount = inventory.from_json(made.outputs["inventory"]).storage
    assert (mount.bucket_url, mount.nfs_mount) == ("gs://our-runs", "/mnt/share")

    refused = engine.destroy()
    assert not refused.ok and "protect" in refused.text
    kept = {(each.type, each.id.rpartition("/")[2]) for each in engine.world.things().values()}
    assert {
        ("gcp:storage/bucket:Bucket", "our-runs"),
        ("gcp:compute/disk:Disk", "tpu-stack-dev-share"),
    } <= kept

    engine.configure(configuration(network={}, storage=storage))
    assert engine.up().ok
    destroyed = engine.destroy()
    assert destroyed.ok, destroyed.text
    assert alive(api) == ([], []) and engine.world.things() == {} and engine.resources() == []


def test_filestore_in_an_existing_network_is_previewed_made_and_mounted(engine: Engine, api: TpuApi) -> None:
    """In a preview its network is known, and its address is not."""
    engine.configure(configuration(storage={"bucket": False, "nfs": {"kind": "filestore"}}))
    preview = engine.preview()
    assert preview.ok, preview.text
    made = engine.up()
    assert made.ok, made.text
    source = inventory.from_json(made.outputs["inventory"]).storage.nfs_source
    assert source is not None and source.endswith(":/share") and "not-known" not in source
    (node,) = api.control.alive()["nodes"]
    assert f"SHARE_SOURCE={source}" in node["metadata"]["startup-script"]


def with_gateway(zone: str) -> dict[str, Any]:
    """A gateway there, and no slice."""
    return configuration(slices=[], network={}, storage={"bucket": False, "nfs": {"zone": zone}})


@pytest.mark.parametrize("zone", ["us-central1-b", "us-east1-d"])
def test_a_gateway_that_moves_lets_go_of_its_disk_and_address_before_they_are_deleted(
    engine: Engine, zone: str
) -> None:
    """The real provider takes a disk out of a machine that runs, and Google refuses to delete an address in use."""
    engine.configure(with_gateway("us-central1-a"))
    assert engine.up().ok
    engine.configure(with_gateway(zone))
    moved = engine.up()
    assert moved.ok, moved.text
    assert engine.world.pulled() == []
    region = zone[:-2]
    for kind, place in (
        ("Instance", f"zones/{zone}"),
        ("Disk", f"zones/{zone}"),
        ("Address", f"regions/{region}"),
    ):
        (one,) = engine.world.of_type(f"compute:{kind}")
        assert one.id.startswith(f"projects/my-project/{place}/")
    (machine,), (address,) = engine.world.of_type("compute:Instance"), engine.world.of_type("compute:Address")
    assert machine.inputs["networkInterfaces"][0]["networkIp"] == address.outputs["address"]
    assert set(engine.up().changes) == {"same"}
    assert engine.destroy().ok and engine.world.things() == {}


def test_a_protected_disk_keeps_a_gateway_from_moving_and_nothing_is_touched(engine: Engine) -> None:
    engine.configure(with_gateway("us-central1-a") | {"tpu-stack:protect": True})
    assert engine.up().ok
    before = engine.world.things()
    engine.configure(with_gateway("us-east1-d") | {"tpu-stack:protect": True})
    refused = engine.up()
    assert not refused.ok and "protect" in refused.text, refused.text
    assert {key for key in engine.world.things() if "/us-east1" not in key} >= before.keys()


def test_without_slices_the_storage_stays(engine: Engine, api: TpuApi) -> None:
    storage = {"bucket": {"name": "our-runs"}, "nfs": {"kind": "none"}}
    engine.configure(configuration(storage=storage))
    assert engine.up().ok
    engine.configure(configuration(storage=storage, slices=[]))
    given_back = engine.up()
    assert given_back.ok, given_back.text
    assert alive(api) == ([], [])
    assert any(each["type"] == "gcp:storage/bucket:Bucket" for each in engine.resources())


# --- stock-outs ---------------------------------------------------------------------------------------------------


def test_a_stock_out_past_valid_until_fails_and_leaves_nothing(engine: Engine, api: TpuApi) -> None:
    api.control.set_capacity(SPOT, 0)
    engine.configure(configuration(slices=[a_slice(valid_until="5m")]))
    operation = engine.begin("up")
    operation.wait_for("WAITING_FOR_RESOURCES")
    api.control.advance(600)
    report = operation.report()
    assert not report.ok and "was not to be had" in report.text and "Traceback" not in report.text, (
        report.text
    )
    assert alive(api) == ([], [])
    assert QUEUED not in {each["type"] for each in engine.resources()}


# --- preemption ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["preempt", "vanish"])
def test_a_lost_slice_is_drift_that_the_next_up_repairs(engine: Engine, api: TpuApi, what: str) -> None:
    before = engine.up()
    getattr(api.control, what)(FULL_NAME)
    assert engine.refresh().ok
    again = engine.up()
    assert again.ok, again.text
    assert alive(api) == ([NAME], [NAME])
    assert created(api) == 2
    assert hosts(again.outputs) != hosts(before.outputs)
    assert set(engine.up().changes) == {"same"}


def test_up_with_refresh_repairs_in_one_command(engine: Engine, api: TpuApi) -> None:
    assert engine.up().ok
    api.control.preempt(FULL_NAME, leave_nodes=True)
    again = engine.up(refresh=True)
    assert again.ok and created(api) == 2, again.text


def test_a_refresh_without_an_answer_takes_nothing_for_lost(engine: Engine, api: TpuApi) -> None:
    assert engine.up().ok
    api.control.inject("unavailable", "queuedResources.get", times=2)
    assert engine.refresh().ok
    assert set(engine.up().changes) == {"same"}
    assert created(api) == 1


# --- broken off ---------------------------------------------------------------------------------------------------


def test_an_up_that_was_killed_while_it_waited_is_taken_over_by_the_next(engine: Engine, api: TpuApi) -> None:
    api.control.set_capacity(SPOT, 0)
    operation = engine.begin("up")
    operation.wait_for("WAITING_FOR_RESOURCES")
    operation.kill()
    assert not operation.report().ok
    engine.cancel()
    api.control.set_capacity(SPOT, 16)
    again = engine.up()
    assert again.ok and "taken over" in again.text, again.text
    assert created(api) == 1
    assert alive(api) == ([NAME], [NAME])


def test_what_an_interrupted_up_left_goes_with_the_stack(engine: Engine, api: TpuApi) -> None:
    api.control.set_capacity(SPOT, 0)
    operation = engine.begin("up")
    operation.wait_for("WAITING_FOR_RESOURCES")
    operation.interrupt()
    operation.wait_for("^C received; cancelling")
    operation.interrupt()
    assert not operation.report().ok
    assert alive(api) == ([NAME], [])
    assert engine.destroy().ok
    assert alive(api) == ([], [])


# --- a network and an API that misbehave ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cut-after"])
def test_an_answer_that_fails_is_lost_or_late_changes_nothing(
    engine: Engine, api: TpuApi, kind: FaultKind
) -> None:
    for method in ("queuedResources.create", "queuedResources.get", "nodes.get"):
        api.control.inject(kind, method, times=1, seconds=2)
    report = engine.up()
    assert report.ok, report.text
    assert created(api) == 1
    api.control.inject(kind, "queuedResources.delete", times=1, seconds=2)
    assert engine.destroy().ok
    assert alive(api) == ([], [])


def test_what_belongs_to_another_stack_of_the_same_name_is_left_alone(
    engine: Engine, api: TpuApi, new_engine: EngineFactory
) -> None:
    assert engine.up().ok
    other = new_engine(declare, project_file=ROOT / "Pulumi.yaml", name="other")
    other.configure(configuration())
    report = other.up()
    assert not report.ok and "not of this stack" in report.text, report.text
    assert other.destroy().ok
    assert alive(api) == ([NAME], [NAME])


# --- direct -------------------------------------------------------------------------------------------------------


def test_a_direct_slice_has_the_same_inventory(engine: Engine, api: TpuApi) -> None:
    engine.configure(configuration(slices=[a_slice(provisioning="direct")]))
    report = engine.up()
    assert report.ok, report.text
    assert len(hosts(report.outputs)) == 4 and all(hosts(report.outputs))
    assert set(engine.up().changes) == {"same"}
    assert engine.destroy().ok
    assert alive(api) == ([], [])


def test_whoever_waits_for_a_direct_slice_is_told_what_it_may_be(
    engine: Engine, api: TpuApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "FIRST_WORD_S", 1.0)
    api.control.set_quota(SPOT, 0)
    engine.configure(configuration(slices=[a_slice(provisioning="direct", wait="1m")]))
    operation = engine.begin("up")
    operation.wait_for("HTTP 429")
    api.control.set_quota(SPOT, 16)
    assert operation.report().ok


# --- what a user gets wrong, and what nobody may read -----------------------------------------------------------------


def test_every_mistake_of_a_configuration_is_told_and_nothing_made(engine: Engine, api: TpuApi) -> None:
    engine.configure(
        configuration(slices=[a_slice(accelerator="v6e-12", capacity="cheap")], budget_usd_per_hour=-1)
    )
    for report in (engine.preview(), engine.up()):
        assert not report.ok
        assert 'tpu-stack:slices[0].accelerator: "v6e-12" is not a v6e size' in report.text
        assert "tpu-stack:slices[0].capacity" in report.text
        assert "tpu-stack:budget-usd-per-hour" in report.text
        assert "Traceback" not in report.text
    assert engine.resources() == [] and engine.world.things() == {}


def test_what_a_policy_refuses_is_told_and_nothing_made(engine: Engine, api: TpuApi) -> None:
    grant = [{"type": "v5e", "zone": "us-central1-a", "chips": 8, "capacity": "spot"}]
    engine.configure(configuration(grant=grant))
    report = engine.up()
    assert not report.ok and "allow-billable" in report.text and "Traceback" not in report.text, report.text
    assert engine.resources() == [] and alive(api) == ([], [])
    engine.configure(configuration(grant=grant, allow_billable=True))
    assert engine.preview().ok


def test_no_credential_is_in_state_output_or_log_and_no_code_in_the_state(
    engine: Engine, tmp_path: Path
) -> None:
    report = engine.up()
    assert report.ok and ACCESS_TOKEN not in report.text
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if ACCESS_TOKEN.encode() in path.read_bytes()] == []
    ours = [each for each in engine.resources() if each["type"].startswith("pulumi-python:")]
    assert len(ours) == 2
    for each in ours:
        assert len(json.dumps(each["inputs"]["__provider"])) < 200, each["type"]
