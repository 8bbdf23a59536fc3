"""The life of a stack: the whole program on the real engine, the simulated Cloud TPU API and a stand-in for gcp.

Each test is one stack that goes through all that belongs together. What the provider decides by itself is tested
without an engine in tests/infra/cloud_tpu.
"""

import json
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from contracts import inventory
from infra import slices
from infra.documents import Documents
from infra.pulumi_program import declare
from rehearsal.engine import ACCESS_TOKEN, Engine, Report
from rehearsal.simulated_cloud import FaultKind, SimulatedCloud
from tests.engine import gke_api
from tests.engine.conftest import EngineFactory
from tests.engine.test_pulumi_typed import launcher
from tools.pulumi_cli import PulumiCli

ROOT = Path(__file__).resolve().parents[2]
SPOT = "us-central1-a:v5litepod:spot"
NAME = "tpu-stack-dev-main"
FULL_NAME = f"projects/my-project/locations/us-central1-a/queuedResources/{NAME}"
IDENTITY = "pulumi-python:dynamic/tpu_stack:StackIdentity"
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


def alive(api: SimulatedCloud) -> tuple[list[str], list[str]]:
    """The names of queued resources and nodes."""
    there = api.control.alive()
    return (
        sorted(each["name"].rpartition("/")[2] for each in there["queuedResources"]),
        sorted(each["name"].rpartition("/")[2] for each in there["nodes"]),
    )


def done(report: Report, op: str) -> list[str]:
    """The names of the resources with which that was done, the engine's own providers left out."""
    return sorted(each.name for each in report.steps if each.op == op and "providers:" not in each.type)


def created(api: SimulatedCloud) -> int:
    """How often a queued resource of this name has been made."""
    return sum(each.name == FULL_NAME and each.state == "ACCEPTED" for each in api.control.journal())


def hosts(outputs: Any) -> list[str]:
    (one,) = inventory.from_json(outputs["inventory"]).slices
    return [host.name for host in one.hosts]


FAULTS: tuple[tuple[FaultKind, str], ...] = (
    ("cut-after", "queuedResources.create"),
    ("unavailable", "queuedResources.get"),
    ("too-many-requests", "nodes.get"),
    ("slow", "nodes.getGuestAttributes"),
)


@pytest.mark.timeout(400)  # a dozen operations
def test_a_slice_is_refused_previewed_made_kept_relabelled_lost_replaced_and_destroyed(
    engine: Engine, api: SimulatedCloud, new_engine: EngineFactory, tmp_path: Path
) -> None:
    engine.configure(
        configuration(slices=[a_slice(accelerator="v6e-12", capacity="cheap")], budget_usd_per_hour=-1)
    )
    report = engine.up()
    assert not report.ok and "Traceback" not in report.text
    assert 'tpu-stack:slices[0].accelerator: "v6e-12" is not a v6e size' in report.text
    for key in ("slices[0].capacity", "budget-usd-per-hour"):  # every mistake is told
        assert f"tpu-stack:{key}: " in report.text

    grant = [{"type": "v5e", "zone": "us-central1-a", "chips": 8, "capacity": "spot"}]
    engine.configure(configuration(grant=grant))
    report = engine.up()
    assert not report.ok and "allow-billable" in report.text and "Traceback" not in report.text, report.text
    engine.configure(configuration(grant=grant, allow_billable=True))
    preview = engine.preview()
    assert preview.ok, preview.text
    assert [said for said in preview.messages("info") if "stand-in: nothing is made at Google" in said]
    assert "using pulumi-resource-gcp from $PATH" not in preview.text
    assert engine.resources() == [] and engine.world.things() == {} and alive(api) == ([], [])

    engine.configure(configuration())
    for kind, method in FAULTS:  # an answer that fails, is lost or is late changes nothing
        api.control.inject(kind, method, times=1, seconds=1)
    first = engine.up()
    assert first.ok, first.text
    assert alive(api) == ([NAME], [NAME]) and created(api) == 1
    assert QUEUED in {each["type"] for each in engine.resources()}
    assert len(hosts(first.outputs)) == 4

    assert ACCESS_TOKEN not in first.text
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if ACCESS_TOKEN.encode() in path.read_bytes()] == []
    ours = [each for each in engine.resources() if each["type"].startswith("pulumi-python:")]
    assert len(ours) == 3
    for each in ours:  # the state holds no code
        assert len(json.dumps(each["inputs"]["__provider"])) < 200, each["type"]

    api.control.inject("unavailable", "queuedResources.get", times=2)
    assert engine.refresh().ok  # which takes nothing for lost
    again = engine.up()
    assert again.ok and set(again.changes) == {"same"} and created(api) == 1, again.text

    engine.configure(configuration(slices=[a_slice(labels={"team": "nlp"})]))
    labelled = engine.up()
    assert labelled.ok and done(labelled, "update") == ["main", "main"], labelled.text
    assert created(api) == 1
    (node,) = api.control.alive()["nodes"]
    assert node["labels"]["team"] == "nlp"

    # A slice that is lost is drift that the next `up` repairs.
    api.control.preempt(FULL_NAME, leave_nodes=True)
    assert engine.refresh().ok
    repaired = engine.up()
    assert repaired.ok, repaired.text
    assert alive(api) == ([NAME], [NAME]) and created(api) == 2
    assert hosts(repaired.outputs) != hosts(first.outputs)
    api.control.vanish(FULL_NAME)
    in_one_command = engine.up(refresh=True)
    assert in_one_command.ok and created(api) == 3, in_one_command.text

    # Another stack that asks for one of the same name leaves it alone.
    other = new_engine(declare, project_file=ROOT / "Pulumi.yaml", name="other")
    other.configure(configuration())
    refused = other.up()
    assert not refused.ok and "belongs to another stack" in refused.text, refused.text
    assert other.destroy().ok
    assert alive(api) == ([NAME], [NAME])

    # There is room for only one of the two: the old one has to go before the new one is asked for.
    api.control.set_capacity(SPOT, 16)
    engine.configure(configuration(slices=[a_slice(accelerator="v5litepod-8")]))
    replaced = engine.up()
    assert replaced.ok and done(replaced, "delete-replaced") == ["main"], replaced.text
    assert created(api) == 4
    assert len(hosts(replaced.outputs)) == 1

    api.control.inject("cut-before", "queuedResources.delete", times=1)
    assert engine.destroy().ok
    assert alive(api) == ([], []) and engine.resources() == [] and engine.world.things() == {}


def test_what_is_out_of_stock_is_waited_for_taken_over_or_given_up(
    engine: Engine, api: SimulatedCloud
) -> None:
    api.control.set_capacity(SPOT, 0)
    killed = engine.begin("up")
    killed.wait_for("WAITING_FOR_RESOURCES")
    killed.kill()
    assert not killed.report().ok
    locked = engine.up()
    assert not locked.ok and "the stack is currently locked" in locked.text and "pulumi cancel" in locked.text
    engine.cancel()
    waiting = engine.begin("up")
    waiting.wait_for("taken over")
    api.control.set_capacity(SPOT, 16)
    report = waiting.report()
    assert report.ok and len(hosts(report.outputs)) == 4, report.text
    assert created(api) == 1 and alive(api) == ([NAME], [NAME])
    assert engine.destroy().ok

    api.control.set_capacity(SPOT, 0)
    engine.configure(configuration(slices=[a_slice(valid_until="5m")]))
    too_late = engine.begin("up")
    too_late.wait_for("WAITING_FOR_RESOURCES")
    api.control.advance(600)
    report = too_late.report()
    assert not report.ok and "is not available" in report.text and "Traceback" not in report.text, report.text
    assert alive(api) == ([], [])
    assert QUEUED not in {each["type"] for each in engine.resources()}

    engine.configure(configuration())
    api.control.set_quota(SPOT, 8)
    report = engine.up()  # told at once, and not asked for again
    assert not report.ok and "quota" in report.text.lower() and "Traceback" not in report.text, report.text
    assert alive(api) == ([], [])

    api.control.set_quota(SPOT, 64)
    interrupted = engine.begin("up")
    interrupted.wait_for("WAITING_FOR_RESOURCES")
    interrupted.interrupt()
    interrupted.wait_for("^C received; cancelling")
    interrupted.interrupt()
    assert not interrupted.report().ok
    assert alive(api) == ([NAME], [])
    engine.configure(configuration(slices=[]))
    report = engine.up()  # its slice is configured no more
    assert report.ok and alive(api) == ([], []), report.text
    assert engine.destroy().ok


def test_a_slice_with_several_zones_is_kept_in_one_whatever_was_interrupted_and_goes_where_there_is_room(
    buckets: str, engine: Engine, api: SimulatedCloud
) -> None:
    zones = ["us-central1-a", "us-west4-a", "europe-west4-b"]
    pools = [f"{zone}:v5litepod:spot" for zone in zones]

    def configured(**changes: Any) -> dict[str, Any]:
        storage = {"bucket": {"name": "our-runs"}, "nfs": {"kind": "none"}}
        return configuration(
            slices=[a_slice(zones=zones, **changes)], storage=storage, allow_cross_region=True
        )

    def stands() -> dict[str, str]:
        found = api.control.alive()["queuedResources"]
        return {each["name"].split("/")[3]: each["state"]["state"] for each in found}

    for pool in pools:
        api.control.set_capacity(pool, 0)
    engine.configure(configured(strategy="race"))
    killed = engine.begin("up")
    killed.wait_for("us-central1-a WAITING_FOR_RESOURCES, us-west4-a WAITING")
    killed.kill()
    assert not killed.report().ok
    assert stands() == dict.fromkeys(zones, "WAITING_FOR_RESOURCES")
    for pool in pools[1:]:  # both are served while nobody is there
        api.control.set_capacity(pool, 16)
    api.control.advance(3600)
    engine.cancel()
    report = engine.up()
    assert report.ok and len(hosts(report.outputs)) == 4, report.text
    api.control.advance(3600)
    assert stands() == {"us-west4-a": "ACTIVE"}
    (one,) = inventory.from_json(report.outputs["inventory"]).slices
    assert (one.zone, one.zones) == ("us-west4-a", tuple(zones))
    assert set(engine.up().changes) == {"same"}

    # One zone at a time from now on, each for a minute; and it is preempted.
    engine.configure(configured(zone_wait="1m"))
    api.control.set_capacity(pools[1], 0)
    api.control.preempt(f"projects/my-project/locations/us-west4-a/queuedResources/{NAME}")
    again = engine.begin("up", refresh=True)
    for zone in zones[:2]:
        again.wait_for(f"{zone} WAITING_FOR_RESOURCES")
        api.control.advance(90)
        again.wait_for(f"withdrawn in {zone}: nothing within 1 min")
    report = again.report()
    assert report.ok, report.text
    (one,) = inventory.from_json(report.outputs["inventory"]).slices
    assert (one.zone, len(one.hosts)) == ("europe-west4-b", 4)
    assert engine.destroy().ok
    assert alive(api) == ([], [])


def test_data_is_protected_a_gateway_moves_without_its_disk_being_pulled_and_all_can_go(
    buckets: str, engine: Engine, api: SimulatedCloud
) -> None:
    def stack(zone: str, **more: Any) -> dict[str, Any]:
        storage = {"bucket": {"name": "our-runs"}, "nfs": {"kind": "gateway", "zone": zone}}
        return configuration(network={}, storage=storage, **more)

    engine.configure(stack("us-central1-a", protect=True))
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

    engine.configure(stack("us-central1-a", protect=True, slices=[]))
    without_slices = engine.up()
    assert without_slices.ok and alive(api) == ([], []), without_slices.text
    assert any(each["type"] == "gcp:storage/bucket:Bucket" for each in engine.resources())

    # None of these has made anything once it is refused, though no preview has come before it.
    before = engine.world.things()
    elsewhere = stack("us-central1-a")["tpu-stack:storage"] | {"bucket": {"name": "others"}}
    for refusal in (
        stack("us-east1-d", protect=True, slices=[]),
        stack("us-central1-a", protect=True, slices=[]) | {"tpu-stack:storage": elsewhere},
        stack(
            "us-central1-a", protect=True, slices=[], images={"region": "us-east1"}, allow_cross_region=True
        ),
    ):
        engine.configure(refusal)
        refused = engine.up()
        assert not refused.ok and "marked for protection" in refused.text, refused.text
        assert engine.world.things() == before

    engine.configure(stack("us-central1-a", slices=[]))
    assert engine.up().ok
    without_keeper = engine.world.things()
    engine.configure(stack("us-central1-a", slices=[], keeper=True, notify={"slack": "my-slack"}))
    on = engine.up()
    assert on.ok, on.text
    assert done(on, "update") == ["machine", "specification"]
    (document,) = engine.world.with_type("storage:BucketObject")
    assert json.loads(document.outputs["content"])["environment"].keys() == {"TPU_STACK_SLACK_WEBHOOK"}
    (machine,) = engine.world.with_type("compute:Instance")
    assert machine.outputs["serviceAccount"]["email"].startswith("tpu-stack-dev-keeper@")
    assert set(engine.up().changes) == {"same"}
    engine.configure(stack("us-central1-a", slices=[]))
    off = engine.up()
    assert off.ok, off.text
    assert {key: each.inputs for key, each in engine.world.things().items()} == {
        key: each.inputs for key, each in without_keeper.items()
    }
    # The real provider takes a disk out of a machine that runs, and Google refuses to delete an address in use.
    zone = "us-east1-d"
    engine.configure(stack(zone, slices=[]))
    moved = engine.up()
    assert moved.ok, moved.text
    assert engine.world.pulled() == []
    for kind, place in (
        ("Instance", f"zones/{zone}"),
        ("Disk", f"zones/{zone}"),
        ("Address", f"regions/{zone[:-2]}"),
    ):
        (one,) = engine.world.with_type(f"compute:{kind}")
        assert one.id.startswith(f"projects/my-project/{place}/")
    (machine,), (address,) = (engine.world.with_type(f"compute:{kind}") for kind in ("Instance", "Address"))
    assert machine.inputs["networkInterfaces"][0]["networkIp"] == address.outputs["address"]
    assert set(engine.up().changes) == {"same"}
    runs = Documents("gs://our-runs/runs")
    runs.write("a/run.json", {}, version=0)
    refused = engine.destroy()
    assert not refused.ok and "gs://our-runs holds runs/, and a bucket with data is not" in refused.text
    runs.clear()
    destroyed = engine.destroy()
    assert destroyed.ok, destroyed.text
    assert (
        engine.world.things() == {} and engine.resources() == [] and Documents("gs://our-runs").names() == []
    )


def until_nodes(api: SimulatedCloud, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not alive(api)[1]:
        assert time.monotonic() < deadline, api.control.alive()
        time.sleep(0.05)


BUCKET = {"name": "our-runs"}
NO_NFS: dict[str, Any] = {"bucket": BUCKET, "nfs": {"kind": "none"}}
GATEWAY: dict[str, Any] = {"bucket": BUCKET, "nfs": {"kind": "gateway"}}
A_DISK = [{"name": "scratch", "size-gib": 100}]
ONE_HOST = a_slice(accelerator="v5litepod-8", data_disks=A_DISK)


@pytest.mark.parametrize(
    ("more", "moment"),
    [
        pytest.param(
            {"storage": GATEWAY, "keeper": True, "slices": [ONE_HOST]}, "WAITING_FOR_RESOURCES",
            id="with a keeper and a data disk",
        ),
        pytest.param(
            {"storage": GATEWAY, "protect": True, "allow_cross_region": True,
             "slices": [a_slice(zones=["us-central1-a", "us-west4-a"], strategy="race")]},
            "us-central1-a WAITING_FOR_RESOURCES, us-west4-a WAITING", id="in two zones with protected data",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"storage": NO_NFS, "slices": [a_slice(provisioning="direct")]}, "", id="while a node is made",
            marks=pytest.mark.nightly,
        ),
    ],
)  # fmt: skip
def test_what_a_killed_up_asked_for_is_removed_before_what_it_stands_on(
    buckets: str, engine: Engine, api: SimulatedCloud, more: dict[str, Any], moment: str
) -> None:
    """It is served after all, and no state knows of it: Google then deletes no network or disk that it uses."""
    pools = [SPOT, "us-west4-a:v5litepod:spot"]
    for pool in pools if moment else ():
        api.control.set_capacity(pool, 0)
    api.control.inject("slow", "operations.get", times=1000, seconds=0 if moment else 5)
    engine.configure(configuration(network={}, **more))
    up = engine.begin("up")
    if moment:
        up.wait_for(moment)
    else:
        until_nodes(api)
    up.kill()
    assert not up.report().ok
    engine.cancel()
    for pool in pools:
        api.control.set_capacity(pool, 16)
    api.control.clear_faults()
    api.control.advance(3600)
    until_nodes(api)

    api.control.cut_off("us-central1-a")
    unknown = engine.destroy()
    assert not unknown.ok and "could not say what it holds in us-central1-a" in unknown.text, unknown.text
    assert IDENTITY in {each["type"] for each in engine.resources()}
    api.control.clear_faults()
    destroyed = engine.destroy()
    assert alive(api) == ([], []), destroyed.text
    if more.get("protect"):
        assert not destroyed.ok and "protect" in destroyed.text
        return
    assert destroyed.ok, destroyed.text
    # An object that was written as the program was killed is in no state. The stack empties its folder of the bucket
    # before the bucket goes, which the record of the stand-in's provider does not see.
    left = [name for name in engine.world.things() if not name.endswith("control/stack.json")]
    assert left == [] and engine.resources() == []


def test_a_direct_slice_has_the_same_inventory_and_filestore_is_mounted(
    engine: Engine, api: SimulatedCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "FIRST_WORD_S", 1.0)
    api.control.set_quota(SPOT, 0)
    engine.configure(configuration(slices=[a_slice(provisioning="direct", wait="1m")]))
    operation = engine.begin("up")
    operation.wait_for("HTTP 429")  # what it may be waiting for is told
    api.control.set_quota(SPOT, 64)
    report = operation.report()
    assert report.ok, report.text
    assert len(hosts(report.outputs)) == 4 and all(hosts(report.outputs))
    assert set(engine.up().changes) == {"same"}

    # In a preview the network of Filestore is known, and its address is not.
    filestore = {"bucket": False, "nfs": {"kind": "filestore"}}
    engine.configure(configuration(storage=filestore, slices=[a_slice(name="second")]))
    preview = engine.preview()
    assert preview.ok, preview.text
    made = engine.up()
    assert made.ok, made.text
    source = inventory.from_json(made.outputs["inventory"]).storage.nfs_source
    assert source is not None and source.endswith(":/share") and "not-known" not in source
    (node,) = api.control.alive()["nodes"]
    assert f"SHARE_SOURCE={source}" in node["metadata"]["startup-script"]
    assert engine.destroy().ok
    assert alive(api) == ([], [])


def test_one_line_makes_a_slice_node_pools_of_a_cluster_and_nothing_is_left_when_it_goes(
    buckets: str, engine: Engine, api: SimulatedCloud
) -> None:
    kept: dict[str, Any] = {"storage": {"nfs": {"kind": "none"}}, "network": {}, "budget_usd_per_hour": 50}
    engine.configure(configuration(slices=[a_slice()], **kept))
    assert engine.up().ok and alive(api) == ([NAME], [NAME])

    engine.configure(configuration(slices=[a_slice(provisioning="node-pool")], **kept))
    moved = engine.up()
    assert moved.ok, moved.text
    assert alive(api) == ([], [])
    made = inventory.from_json(moved.outputs["inventory"])
    (one,) = made.slices
    assert made.cluster is not None and one.pool is not None and one.hosts == ()
    assert re.fullmatch(r"https://gke-[0-9a-f]+-1\.us-central1\.gke\.goog", str(made.cluster.endpoint))
    pool = engine.world.find(
        "gcp:container/nodePool:NodePool",
        "projects/my-project/locations/us-central1-a/clusters/tpu-stack-dev/nodePools/main",
    )
    assert pool is not None and pool.inputs["placementPolicy"]["tpuTopology"] == "4x4"
    ok, shown = engine.type("stack", "output", "--json")
    assert ok and json.loads(shown)["inventory"] == moved.outputs["inventory"], "an output is secret"

    # Nodes that run are kept when a pool may have none, and again when it has to have all.
    for scale_to_zero, autoscaled in ((True, True), (False, False)):
        resized = a_slice(provisioning="node-pool", scale_to_zero=scale_to_zero)
        engine.configure(configuration(slices=[resized], **kept))
        changed = engine.up()
        assert changed.ok and done(changed, "update") == ["main", "specification"], changed.text
        assert set(changed.changes) == {"same", "update"}, changed.text
        (pool,) = (
            each for each in engine.world.with_type("container:NodePool") if each.inputs["name"] == "main"
        )
        assert (pool.inputs.get("autoscaling") is not None) is autoscaled and pool.outputs["nodeCount"] == 4
        assert set(engine.up().changes) == {"same"}

    networks = {"authorized-networks": ["203.0.113.0/24"]}
    engine.configure(configuration(slices=[a_slice(provisioning="node-pool")], cluster=networks, **kept))
    by_address = engine.up()
    found = inventory.from_json(by_address.outputs["inventory"]).cluster
    assert found is not None and found.ca_certificate == "stand-in", by_address.text
    assert engine.destroy().ok
    assert engine.resources() == [] and engine.world.things() == {}


def test_a_pool_that_gke_could_not_fill_is_explained_and_made_again_and_one_of_an_interrupted_up_is_adopted(
    buckets: str, new_engine: EngineFactory, cli: PulumiCli, tmp_path: Path
) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    if cli.language_host is None:
        launcher(plugins / "pulumi-language-python", "tests.engine.language_stand_in", cli.program_script)
    engine = new_engine(declare, project_file=ROOT / "Pulumi.yaml", plugins=plugins)
    project = engine.folder / "work" / "Pulumi.yaml"
    python = {"name": "python", "options": {"virtualenv": sys.prefix}}
    project.write_text(json.dumps(yaml.safe_load(project.read_text()) | {"runtime": python}))
    name = "projects/my-project/locations/us-central1-a/clusters/tpu-stack-dev/nodePools/main"
    full = "GCE_STOCKOUT: the zone us-central1-a has not enough resources"
    kept: dict[str, Any] = {"storage": {"nfs": {"kind": "none"}}, "network": {}}

    def pools() -> dict[str, Any]:
        return {each.inputs["name"]: each for each in engine.world.with_type("container:NodePool")}

    with gke_api.served(engine.world) as url:
        configured = configuration(slices=[a_slice(provisioning="node-pool")], **kept)
        engine.configure(configured | {"gcp:containerCustomEndpoint": url})

        engine.world.set_fault(no_room={"main": full})
        refused = engine.up()
        assert not refused.ok and full in refused.text and "Traceback" not in refused.text, refused.text
        preview = engine.preview()
        assert preview.ok and full in preview.text, preview.text
        assert done(preview, "replace") == ["main"], preview.text
        again = engine.up()
        assert not again.ok and full in again.text, "a pool without nodes is taken for made"
        engine.world.set_fault()
        served = engine.up()
        assert served.ok and done(served, "replace") == ["main"] and engine.world.errors() == {}, served.text
        # Whatever made it so later: what the state says of its making is of no account.
        engine.world.set_error(name, full)
        mended = engine.up()
        assert mended.ok and done(mended, "replace") == ["main"] and engine.world.errors() == {}, mended.text

        assert engine.destroy().ok
        for held in ("clusters/tpu-stack-dev", "nodePools/main"):
            interrupt(engine, held)
            report = engine.up()
            assert not report.ok and "Traceback" not in report.text, report.text
            (command,) = set(re.findall(r"`(pulumi import .*?)`", report.text))
            adopted, shown = engine.type(*shlex.split(command)[1:], "--yes")
            assert adopted, f"{command}\n{shown}"
        completed = engine.up()
        assert completed.ok and set(completed.changes) <= {"same", "update", "create"}, completed.text
        assert set(engine.up().changes) == {"same"}
        assert engine.destroy().ok
    assert engine.resources() == [] and engine.world.things() == {}


def interrupt(engine: Engine, *held: str) -> None:
    """Kill an `up` while these are being made."""
    engine.world.set_fault(held=held)
    killed = engine.begin("up")
    ends = time.monotonic() + 120
    while not all(any(each.endswith(own_id) for each in engine.world.things()) for own_id in held):
        assert time.monotonic() < ends and not killed.wait(0), killed.report().text
        time.sleep(0.1)
    killed.kill()
    assert not killed.report().ok
    engine.end_orphans()
    engine.cancel()
    engine.world.set_fault()
