"""Configurations to review: one slice in a made network, all in one region, and what differs from that."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable
from typing import Any

from contracts.inventory import Capacity
from infra import catalogue
from infra.config import (
    AccessConfig,
    Allowances,
    BucketConfig,
    Config,
    DataDisk,
    GrantLine,
    ImagesConfig,
    NetworkConfig,
    NfsConfig,
    SliceConfig,
)
from infra.policy.findings import Finding

TODAY = datetime.date(2026, 11, 21)
LATER = TODAY + datetime.timedelta(days=60)
ZONE = "us-central1-a"
REGION = "us-central1"

NOTHING_ALLOWED = Allowances(unlisted=False, billable=False, cross_region=False)


def a_slice(
    name: str = "main",
    accelerator: str = "v5litepod-16",
    *,
    zone: str = ZONE,
    capacity: Capacity = "spot",
    **changes: Any,
) -> SliceConfig:
    found = catalogue.accelerator(accelerator)
    plain = SliceConfig(
        name=name,
        accelerator=found,
        zone=zone,
        capacity=capacity,
        reservation=None,
        provisioning="queued",
        count=1,
        runtime_version=found.generation.runtime_version or "",
        valid_until_s=None,
        guaranteed_s=None,
        wait_s=12 * 3600,
        labels={},
        boot_disk_kms_key=None,
        data_disks=(),
    )
    return dataclasses.replace(plain, **changes)


def a_stack(*slices: SliceConfig, region: str = REGION, **changes: Any) -> Config:
    """Nothing to find fault with: no grant, no budget, everything in one region, somebody has access."""
    plain = Config(
        project="my-project",
        stack="dev",
        slices=slices or (a_slice(),),
        bucket=a_bucket(region),
        nfs=an_nfs(f"{region}-a"),
        network=NetworkConfig(existing=None, subnetwork=None, external_addresses=False),
        access=AccessConfig(members=("user:ada@example.com",), administrators=()),
        images=ImagesConfig(repository="tpu-stack-dev", region=region, keep=10, references={}),
        grant=(),
        allow=NOTHING_ALLOWED,
        budget_usd_per_hour=None,
        protect=True,
    )
    return dataclasses.replace(plain, **changes)


def a_bucket(region: str) -> BucketConfig:
    return BucketConfig(name="my-project-dev-tpu-stack", region=region, soft_delete_days=7, temporary_days=7)


def an_nfs(zone: str, **changes: Any) -> NfsConfig:
    plain = NfsConfig(kind="gateway", zone=zone, size_gib=200, machine_type="e2-small", mount="/mnt/share")
    return dataclasses.replace(plain, **changes)


def a_disk(name: str = "data", **changes: Any) -> DataDisk:
    plain = DataDisk(name=name, disk_type="pd-balanced", size_gib=500, source=None, mode="read-write")
    return dataclasses.replace(plain, **changes)


def a_grant(
    chips: int,
    generation: str = "v5e",
    zone: str = ZONE,
    *,
    capacity: Capacity = "spot",
    until: datetime.date | None = LATER,
) -> GrantLine:
    return GrantLine(generation=generation, zone=zone, chips=chips, capacity=capacity, until=until)


def only(findings: Iterable[Finding]) -> Finding:
    """The one finding; a test that gets more or none shows them all."""
    found = list(findings)
    assert len(found) == 1, [str(each) for each in found]
    return found[0]
