"""What is declared beside doors and privileges: regions, protection, labels, names, disks, options, the tree."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from contracts import inventory
from tests.infra.conftest import SHAPES, TWO_ZONES, Declare, Declared, Resource

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABELLED = tuple(
    f":{each}" for each in ("QueuedResource", "V2Vm", "Disk", "Address", "Bucket", "Repository", "Instance")
)


def test_of_the_sdk_only_the_files_of_what_is_used_are_loaded_and_all_of_it_is_there() -> None:
    program = """
import sys
from pulumi_gcp import projects, storage
from infra.pulumi_program import load_by_class
load_by_class()
assert projects.IAMMember.__module__ == "pulumi_gcp.projects.iam_member"
assert projects.IAMMemberConditionArgs.__module__ == "pulumi_gcp.projects._inputs"
assert projects.outputs.IAMMemberCondition and callable(projects.get_project)
assert "pulumi_gcp.projects.service" not in sys.modules, "the rest of the package was loaded"
try:
    projects.Nonsense
except AttributeError:
    assert "pulumi_gcp.projects.service" in sys.modules, "what is not found so was not looked for in the whole"
assert projects.Service and projects.IAMMember.__module__ == "pulumi_gcp.projects.iam_member"
load_by_class()
assert projects.Service.__module__ == "pulumi_gcp.projects.service"
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, cwd=ROOT)


def test_what_holds_data_is_protected_until_that_is_taken_off(declare: Declare) -> None:
    protected = {(each.kind.rpartition(":")[2], each.name) for each in declare().resources if each.protect}
    assert protected == {("Bucket", "bucket"), ("Disk", "data"), ("Repository", "repository")}
    filestore = declare(storage={"nfs": {"kind": "filestore"}}).one("filestore/instance:Instance")
    assert filestore.protect
    # Google has no protection of its own for this tier, and refuses to be asked for it.
    assert "deletionProtectionEnabled" not in filestore.inputs
    for nfs in ({"kind": "filestore"}, {"kind": "gateway"}):
        assert not [each for each in declare(protect=False, storage={"nfs": nfs}).resources if each.protect]


def test_a_disk_that_was_made_for_a_slice_is_protected_and_labelled_and_one_that_was_there_is_not_touched(
    declare: Declare,
) -> None:
    there = "projects/my-project/zones/us-central1-a/disks/corpus"
    disks = [{"name": "scratch", "size-gib": 100}, {"name": "corpus", "source": there, "mode": "read-only"}]
    one = {"name": "main", "accelerator": "v5litepod-8", "labels": {"team": "nlp"}, "data-disks": disks}
    declared = declare(slices=[one])
    queued = declared.one("QueuedResource")
    (made,) = [each for each in declared.all("Disk") if each.name.startswith("main-")]
    assert (made.name, made.protect) == ("main-scratch", True)
    scratch = "projects/my-project/zones/us-central1-a/disks/tpu-stack-dev-main-scratch"
    attached = [(disk["source_disk"], disk["mode"]) for disk in queued.inputs["data_disks"]]
    assert attached == [(scratch, "read-write"), (there, "read-only")]
    for each in (queued, made):
        assert each.inputs["labels"] == {"tpu-stack": "dev", "tpu-stack-slice": "main", "team": "nlp"}


def test_every_resource_has_a_legal_name_the_label_of_its_stack_a_component_and_a_urn_of_its_own(
    any_stack: Declared,
) -> None:
    resources = any_stack.resources
    assert len({each.urn for each in resources}) == len(resources)
    components = {each.urn for each in resources if each.kind.startswith("tpu-stack:")}
    for each in resources:
        if each.kind.startswith("gcp:"):
            assert each.parent in components, each.urn
        if each.kind.startswith("gcp:compute"):
            assert NAME.fullmatch(each.inputs["name"]), each.inputs["name"]
        if each.kind.endswith(LABELLED):
            assert each.inputs["labels"]["tpu-stack"] == "dev", each.urn
    for queued in any_stack.all("QueuedResource"):
        assert NAME.fullmatch(queued.inputs["queued_resource_id"])
    for account in any_stack.all("Account"):
        assert re.fullmatch(r"[a-z][-a-z0-9]{4,28}[a-z0-9]", account.inputs["accountId"])
    assert inventory.from_json(inventory.to_json(any_stack.inventory)) == any_stack.inventory


def test_a_slice_waits_for_the_way_in_and_out_and_for_its_rights_and_all_for_the_services(
    declare: Declare,
) -> None:
    declared = declare()
    needed = declared.needs(declared.one("QueuedResource"))
    for kind in ("Firewall", "RouterNat", "BucketIAMMember", "RepositoryIamMember"):
        # What people may do to leases is no right of the slice.
        assert {each.urn for each in declared.all(kind) if "user:" not in each.urn} <= needed, kind
    services = declared.all("projects/service:Service")
    for kind in ("compute/network:Network", "Bucket", "Repository", "Account"):
        assert {each.urn for each in services} <= declared.needs(declared.one(kind))
    filestore = declare(storage={"nfs": {"kind": "filestore"}}).all("projects/service:Service")
    names, with_filestore = ({each.inputs["service"] for each in them} for them in (services, filestore))
    assert len(names) == 8 and with_filestore - names == {"file.googleapis.com"}
    assert {each.inputs["disableOnDestroy"] for each in filestore} == {False}  # they stay when the stack goes


def test_what_holds_data_comes_first_and_nothing_that_a_tpu_stands_on_goes_before_the_last_look_for_tpus(
    any_stack: Declared,
) -> None:
    """The engine refuses to replace what is protected: whatever waits for it has not been made or changed then."""
    by_urn = {each.urn: each for each in any_stack.resources}

    def below(resource: Resource) -> set[str]:
        found, more = set[str](), {resource.urn}
        while more:
            found |= more
            more = set().union(*(any_stack.needs(by_urn[each]) for each in more)) - found
        return found - {resource.urn}

    protected = {each.urn for each in any_stack.resources if each.protect}
    free = (
        *("projects/service:Service", "compute/network:Network", "StackObjects"),
        *("BucketIAMMember", "RepositoryIamMember", "BucketObject"),
    )
    for each in any_stack.resources:
        ours = each.kind.startswith(("gcp:", "pulumi-python:")) and each.name != "hosts"
        assert not ours or each.protect or each.kind.endswith(free) or protected <= below(each), each.urn
    carries_owner = ("QueuedResource", "V2Vm", "ComputeSlice")
    (identity,) = any_stack.all("StackIdentity")
    for each in [each for kind in carries_owner for each in any_stack.all(kind)]:
        assert identity.urn in below(each), each.urn
    stands_on = (
        *("compute/network:Network", "Subnetwork", "Firewall", "Disk", "Account", "StackObjects"),
        *("RegionInstanceTemplate", "ResourcePolicy"),
    )
    hosts_own = [each for kind in stands_on for each in any_stack.all(kind) if each.name != "nodes"]
    assert {each.urn for each in hosts_own if each.name != "keeper"} <= below(identity)


def test_what_is_temporary_is_deleted_and_what_is_deleted_can_be_had_back(declare: Declare) -> None:
    bucket = declare(storage={"bucket": {"temporary-days": 3, "soft-delete-days": 14}}).one("Bucket").inputs
    assert bucket["softDeletePolicy"]["retentionDurationSeconds"] == 14 * 86400
    (deletes,) = [each for each in bucket["lifecycleRules"] if each["action"]["type"] == "Delete"]
    assert deletes["condition"] == {"age": 3, "matchesPrefixes": ["tmp/"]}


def test_the_file_servers_data_outlives_the_machine_and_a_region_that_joins_needs_no_new_export(
    declare: Declare,
) -> None:
    """Exports are made at boot: one that named today's subnets would shut out tomorrow's until somebody reboots."""
    gateway: dict[str, Any] = {"storage": {"nfs": {"kind": "gateway", "size-gib": 300}}}
    declared = declare(**gateway)
    disk, machine = declared.one("Disk"), declared.one("compute/instance:Instance")
    assert disk.inputs["size"] == 300
    assert machine.inputs["attachedDisks"][0]["source"].endswith(disk.inputs["name"])
    assert machine.inputs["attachedDisks"][0]["deviceName"] == "share"
    assert machine.inputs["networkInterfaces"][0]["networkIp"] == "10.0.0.2"
    # A new release of the image does not replace it.
    assert list(machine.options.ignoreChanges) == ["bootDisk.initializeParams.image"]
    script = machine.inputs["metadata"]["startup-script"]
    assert "/dev/disk/by-id/google-share" in script and "SHARE_CLIENTS=10.0.0.0/8\n" in script
    two = declare(**gateway, slices=TWO_ZONES, allow_cross_region=True)
    assert two.one("compute/instance:Instance").inputs["metadata"]["startup-script"] == script
    assert all(each.inputs["ipCidrRange"].startswith("10.") for each in two.all("Subnetwork"))


@pytest.mark.parametrize(
    ("nfs", "source"),
    [({"kind": "gateway"}, "10.0.0.2:/srv/share"), ({"kind": "filestore"}, "10.7.0.2:/share")],
)
def test_hosts_mount_the_share_at_boot(declare: Declare, nfs: dict[str, Any], source: str) -> None:
    declared = declare(storage={"nfs": nfs | {"mount": "/mnt/ours"}})
    script = declared.one("QueuedResource").inputs["metadata"]["startup-script"]
    assert f"SHARE_SOURCE={source}" in script
    assert "SHARE_MOUNT=/mnt/ours" in script
    assert declared.inventory.storage.nfs_source == source
    assert declared.inventory.storage.nfs_mount == "/mnt/ours"
    without = declare(storage={"nfs": {"kind": "none"}})
    assert "startup-script" not in without.one("QueuedResource").inputs["metadata"]


def test_slices_are_asked_for_as_configured(declare: Declare) -> None:
    spot = {"accelerator": "v5litepod-16", "capacity": "spot"}
    big = spot | {"name": "big", "count": 2, "valid-until": "6h", "wait": "5h"}
    direct = spot | {"name": "d", "accelerator": "v5litepod-8", "provisioning": "direct", "wait": "25m"}
    declared = declare(slices=[big, direct])
    queued, node = declared.one("QueuedResource").inputs, declared.one("V2Vm")
    asked = {
        "queued_resource_id": "tpu-stack-dev-big", "owner": "0123abcd", "capacity": "spot", "node_count": 2,
        "valid_until_s": 6 * 3600, "wait_s": 5 * 3600,
    }  # fmt: skip
    assert {name: queued[name] for name in asked} == asked
    asked = {
        "name": "tpu-stack-dev-d", "zone": "us-central1-a", "acceleratorType": "v5litepod-8",
        "runtimeVersion": "v2-alpha-tpuv5-lite", "schedulingConfig": {"spot": True},
    }  # fmt: skip
    assert {name: node.inputs[name] for name in asked} == asked
    # The provider adds half a minute of its own where a quota is used up.
    assert node.options.customTimeouts.create == "1470s"
    assert node.options.deleteBeforeReplace
    # Google shows no such block of an on-demand one, and one that is sent and not shown replaces it at every `up`.
    on_demand = declare(slices=[{"name": "d", "accelerator": "v5litepod-8", "provisioning": "direct"}])
    assert "schedulingConfig" not in on_demand.one("V2Vm").inputs


def test_a_slice_with_several_zones_has_a_subnet_in_each_region_and_the_inventory_says_where_it_is(
    declare: Declare,
) -> None:
    zones = ["us-central1-a", "us-west4-a", "europe-west4-b"]
    spread = {"name": "main", "accelerator": "v5litepod-16", "zones": zones, "zone-wait": "10m"}
    declared = declare(slices=[spread], allow_cross_region=True)
    asked = declared.one("QueuedResource").inputs
    assert (asked["zone"], asked["zones"], asked["strategy"], asked["zone_wait_s"]) == (
        zones[0],
        zones,
        "first",
        600,
    )
    assert asked.get("subnetwork") is None
    made = {each.inputs["region"]: each for each in declared.all("compute/subnetwork:Subnetwork")}
    regions = ("us-central1", "us-west4", "europe-west4")
    assert set(made) == set(regions)
    assert asked["subnetworks"] == {
        zone: f"projects/my-project/regions/{region}/subnetworks/{made[region].inputs['name']}"
        for zone, region in zip(zones, regions, strict=True)
    }
    assert asked["store_url"] == "gs://my-project-dev-tpu-stack/control"
    (one,) = declared.inventory.slices
    assert (one.zone, one.zones) == (zones[0], tuple(zones))
    # What has one zone is asked for as ever.
    plain = declare().one("QueuedResource").inputs
    assert not {"zones", "strategy", "zone_wait_s", "subnetworks"} & set(plain)


def test_the_numbered_nodes_of_a_multislice_have_legal_names(declare: Declare) -> None:
    many = {"name": "a-name-of-thirty-characters-ab", "accelerator": "v5litepod-4", "count": 256}
    queued = declare(slices=[many], stack="a-stack-with-a-rather-long-name-of-its-own").one("QueuedResource")
    assert NAME.fullmatch(queued.inputs["queued_resource_id"] + "-255")


def test_another_topology_than_the_names_own_is_asked_for_by_topology(declare: Declare) -> None:
    shape = {"generation": "v4", "topology": "4x4x16"}
    declared = declare(
        zone="us-central2-b",
        slices=[{"name": "q", **shape}, {"name": "d", **shape, "provisioning": "direct"}],
    )
    queued, node = declared.one("QueuedResource").inputs, declared.one("V2Vm").inputs
    assert "acceleratorType" not in node
    assert node["acceleratorConfig"] == {"type": "V4", "topology": "4x4x16"}
    assert not queued.get("accelerator_type")
    assert (queued["accelerator_generation"], queued["topology"]) == ("V4", "4x4x16")


def test_the_inventory_numbers_the_hosts_of_a_multislice_through(declare: Declare) -> None:
    (made,) = declare(**SHAPES["multislice"]).inventory.slices
    names = [f"t1v-n-n-{node}-w-{worker}" for node in (0, 1) for worker in (0, 1)]
    assert made.count == 2
    assert [(host.index, host.name) for host in made.hosts] == list(enumerate(names))


def test_the_inventory_says_where_everything_is(declare: Declare) -> None:
    reference = "us-central1-docker.pkg.dev/my-project/images/jax@sha256:" + "0" * 64
    declared = declare(
        slices=TWO_ZONES,
        allow_cross_region=True,
        storage={"bucket": {"name": "our-runs"}},
        images={"references": {"jax": reference}, "repository": "images"},
    )
    made = declared.inventory
    assert (made.stack, made.project) == ("dev", "my-project")
    assert (made.storage.bucket_url, made.storage.bucket_region) == ("gs://our-runs", "us-central1")
    assert made.images == {"jax": reference}
    assert declared.image_repository == "us-central1-docker.pkg.dev/my-project/images"
    assert made.gateway is not None
    gateway = (made.gateway.name, made.gateway.zone, made.gateway.address)
    assert gateway == ("tpu-stack-dev-gateway", "us-central1-a", "10.0.0.2")
    found = [
        (each.name, each.zone, each.capacity, each.origin, each.devices_per_host) for each in made.slices
    ]
    assert found == [
        ("a", "us-central1-a", "spot", "queued-resource tpu-stack-dev-a", 4),
        ("b", "us-central1-a", "on-demand", "node tpu-stack-dev-b", 8),
        ("c", "us-east1-d", "on-demand", "queued-resource tpu-stack-dev-c", 8),
    ]
    # Bucket, images and file server are in the region of the first slice.
    assert declared.one("Bucket").inputs["location"] == "US-CENTRAL1"
    assert declared.one("Repository").inputs["location"] == "us-central1"
    host = made.slices[0].hosts[0]
    assert host.host_keys == ("ssh-ed25519 AAAA",)
    assert host.reach == "iap"
    assert json.loads(inventory.to_json(made))["version"] == inventory.VERSION
