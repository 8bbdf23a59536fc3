"""Configurations to review: one slice in a made network, all in one region, and what differs from that."""

import dataclasses
import datetime
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from contracts.inventory import Capacity
from infra import catalogue
from infra.config import (
    Allowances,
    Config,
    DataDisk,
    GrantLine,
    NetworkConfig,
    NfsConfig,
    SliceConfig,
    reader,
)
from infra.policy.findings import Finding

TODAY = datetime.date(2026, 11, 21)
LATER = TODAY + datetime.timedelta(days=60)
ZONE = "us-central1-a"
NOTHING_ALLOWED = Allowances(unlisted=False, billable=False, cross_region=False)

PLAIN = reader.read(
    {
        "slices": [{"name": "main", "accelerator": "v5litepod-16", "zone": ZONE, "capacity": "spot"}],
        "access": {"members": ["user:ada@example.com"]},
    },
    project="my-project",
    stack="dev",
)
"""Nothing to find fault with: no grant, no budget, everything in one region, somebody has access."""


def a_slice(name: str = "main", accelerator: str = "v5litepod-16", **changes: Any) -> SliceConfig:
    found = catalogue.accelerator(accelerator)
    runtime = found.generation.runtime_version or ""
    plain = dataclasses.replace(PLAIN.slices[0], name=name, accelerator=found, runtime_version=runtime)
    return dataclasses.replace(plain, **changes)


def a_stack(*slices: SliceConfig, region: str = "us-central1", **changes: Any) -> Config:
    assert PLAIN.bucket is not None
    there: dict[str, Any] = {
        "bucket": dataclasses.replace(PLAIN.bucket, region=region),
        "nfs": an_nfs(f"{region}-a"),
        "images": dataclasses.replace(PLAIN.images, region=region),
    }
    return dataclasses.replace(PLAIN, slices=slices or PLAIN.slices, **there | changes)


def an_nfs(zone: str, **changes: Any) -> NfsConfig:
    assert PLAIN.nfs is not None
    return dataclasses.replace(PLAIN.nfs, zone=zone, **changes)


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


zones = st.sampled_from((ZONE, "us-west4-a", "europe-west4-b", "us-central2-b"))
slices = st.builds(
    a_slice,
    st.sampled_from(("a", "b", "c", "d")),
    st.sampled_from(("v2-8", "v2-32", "v5litepod-16", "v5litepod-64", "v6e-8", "v4-8")),
    zone=zones,
    capacity=st.sampled_from(("spot", "on-demand", "reserved")),
    provisioning=st.sampled_from(("queued", "direct")),
    count=st.integers(1, 3),
    data_disks=st.sampled_from(((), (a_disk(),), (a_disk(disk_type="hyperdisk-ml"),))),
)
granted = st.sampled_from(("v2", "v4", "v5e"))
grants = st.builds(
    lambda chips, generation, zone, spot, days: a_grant(
        chips,
        generation,
        zone,
        capacity="spot" if spot else "on-demand",
        until=None if days is None else TODAY + datetime.timedelta(days=days),
    ),
    st.integers(1, 300),
    st.just("v5e") | granted,
    st.just(ZONE) | zones,
    st.booleans(),
    st.sampled_from((None, -1, 0, 60)),
)
stacks = st.builds(
    lambda made, **changes: a_stack(*made, **changes),
    st.lists(slices, min_size=1, max_size=4, unique_by=lambda each: each.name),
    region=st.sampled_from(("us-central1", "europe-west4")),
    grant=st.lists(grants, max_size=5).map(tuple),
    nfs=st.none() | st.builds(an_nfs, zones, machine_type=st.sampled_from(("e2-small", "n2-standard-2"))),
    network=st.builds(
        NetworkConfig, existing=st.none(), subnetwork=st.none(), external_addresses=st.booleans()
    ),
    budget_usd_per_hour=st.none() | st.floats(0.01, 100),
    protect=st.booleans(),
)
"""Any stack: covered, not covered, risky and dear ones."""
