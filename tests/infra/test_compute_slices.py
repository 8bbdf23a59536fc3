"""Slices that Compute Engine makes, as they are declared: templates, placement, what is asked for, the inventory."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pulumi.runtime import rpc

from infra import catalogue
from infra.compute import instances
from infra.compute_slice import IN_PLACE, REPLACING, ComputeSliceArgs
from infra.queued_resource import TIMING, input_props
from tests.infra.conftest import Declare, Declared

ZONE = {"zone": "us-east5-a"}
URL = "https://compute/projects/my-project/regions/us-east5"


def declared_with(declare: Declare, accelerator: str = "v6e-16", **keys: Any) -> Declared:
    stack = {key: keys.pop(key) for key in ("network", "storage") if key in keys}
    slice_keys = {"name": "main", "accelerator": accelerator, "provisioning": "compute", **ZONE}
    slice_keys |= {key.replace("_", "-"): value for key, value in keys.items()}
    return declare(slices=[slice_keys], **ZONE, **stack)


def test_several_hosts_are_a_group_by_template_and_placement_and_one_host_is_an_instance_without_placement(
    declare: Declare,
) -> None:
    declared = declared_with(declare, count=2)
    asked = declared.one("ComputeSlice").inputs
    template, policy = declared.one("RegionInstanceTemplate").inputs, declared.one("ResourcePolicy").inputs
    assert policy["workloadPolicy"] == {"type": "HIGH_THROUGHPUT", "acceleratorTopology": "4x4"}
    assert asked["templates"] == {"us-east5": f"{URL}/instanceTemplates/{template['name']}"}
    assert asked["policies"] == {"us-east5": f"{URL}/resourcePolicies/tpu-stack-dev-main-4x4"}
    told = ("slice_id", "machine_type", "hosts", "count", "topology", "generation", "api", "owner")
    assert [asked[name] for name in told] == [
        *("tpu-stack-dev-main", "ct6e-standard-4t", 4, 2, "4x4", "v6e", "compute", "0123abcd")
    ]
    (entry,) = declared.inventory.slices
    assert (entry.origin, len(entry.hosts), entry.devices_per_host) == ("group tpu-stack-dev-main", 8, 4)

    one = declared_with(declare, "v6e-8")
    assert not one.all("ResourcePolicy") and "policies" not in one.one("ComputeSlice").inputs
    assert one.one("RegionInstanceTemplate").inputs["machineType"] == "ct6e-standard-8t"
    assert one.inventory.slices[0].origin == "instance tpu-stack-dev-main"


@pytest.mark.parametrize(
    ("accelerator", "zone", "machine_type", "devices", "image"),
    [
        ("v5p-8", "us-east5-a", "ct5p-hightpu-4t", 4, "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"),
        ("v6e-1", "us-east5-a", "ct6e-standard-1t", 1, "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"),
        ("tpu7x-16", "us-central1-c", "tpu7x-standard-4t", 8, "ubuntu-accel-2404-amd64-tpu-tpu7x"),
    ],
)
def test_each_generation_has_its_machine_its_image_and_its_devices(
    declare: Declare, accelerator: str, zone: str, machine_type: str, devices: int, image: str
) -> None:
    declared = declared_with(declare, accelerator, zone=zone)
    template = declared.one("RegionInstanceTemplate").inputs
    assert template["machineType"] == machine_type
    assert template["disks"][0]["sourceImage"].endswith(
        f"ubuntu-os-accelerator-images/global/images/family/{image}"
    )
    assert declared.inventory.slices[0].devices_per_host == devices


RESERVED = {"capacity": "reserved", "reservation": "spring"}


@pytest.mark.parametrize(
    ("keys", "scheduling", "affinity"),
    [
        ({}, {"provisioningModel": "STANDARD", "automaticRestart": True}, None),
        (
            {"capacity": "spot"},
            {"provisioningModel": "SPOT", "preemptible": True, "instanceTerminationAction": "DELETE"},
            "NO_RESERVATION",
        ),
        (
            {"capacity": "flex-start", "max-run-duration": "2d"},
            {
                "provisioningModel": "FLEX_START",
                "instanceTerminationAction": "DELETE",
                "maxRunDuration": {"seconds": 172800},
            },
            "NO_RESERVATION",
        ),
        (
            {"max-run-duration": "1h"},
            {
                "provisioningModel": "STANDARD",
                "automaticRestart": True,
                "instanceTerminationAction": "DELETE",
                "maxRunDuration": {"seconds": 3600},
            },
            None,
        ),
        (
            RESERVED,
            {
                "provisioningModel": "RESERVATION_BOUND",
                "automaticRestart": True,
                "instanceTerminationAction": "DELETE",
            },
            "spring",
        ),
        (
            {**RESERVED, "reservation-bound": False, "reservation": "projects/other/reservations/spring"},
            {"provisioningModel": "STANDARD", "automaticRestart": True},
            "projects/other/reservations/spring",
        ),
    ],
)
def test_a_capacity_is_a_provisioning_model_and_what_can_end_is_deleted(
    declare: Declare, keys: dict[str, Any], scheduling: dict[str, Any], affinity: str | None
) -> None:
    template = declared_with(declare, **keys).one("RegionInstanceTemplate").inputs
    always = {"onHostMaintenance": "TERMINATE", "preemptible": False, "automaticRestart": False}
    assert template["scheduling"] == always | scheduling
    reservation = template.get("reservationAffinity")
    if affinity is None or reservation is None:
        assert (reservation, affinity) == (None, None)
    elif reservation["type"] == "SPECIFIC_RESERVATION":
        key = "compute.googleapis.com/reservation-name"
        assert reservation["specificReservation"] == {"key": key, "values": [affinity]}
    else:
        assert reservation["type"] == affinity


def test_a_host_is_as_closed_as_a_tpu_vm_and_logs_in_the_same_way(declare: Declare) -> None:
    kms_key = "projects/p/locations/us-east5/keyRings/r/cryptoKeys/k"
    boot_disk = {"kms-key": kms_key, "size-gib": 200}
    compute, queued = declared_with(declare, boot_disk=boot_disk), declare()
    template = compute.one("RegionInstanceTemplate").inputs
    (interface,) = template["networkInterfaces"]
    assert "accessConfigs" not in interface and interface["nicType"] == "GVNIC"
    assert template["tags"] == queued.one("QueuedResource").inputs["tags"]
    login = {key: template["metadata"][key] for key in queued.one("QueuedResource").inputs["metadata"]}
    assert login | {"startup-script": ""} == queued.one("QueuedResource").inputs["metadata"] | {
        "startup-script": ""
    }
    assert "tpu_host.sh" in template["metadata"]["startup-script"]
    assert template["serviceAccount"]["email"] == queued.one("QueuedResource").inputs["service_account_email"]
    (boot,) = template["disks"]
    assert (boot["diskSizeGb"], boot["diskType"]) == (200, "hyperdisk-balanced")
    assert boot["diskEncryptionKey"] == {"kmsKeySelfLink": kms_key}
    opened = declared_with(declare, network={"external-addresses": True}).one("RegionInstanceTemplate").inputs
    assert opened["networkInterfaces"][0]["accessConfigs"] == [{}]


def test_a_new_disk_is_attached_by_its_name_and_one_that_several_share_is_read_only(declare: Declare) -> None:
    new = declared_with(declare, "v6e-8", data_disks=[{"name": "scratch", "size-gib": 10}])
    shared = declared_with(declare, data_disks=[{"name": "corpus", "source": "corpus"}])
    for declared, name, mode in (
        (new, "tpu-stack-dev-main-scratch", "READ_WRITE"),
        (shared, "corpus", "READ_ONLY"),
    ):
        _, disk = declared.one("RegionInstanceTemplate").inputs["disks"]
        assert disk == {"boot": False, "autoDelete": False, "source": name, "mode": mode}


def test_several_zones_have_a_template_and_a_placement_in_each_region(declare: Declare) -> None:
    zones = ["us-east5-a", "us-east5-b", "us-central1-b"]
    slice_keys = {"name": "main", "accelerator": "v6e-16", "provisioning": "compute", "zones": zones}
    declared = declare(slices=[slice_keys])
    asked = declared.one("ComputeSlice").inputs
    assert set(asked["templates"]) == set(asked["policies"]) == {"us-east5", "us-central1"}
    regions = [each.inputs["region"] for each in declared.all("RegionInstanceTemplate")]
    assert sorted(regions) == ["us-central1", "us-east5"]
    assert (asked["zones"], asked["strategy"], asked["zone_wait_s"]) == (zones, "first", 1800)


def test_what_the_keeper_and_recover_make_it_by_is_what_pulumi_made_it_by(declare: Declare) -> None:
    declared = declared_with(declare)
    asked = declared.one("ComputeSlice").inputs
    written = json.loads(rpc.unwrap_rpc_secret(declared.one("BucketObject").inputs["content"]))["slices"][
        "main"
    ]
    assert written == {
        name: asked[name] for name in asked if name != "__provider" and asked[name] is not None
    }


PLAIN = ComputeSliceArgs(
    project="p", zone="us-east5-a", slice_id="s", owner="o", accelerator_type="v6e-16", generation="v6e",
    topology="4x4", machine_type="ct6e-standard-4t", hosts=4, capacity="spot", image="i", boot_disk_gib=100,
    boot_disk_type="hyperdisk-balanced", wait_s=60,
)  # fmt: skip


def test_every_input_either_replaces_a_slice_or_changes_it_in_place_and_a_template_s_name_follows_its_contents() -> (
    None
):
    fields = {field.name for field in dataclasses.fields(ComputeSliceArgs)} - {"api"}
    assert fields == {*REPLACING} | IN_PLACE | {TIMING} and not {*REPLACING} & IN_PLACE
    # What is in a template and changes in place has to give it another name.
    in_templates = fields - instances.NOT_IN_TEMPLATES
    assert {"labels", "metadata", "tags", "image", "network"} <= in_templates


@given(
    st.text(st.characters(min_codepoint=97, max_codepoint=122), min_size=1, max_size=40), st.integers(10, 99)
)
def test_a_template_has_a_legal_name_and_another_for_other_contents(name: str, size: int) -> None:
    contents = input_props(dataclasses.replace(PLAIN, boot_disk_gib=size))
    first, second = (
        instances._template_name("dev", name, contents | {"boot_disk_gib": each}) for each in (size, size + 1)
    )
    assert first != second and max(len(first), len(second)) <= 63
    assert first == instances._template_name("dev", name, dict(reversed(contents.items())))


def test_all_that_compute_engine_offers_has_a_machine_an_image_and_quotas() -> None:
    offered = catalogue.OFFERS["compute"].values()
    assert {each.generation.name for each in offered} == {"v5p", "v6e", "tpu7x"}
    for each in offered:
        assert each.machine_type and each.generation.compute and each.generation.compute.quota
        assert each.generation.compute.image.startswith("projects/ubuntu-os-accelerator-images/")
