"""What an inventory gives away before anything is connected to."""

from __future__ import annotations

import dataclasses

import pytest

from contracts.inventory import Host, Inventory, Slice, Storage
from launch.doctor import google_cloud

HOSTS = tuple(
    Host(
        index=index, name=f"w-{index}", internal_address="10.0.0.1", external_address=None, user=None,
        host_keys=("ssh-ed25519 AAAA",), reach="iap",
    )
    for index in range(4)
)  # fmt: skip
SLICE = Slice(
    name="s", accelerator_type="v5litepod-16", generation="v5e", topology="4x4", zone="europe-west4-b",
    capacity="spot", origin="queued-resource q", count=1, devices_per_host=4, hosts=HOSTS,
)  # fmt: skip
INVENTORY = Inventory(
    stack="dev",
    project="p",
    storage=Storage(bucket_url="gs://b", bucket_region="EUROPE-WEST4", nfs_source=None, nfs_mount=None),
    images={"jax": "europe-west4-docker.pkg.dev/p/r/jax@sha256:00"},
    gateway=None,
    slices=(SLICE,),
)


def test_a_stack_whose_parts_are_all_in_one_region_is_well() -> None:
    said = [*google_cloud.slice_in_use(INVENTORY, SLICE), *google_cloud.regions(INVENTORY, SLICE)]
    assert {each.state for each in said} == {"ok"}
    assert any("USD an hour" in each.message for each in said)


@pytest.mark.parametrize(
    ("region", "words"), [("US-CENTRAL1", "in us-central1, the TPUs"), ("EU", "in the multi-region eu")]
)
def test_a_bucket_elsewhere_is_told_of_with_what_it_costs(region: str, words: str) -> None:
    storage = dataclasses.replace(INVENTORY.storage, bucket_region=region)
    said = google_cloud.regions(dataclasses.replace(INVENTORY, storage=storage), SLICE)[0]
    assert said.state == "warn" and words in said.message and "billed" in said.remedy


def test_an_image_elsewhere_or_named_by_a_tag_is_told_of() -> None:
    images = {"jax": "us-docker.pkg.dev/p/r/jax:latest"}
    said = google_cloud.regions(dataclasses.replace(INVENTORY, images=images), SLICE)
    assert [each.state for each in said] == ["ok", "warn", "warn"]
    assert "digest" in said[2].remedy


def test_hosts_that_are_missing_or_have_no_key_are_told_of() -> None:
    nameless = dataclasses.replace(HOSTS[0], host_keys=())
    few = dataclasses.replace(SLICE, hosts=(nameless, HOSTS[1]))
    messages = [each.message for each in google_cloud.slice_in_use(INVENTORY, few) if each.state == "warn"]
    assert messages[0] == "v5litepod-16 has 4 hosts, the inventory has 2"
    assert messages[1].startswith("no host key is known of host 0")


def test_machines_that_are_none_of_googles_have_no_price_and_no_region() -> None:
    own = dataclasses.replace(SLICE, accelerator_type="workstation", zone="under my desk")
    said = [*google_cloud.slice_in_use(INVENTORY, own), *google_cloud.regions(INVENTORY, own)]
    assert [each.state for each in said] == ["ok", "skip"]
