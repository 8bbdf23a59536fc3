"""What is declared beside doors and privileges: regions, protection, labels, names, disks, options, the tree."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from contracts import inventory
from tests.infra.conftest import SHAPES, TWO_ZONES, every_shape

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABELLED = ("QueuedResource", "V2Vm", "Disk", "Address", "Bucket", "Repository", "compute/instance:Instance")


def test_of_the_sdk_only_the_files_of_what_is_used_are_loaded_and_all_of_it_is_there() -> None:
    program = """
import sys
from pulumi_gcp import projects, storage
from infra.program import load_by_class
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


def test_bucket_images_and_file_server_are_in_the_region_of_the_slices(declare: Any) -> None:
    declared = declare()
    assert declared.one("Bucket").inputs["location"] == "US-CENTRAL1"
    assert declared.one("Repository").inputs["location"] == "us-central1"
    assert declared.one("compute/instance:Instance").inputs["zone"] == "us-central1-a"
    assert {each.inputs["region"] for each in declared.all("Subnetwork")} == {"us-central1"}


def test_what_holds_data_is_protected(declare: Any) -> None:
    declared = declare()
    assert {(each.kind.rpartition(":")[2], each.name) for each in declared.resources if each.protect} == {
        ("Bucket", "bucket"),
        ("Disk", "data"),
        ("Repository", "repository"),
    }
    filestore = declare(storage={"nfs": {"kind": "filestore"}}).one("filestore/instance:Instance")
    assert filestore.protect
    # Google has no protection of its own for this tier, and refuses to be asked for it.
    assert "deletionProtectionEnabled" not in filestore.inputs


def test_a_data_disk_that_was_made_for_a_slice_is_protected_and_one_that_was_there_is_not_touched(
    declare: Any,
) -> None:
    there = "projects/my-project/zones/us-central1-a/disks/corpus"
    disks = [
        {"name": "scratch", "size-gib": 100},
        {"name": "corpus", "source": there, "mode": "read-only"},
    ]
    declared = declare(slices=[{"name": "main", "accelerator": "v5litepod-8", "data-disks": disks}])
    (made,) = [each for each in declared.all("Disk") if each.name == "main-scratch"]
    assert made.protect
    assert not [each for each in declared.all("Disk") if "corpus" in each.name]
    assert [
        (disk["source_disk"], disk["mode"]) for disk in declared.one("QueuedResource").inputs["data_disks"]
    ] == [
        ("projects/my-project/zones/us-central1-a/disks/tpu-stack-dev-main-scratch", "read-write"),
        (there, "read-only"),
    ]


def test_protection_can_be_taken_off_to_destroy_everything(declare: Any) -> None:
    declared = declare(protect=False, storage={"nfs": {"kind": "filestore"}})
    assert not [each for each in declared.resources if each.protect]


@every_shape
def test_everything_that_can_be_labelled_says_which_stack_it_is_of(
    declare: Any, values: dict[str, Any]
) -> None:
    declared = declare(**values)
    labelled = [each for kind in LABELLED for each in declared.all(kind)]
    assert labelled
    for each in labelled:
        assert each.inputs["labels"]["tpu-stack"] == "dev", each.urn


def test_a_slice_and_its_disks_say_which_slice_they_are_of_and_keep_the_users_labels(declare: Any) -> None:
    declared = declare(
        slices=[
            {
                "name": "main",
                "accelerator": "v5litepod-8",
                "labels": {"team": "nlp"},
                "data-disks": [{"name": "scratch", "size-gib": 100}],
            }
        ]
    )
    (disk,) = [each for each in declared.all("Disk") if each.name == "main-scratch"]
    for each in (declared.one("QueuedResource"), disk):
        assert each.inputs["labels"] == {"tpu-stack": "dev", "tpu-stack-slice": "main", "team": "nlp"}


@every_shape
def test_every_name_is_one_that_google_takes(declare: Any, values: dict[str, Any]) -> None:
    declared = declare(**values)
    named = [each for each in declared.resources if each.kind.startswith("gcp:compute")]
    assert named
    for each in named:
        assert NAME.fullmatch(each.inputs["name"]), each.inputs["name"]
    for queued in declared.all("QueuedResource"):
        assert NAME.fullmatch(queued.inputs["queued_resource_id"])
    account = declared.one("Account").inputs["accountId"]
    assert re.fullmatch(r"[a-z][-a-z0-9]{4,28}[a-z0-9]", account)


@every_shape
def test_no_two_resources_share_a_urn(declare: Any, values: dict[str, Any]) -> None:
    urns = [each.urn for each in declare(**values).resources]
    assert len(urns) == len(set(urns))


@every_shape
def test_every_resource_stands_under_its_component(declare: Any, values: dict[str, Any]) -> None:
    declared = declare(**values)
    components = {each.urn for each in declared.resources if each.kind.startswith("tpu-stack:")}
    for each in declared.resources:
        if each.kind.startswith("gcp:"):
            assert each.parent in components, each.urn


def test_a_slice_waits_for_the_way_in_and_out_and_for_its_rights(declare: Any) -> None:
    declared = declare()
    needed = declared.needs(declared.one("QueuedResource"))
    for kind in ("Firewall", "RouterNat", "BucketIAMMember", "RepositoryIamMember"):
        for each in declared.all(kind):
            assert each.urn in needed, each.urn


def test_all_waits_for_the_services(declare: Any) -> None:
    declared = declare()
    services = {each.urn for each in declared.all("projects/service:Service")}
    assert len(services) == 8
    for kind in ("compute/network:Network", "Bucket", "Repository", "Account"):
        assert services <= declared.needs(declared.one(kind))


def test_services_stay_on_when_the_stack_goes(declare: Any) -> None:
    for each in declare().all("projects/service:Service"):
        assert each.inputs["disableOnDestroy"] is False


def test_filestore_needs_its_own_service(declare: Any) -> None:
    def names(declared: Any) -> set[str]:
        return {each.inputs["service"] for each in declared.all("projects/service:Service")}

    assert names(declare(storage={"nfs": {"kind": "filestore"}})) - names(declare()) == {
        "file.googleapis.com"
    }


def test_what_is_temporary_is_deleted_and_what_is_deleted_can_be_had_back(declare: Any) -> None:
    bucket = declare(storage={"bucket": {"temporary-days": 3, "soft-delete-days": 14}}).one("Bucket").inputs
    assert bucket["softDeletePolicy"]["retentionDurationSeconds"] == 14 * 86400
    (deletes,) = [each for each in bucket["lifecycleRules"] if each["action"]["type"] == "Delete"]
    assert deletes["condition"] == {"age": 3, "matchesPrefixes": ["tmp/"]}


def test_the_newest_images_outlive_the_clean_up(declare: Any) -> None:
    policies = declare(images={"keep": 4}).one("Repository").inputs["cleanupPolicies"]
    by_id = {each["id"]: each for each in policies}
    assert list(by_id) == sorted(by_id)  # as Google gives them back: another order would show as drift
    assert by_id["keep-newest"] == {
        "id": "keep-newest", "action": "KEEP", "mostRecentVersions": {"keepCount": 4}
    }  # fmt: skip
    deleted = {(each["condition"]["tagState"], each["condition"]["olderThan"]) for each in policies[:2]}
    assert deleted == {("UNTAGGED", "604800s"), ("ANY", "2592000s")}


def test_the_file_servers_data_outlives_the_machine(declare: Any) -> None:
    declared = declare(storage={"nfs": {"kind": "gateway", "size-gib": 300}})
    disk, machine = declared.one("Disk"), declared.one("compute/instance:Instance")
    assert disk.inputs["size"] == 300
    assert machine.inputs["attachedDisks"][0]["source"].endswith(disk.inputs["name"])
    assert machine.inputs["networkInterfaces"][0]["networkIp"] == "10.0.0.2"
    assert "/dev/disk/by-id/google-share" in machine.inputs["metadata"]["startup-script"]
    assert machine.inputs["attachedDisks"][0]["deviceName"] == "share"


def test_a_new_release_of_the_image_does_not_replace_the_file_server(declare: Any) -> None:
    options = declare().one("compute/instance:Instance").options
    assert list(options.ignoreChanges) == ["bootDisk.initializeParams.image"]


def test_a_region_that_joins_needs_no_new_export(declare: Any) -> None:
    """Exports are made at boot: one that named today's subnets would shut out tomorrow's until somebody reboots."""

    def script(**values: Any) -> str:
        declared = declare(**values)
        for each in declared.all("Subnetwork"):
            assert each.inputs["ipCidrRange"].startswith("10.")
        found: str = declared.one("compute/instance:Instance").inputs["metadata"]["startup-script"]
        return found

    one = script()
    assert "SHARE_CLIENTS=10.0.0.0/8\n" in one
    assert script(slices=TWO_ZONES, allow_cross_region=True) == one


@pytest.mark.parametrize(
    ("nfs", "source"),
    [({"kind": "gateway"}, "10.0.0.2:/srv/share"), ({"kind": "filestore"}, "10.7.0.2:/share")],
)
def test_hosts_mount_the_share_at_boot(declare: Any, nfs: dict[str, Any], source: str) -> None:
    declared = declare(storage={"nfs": nfs | {"mount": "/mnt/ours"}})
    script = declared.one("QueuedResource").inputs["metadata"]["startup-script"]
    assert f"SHARE_SOURCE={source}" in script
    assert "SHARE_MOUNT=/mnt/ours" in script
    assert declared.inventory.storage.nfs_source == source
    assert declared.inventory.storage.nfs_mount == "/mnt/ours"


def test_without_a_share_hosts_run_no_start_up_script(declare: Any) -> None:
    declared = declare(storage={"nfs": {"kind": "none"}})
    assert "startup-script" not in declared.one("QueuedResource").inputs["metadata"]


def test_a_direct_node_is_asked_for_as_configured(declare: Any) -> None:
    node = declare(
        slices=[
            {"name": "d", "accelerator": "v6e-8", "capacity": "spot", "provisioning": "direct", "wait": "25m"}
        ],
        zone="us-east1-d",
    ).one("V2Vm")
    assert node.inputs["name"] == "tpu-stack-dev-d"
    assert node.inputs["zone"] == "us-east1-d"
    assert node.inputs["acceleratorType"] == "v6e-8"
    assert node.inputs["runtimeVersion"] == "v2-alpha-tpuv6e"
    assert node.inputs["schedulingConfig"] == {"spot": True}
    # The provider adds half a minute of its own where a quota is used up.
    assert node.options.customTimeouts.create == "1470s"
    assert node.options.deleteBeforeReplace


def test_an_on_demand_direct_node_says_nothing_of_scheduling(declare: Any) -> None:
    """Google shows no such block of one, and one that is sent and not shown replaces the node at every `up`."""
    node = declare(slices=[{"name": "d", "accelerator": "v5litepod-8", "provisioning": "direct"}]).one("V2Vm")
    assert "schedulingConfig" not in node.inputs


def test_the_numbered_nodes_of_a_multislice_have_legal_names(declare: Any) -> None:
    queued = declare(
        slices=[{"name": "a-name-of-thirty-characters-ab", "accelerator": "v5litepod-4", "count": 256}],
        stack="a-stack-with-a-rather-long-name-of-its-own",
    ).one("QueuedResource")
    assert NAME.fullmatch(queued.inputs["queued_resource_id"] + "-255")


def test_another_topology_than_the_names_own_is_asked_for_by_topology(declare: Any) -> None:
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


def test_a_queued_slice_is_asked_for_as_configured(declare: Any) -> None:
    queued = declare(
        slices=[
            {
                "name": "big",
                "accelerator": "v5litepod-16",
                "capacity": "spot",
                "count": 2,
                "valid-until": "6h",
                "wait": "5h",
            }
        ]
    ).one("QueuedResource")
    assert queued.inputs["queued_resource_id"] == "tpu-stack-dev-big"
    assert queued.inputs["owner"] == "0123abcd"
    assert queued.inputs["capacity"] == "spot"
    assert queued.inputs["node_count"] == 2
    assert queued.inputs["valid_until_s"] == 6 * 3600
    assert queued.inputs["wait_s"] == 5 * 3600


@every_shape
def test_the_inventory_comes_back_whole_from_its_json(declare: Any, values: dict[str, Any]) -> None:
    made = declare(**values).inventory
    assert inventory.from_json(inventory.to_json(made)) == made


def test_the_inventory_numbers_the_hosts_of_a_multislice_through(declare: Any) -> None:
    (made,) = declare(**SHAPES["multislice"]).inventory.slices
    assert made.count == 2
    assert [(host.index, host.name) for host in made.hosts] == [
        (0, "t1v-n-n-0-w-0"),
        (1, "t1v-n-n-0-w-1"),
        (2, "t1v-n-n-1-w-0"),
        (3, "t1v-n-n-1-w-1"),
    ]


def test_the_inventory_says_where_everything_is(declare: Any) -> None:
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
    assert (made.gateway.name, made.gateway.zone, made.gateway.address) == (
        "tpu-stack-dev-gateway",
        "us-central1-a",
        "10.0.0.2",
    )
    assert [
        (each.name, each.zone, each.capacity, each.origin, each.devices_per_host) for each in made.slices
    ] == [
        ("a", "us-central1-a", "spot", "queued-resource tpu-stack-dev-a", 4),
        ("b", "us-central1-a", "on-demand", "node tpu-stack-dev-b", 8),
        ("c", "us-east1-d", "on-demand", "queued-resource tpu-stack-dev-c", 8),
    ]
    host = made.slices[0].hosts[0]
    assert host.host_keys == ("ssh-ed25519 AAAA",)
    assert host.reach == "iap"
    assert json.loads(inventory.to_json(made))["version"] == inventory.VERSION
