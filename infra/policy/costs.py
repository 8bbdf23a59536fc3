"""What a configuration costs an hour and a day at list prices, as far as that is known before it runs. Pure.

The project is billed for everything but the chips that a grant covers: the grant covers only TPUs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from infra import catalogue
from infra.config import (
    DEFAULT_BOOT_GIB,
    GATEWAY_BOOT_GIB,
    GATEWAY_DISK_TYPE,
    ClusterConfig,
    Config,
    NfsConfig,
    SliceConfig,
)
from infra.policy import billing

HOURS_PER_DAY = 24
NOT_KNOWN = "not known"
PASSES_PER_HOUR = 60
LISTINGS_OF_A_PASS, READS_OF_A_PASS = 1, 2
"""Of the keeper in the bucket, while all is well; the Cloud TPU API, which it asks too, is free of charge."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostLine:
    """usd_per_hour: of the whole quantity; None where no list price is known."""

    item: str
    quantity: str
    usd_per_hour: float | None
    covered_by_grant: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """A price by use, whose amount is not known before."""

    item: str
    usd: float
    per: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class HourlyCost:
    """`assumptions`: what has to be known to read the figures rightly."""

    lines: tuple[CostLine, ...]
    rates: tuple[Rate, ...]
    assumptions: tuple[str, ...]

    @property
    def usd_per_hour(self) -> float:
        """Billed, as far as prices are known; without `rates`."""
        return _total(line for line in self.lines if not line.covered_by_grant)

    @property
    def covered_usd_per_hour(self) -> float:
        """What the grant saves, at list prices."""
        return _total(line for line in self.lines if line.covered_by_grant)

    @property
    def not_known(self) -> tuple[str, ...]:
        """The items whose price is not known."""
        return tuple(
            line.item for line in self.lines if line.usd_per_hour is None and not line.covered_by_grant
        )


def table(cost: HourlyCost) -> str:
    """Aligned columns for a terminal below a title: each line, both totals, the rates and what was assumed."""
    rows = [("what", "quantity", "USD/hour", "USD/day", "")]
    rows += [
        (line.item, line.quantity, *_money(line.usd_per_hour), "grant" if line.covered_by_grant else "")
        for line in cost.lines
    ]
    rows.append(("billed", "", *_money(cost.usd_per_hour), ""))
    if any(line.covered_by_grant for line in cost.lines):
        rows.append(("covered by the grant", "", *_money(cost.covered_usd_per_hour), ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    aligned = [
        f"{item:<{widths[0]}}  {quantity:<{widths[1]}}  {hour:>{widths[2]}}  {day:>{widths[3]}}  {mark}".rstrip()
        for item, quantity, hour, day, mark in rows
    ]
    below = [f"and {rate.item} by use: {rate.usd:.3f} USD per {rate.per}" for rate in cost.rates]
    if cost.not_known:
        below.insert(0, f"and at prices that are not known: {'; '.join(cost.not_known)}")
    return "\n".join(["Cost at list prices:", *aligned, *below, *cost.assumptions])


def _money(usd_per_hour: float | None) -> tuple[str, str]:
    """By hour and by day."""
    if usd_per_hour is None:
        return NOT_KNOWN, NOT_KNOWN
    return f"{usd_per_hour:,.3f}", f"{usd_per_hour * HOURS_PER_DAY:,.2f}"


def _total(lines: Iterable[CostLine]) -> float:
    # The exact sum, so that the order of the slices does not change the last digit.
    return math.fsum(line.usd_per_hour for line in lines if line.usd_per_hour is not None)


def stack_cost(config: Config, covered_chips: Sequence[int]) -> HourlyCost:
    """covered_chips: how many chips of each slice a grant covers, in the order of `config.slices`."""
    slices = [
        line
        for slice_config, covered in zip(config.slices, covered_chips, strict=True)
        if not config.is_elsewhere(slice_config)
        for line in _slice_lines(slice_config, covered)
    ]
    nat = tuple(_nat_lines(config))
    return HourlyCost(
        lines=(
            *slices,
            *_cluster_lines(config.gke),
            *_nfs_lines(config.nfs),
            *_address_lines(config),
            *nat,
            *_keeper_lines(config),
        ),
        rates=_rates(config, nat=bool(nat)),
        assumptions=_assumptions(config),
    )


def chips_usd_per_hour(slice_config: SliceConfig, chips: int) -> float | None:
    """The list price of some chips of a slice, in the dearest of its zones; None where one is not known."""
    prices = [
        catalogue.price_usd_per_hour(slice_config.accelerator, zone, slice_config.capacity)
        for zone in slice_config.zones
    ]
    known_prices = [price for price in prices if price is not None]
    return (
        max(known_prices) / slice_config.accelerator.chips * chips
        if len(known_prices) == len(prices)
        else None
    )


def least_usd_per_hour(config: Config, covered_chips: Sequence[int]) -> float:
    """The least that is billed; chips without a known price in their zone count at their generation's lowest price.

    Reserved chips are paid for already.
    """
    unpriced = sum(
        (slice_config.accelerator.generation.lowest_usd_per_chip_hour(slice_config.capacity) or 0.0)
        * (slice_config.chips - covered)
        for slice_config, covered in zip(config.slices, covered_chips, strict=True)
        if chips_usd_per_hour(slice_config, 1) is None and not config.is_elsewhere(slice_config)
    )
    return stack_cost(config, covered_chips).usd_per_hour + unpriced


def _slice_lines(slice_config: SliceConfig, covered: int) -> Iterator[CostLine]:
    """The cost of a slice's chips and of the disks that are made with it; an existing disk is billed already."""
    number = f"{slice_config.count} x " if slice_config.count > 1 else ""
    for chips, by_grant in ((covered, True), (slice_config.chips - covered, False)):
        if chips:
            yield CostLine(
                item=f"slice {slice_config.name}: {number}{slice_config.accelerator.type_name}, "
                f"{slice_config.zones_text}",
                quantity=f"{_counted(chips, 'chip')}, {slice_config.capacity}"
                + (", while asked for" if slice_config.scale_to_zero else ""),
                usd_per_hour=chips_usd_per_hour(slice_config, chips),
                covered_by_grant=by_grant,
            )
    if slice_config.boot_disk_type is not None:
        boot_disk = _disk_line(
            "", slice_config.boot_disk_type, slice_config.boot_disk_gib, slice_config.region
        )
        disks = None if boot_disk.usd_per_hour is None else boot_disk.usd_per_hour * slice_config.hosts
        yield CostLine(
            item=f"slice {slice_config.name}: boot disks",
            quantity=f"{slice_config.hosts} x {boot_disk.quantity}",
            usd_per_hour=disks,
        )
    for disk in slice_config.data_disks:
        if disk.size_gib is not None:
            item = f"slice {slice_config.name}: disk {disk.name}"
            yield _disk_line(item, disk.disk_type, disk.size_gib, slice_config.region)


def _cluster_lines(gke: ClusterConfig | None) -> Iterator[CostLine]:
    if gke is not None:
        yield CostLine(item="cluster: GKE", quantity="1 cluster", usd_per_hour=billing.GKE_FEE.usd)
        kind = gke.machine_type
        price = billing.machine_usd_per_hour(kind, gke.region)
        yield CostLine(item="cluster: VM", quantity=f"1 {kind}", usd_per_hour=price)
        yield _disk_line("cluster: boot disk", "pd-balanced", DEFAULT_BOOT_GIB, gke.region)


def _disk_line(item: str, disk_type: str, size_gib: int, region: str) -> CostLine:
    price = billing.disk_usd_per_hour(disk_type, size_gib, region)
    return CostLine(item=item, quantity=f"{size_gib} GiB {disk_type}", usd_per_hour=price)


def _nfs_lines(nfs: NfsConfig | None) -> Iterator[CostLine]:
    if nfs is not None and nfs.kind == "filestore":
        price = billing.FILESTORE_BASIC_HDD.usd * nfs.size_gib
        yield CostLine(item="Filestore", quantity=f"{nfs.size_gib} GiB Basic HDD", usd_per_hour=price)
    elif nfs is not None:
        machine = billing.machine_usd_per_hour(nfs.machine_type, nfs.region)
        yield CostLine(item="gateway: VM", quantity=f"1 {nfs.machine_type}", usd_per_hour=machine)
        yield _disk_line("gateway: boot disk", GATEWAY_DISK_TYPE, GATEWAY_BOOT_GIB, nfs.region)
        yield _disk_line("gateway: data disk", GATEWAY_DISK_TYPE, nfs.size_gib, nfs.region)


def _address_lines(config: Config) -> Iterator[CostLine]:
    if config.network.external_addresses:
        hosts = sum(slice_config.hosts for slice_config in config.slices if not slice_config.in_cluster)
        price = billing.EXTERNAL_ADDRESS.usd * hosts
        yield CostLine(item="external addresses", quantity=_counted(hosts, "host"), usd_per_hour=price)


def _nat_lines(config: Config) -> Iterator[CostLine]:
    """One NAT gateway a region, for the VMs without an external address. An existing network has its own NAT."""
    vms = dict.fromkeys(config.regions, 0)
    for slice_config in config.slices:
        if not config.is_elsewhere(slice_config):
            # Nodes never have an address of their own.
            vms[slice_config.region] += (
                slice_config.hosts if slice_config.in_cluster or not config.network.external_addresses else 0
            )
    if config.gke is not None:
        vms[config.gke.region] += 1
    if config.nfs is not None and config.nfs.kind == "gateway":
        vms[config.nfs.region] += 1
    for region, number in vms.items():
        if number and config.network.existing is None:
            yield CostLine(
                item=f"Cloud NAT, {region}",
                quantity=f"{_counted(number, 'VM')}, 1 address",
                usd_per_hour=billing.nat_usd_per_hour(number),
            )


def _keeper_lines(config: Config) -> Iterator[CostLine]:
    """The keeper's costs: it makes no more slices than are configured, and it runs on the gateway."""
    if config.keeper:
        per_pass = LISTINGS_OF_A_PASS + READS_OF_A_PASS
        price = billing.requests_usd_per_hour(
            listings=LISTINGS_OF_A_PASS * PASSES_PER_HOUR, reads=READS_OF_A_PASS * PASSES_PER_HOUR
        )
        yield CostLine(item="keeper", quantity=f"{per_pass} requests a minute", usd_per_hour=price)


def _rates(config: Config, *, nat: bool) -> tuple[Rate, ...]:
    rates = []
    if config.bucket is not None:
        region = config.bucket.region
        rates.append(Rate(item="bucket", usd=billing.regional(region).bucket_usd, per="GiB and month"))
    rates.append(Rate(item="images", usd=billing.REGISTRY.usd, per=billing.REGISTRY.per))
    if nat:
        rates.append(Rate(item="Cloud NAT", usd=billing.NAT_DATA.usd, per=billing.NAT_DATA.per))
    return tuple(rates)


def _assumptions(config: Config) -> tuple[str, ...]:
    assumptions = [
        f"List prices: TPUs of {catalogue.PRICES_READ_IN}, the rest as docs/costs.md says. Spot prices float."
    ]
    regions = {*config.regions, *([config.bucket.region] if config.bucket else [])}
    strangers = sorted(region for region in regions if not billing.is_listed(region))
    if strangers:
        assumptions.append(
            f"No list of VMs, disks and buckets is known for {', '.join(strangers)}: {billing.STAND_IN}'s is taken; "
            f"other regions cost up to {billing.regions_differ_by():.0%} more."
        )
    if config.gke is not None:
        assumptions.append(
            "GKE gives 74.40 USD a month on zonal clusters: the fee of one of a billing account is free."
        )
    if any(
        slice_config.scale_to_zero and not config.is_elsewhere(slice_config) for slice_config in config.slices
    ):
        assumptions.append(
            "Chips that exist only while a run asks for them are counted as if they always existed."
        )
    if config.nfs is not None and config.nfs.kind == "filestore" and config.nfs.region != "us-west1":
        assumptions.append(f"Filestore in {config.nfs.region} is priced as in us-west1, the only known.")
    return tuple(assumptions)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
