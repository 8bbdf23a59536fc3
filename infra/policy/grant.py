"""What a TPU Research Cloud grant covers of a configuration, and what it does not. Pure.

A grant is a list of lines: so many chips of a generation in a zone, on-demand or spot. Every other chip is billed.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator, Sequence

from infra import catalogue
from infra.config import Config, GrantLine, SliceConfig
from infra.policy.costs import chips_usd_per_hour
from infra.policy.findings import Finding, refused, slice_path, warning

ENDS_SOON_DAYS = 14


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrantUse:
    """How many chips of one line the slices use; of a line that has ended, none."""

    line: GrantLine
    used_chips: int
    ended: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coverage:
    """covered_chips: of each slice, in the order of the configuration. `use`: of each line of the grant.

    A slice that may be in several zones takes its chips from the grant in each of them, since nobody knows where it
    will be: what is covered is what is covered in `least_in`, the zone where that is least.
    """

    covered_chips: tuple[int, ...]
    least_in: tuple[str, ...]
    use: tuple[GrantUse, ...]


def cover(config: Config, today: datetime.date) -> Coverage:
    """Allocates the chips of the grant to slices in order of their names, from the lines that last longest."""
    left = [0 if _ended(line, today) else line.chips for line in config.grant]
    longest = sorted(
        range(len(left)), key=lambda index: config.grant[index].until or datetime.date.max, reverse=True
    )
    covered = [0] * len(config.slices)
    least_in = [slice_config.zone for slice_config in config.slices]
    for place, slice_config in sorted(enumerate(config.slices), key=lambda item: item[1].name):
        in_zone = dict.fromkeys(slice_config.zones, 0)
        for zone in slice_config.zones:
            for index in longest:
                if _matches(config.grant[index], slice_config, zone):
                    taken = min(slice_config.chips - in_zone[zone], left[index])
                    in_zone[zone] += taken
                    left[index] -= taken
        least_in[place] = min(in_zone, key=lambda zone: in_zone[zone])
        covered[place] = in_zone[least_in[place]]
    use = tuple(
        GrantUse(
            line=line,
            used_chips=0 if _ended(line, today) else line.chips - unused,
            ended=_ended(line, today),
        )
        for line, unused in zip(config.grant, left, strict=True)
    )
    return Coverage(covered_chips=tuple(covered), least_in=tuple(least_in), use=use)


def findings(config: Config, coverage: Coverage, today: datetime.date) -> Iterator[Finding]:
    """The findings about a grant; none if there is no grant."""
    if not config.grant:
        return
    for index, line in enumerate(config.grant):
        yield from _line_findings(index, line, today)
    live = [line for line in config.grant if not _ended(line, today)]
    for index, (slice_config, covered) in enumerate(zip(config.slices, coverage.covered_chips, strict=True)):
        if covered < slice_config.chips and not config.is_elsewhere(slice_config):
            yield _uncovered(config, index, covered, coverage.least_in[index], live)
        if slice_config.provisioning == "direct":
            yield warning(
                slice_path(index, "provisioning"),
                "direct: a grant's quota is meant for queued resources, and may not be enough for a direct node; "
                "write queued",
            )


def table(use: Sequence[GrantUse]) -> str:
    """One line of text for each line of the grant: the chips used of those granted."""
    return "\n".join(
        f"grant: {line_use.used_chips} of {_line(line_use.line)} in {line_use.line.zone} used"
        + (f", until {line_use.line.until}" if line_use.line.until and not line_use.ended else "")
        + (f", ended {line_use.line.until}" if line_use.ended else "")
        for line_use in use
    )


def _line_findings(index: int, line: GrantLine, today: datetime.date) -> Iterator[Finding]:
    if line.until is None:
        return
    path, granted = f"tpu-stack:grant[{index}].until", f"the grant for {_line(line)} in {line.zone}"
    days = (line.until - today).days
    if days < 0:
        yield warning(path, f"{granted} ended on {line.until}: it covers nothing")
    elif days <= ENDS_SOON_DAYS:
        day = {0: "today", 1: "tomorrow"}.get(days, f"in {days} days")
        yield warning(path, f"{granted} ends {day}, on {line.until}; what runs longer is billed")


def _uncovered(config: Config, index: int, covered: int, zone: str, live: list[GrantLine]) -> Finding:
    slice_config = config.slices[index]
    key, reason = _reason(config, slice_config, covered, zone, live)
    if slice_config.more_zones:
        key, reason = "zones", f"{reason}, and it may be there"
    billed = slice_config.chips - covered
    chips = f"{billed} of the {slice_config.chips} chips" if covered else f"all {slice_config.chips} chips"
    price = chips_usd_per_hour(slice_config, billed)
    at = "at a price that is not known" if price is None else f"at list price, {price:,.2f} USD an hour"
    return refused(
        slice_path(index, key),
        f'{reason}; {chips} of "{slice_config.name}" are billed {at}',
        unless="tpu-stack:allow-billable",
        allowed=config.allow.billable,
    )


def _reason(
    config: Config, slice_config: SliceConfig, covered: int, zone: str, live: list[GrantLine]
) -> tuple[str, str]:
    """The key that is to blame, and why the grant does not cover it all in a zone."""
    generation = slice_config.accelerator.generation.name
    kind = f"{generation} {slice_config.capacity}"
    if not _uses_its_quota(slice_config):
        users = (
            "node pools use Compute Engine's quota"
            if slice_config.in_cluster
            else "Compute Engine has its own"
        )
        return "provisioning", f"a grant is quota of the Cloud TPU API, and {users}, which it does not cover"
    generation_lines = [line for line in live if _generation(line) == generation]
    zone_lines = [line for line in generation_lines if line.zone == zone]
    granted = sum(line.chips for line in zone_lines if line.capacity == slice_config.capacity)
    if granted:
        shared = f", of which other slices use {granted - covered}" if granted > covered else ""
        return "", f"the grant has {granted} {kind} chips in {zone}{shared}"
    ends = [line.until for line in config.grant if _matches(line, slice_config, zone) and line.until]
    if ends:
        return "", f"the grant for {kind} in {zone} ended on {max(ends)}"
    if zone_lines:
        has = " and ".join(f"{line.capacity} ({line.chips} chips)" for line in zone_lines)
        return "capacity", f"the grant has {generation} in {zone} as {has}, not as {slice_config.capacity}"
    if generation_lines:
        zones = ", ".join(f"{line.zone} ({line.chips} {line.capacity})" for line in generation_lines)
        return "zone", f"{zone} is not of the grant for {generation}, which has {zones}"
    if live:
        names = ", ".join(dict.fromkeys(_generation(line) for line in live))
        return "accelerator", f"the grant has no {generation}, only {names}"
    return "", "the whole grant has ended"


def _matches(line: GrantLine, slice_config: SliceConfig, zone: str) -> bool:
    requirement = (slice_config.accelerator.generation.name, zone, slice_config.capacity)
    return _uses_its_quota(slice_config) and requirement == (_generation(line), line.zone, line.capacity)


def _uses_its_quota(slice_config: SliceConfig) -> bool:
    """Whether a slice takes its chips from the quota of the Cloud TPU API, which is what a grant is."""
    return not (slice_config.in_cluster or slice_config.on_compute)


def _generation(line: GrantLine) -> str:
    return catalogue.generation(line.generation).name


def _ended(line: GrantLine, today: datetime.date) -> bool:
    return line.until is not None and line.until < today


def _line(line: GrantLine) -> str:
    return f"{line.chips} {_generation(line)} {line.capacity} chips"
