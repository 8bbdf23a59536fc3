"""`fab accelerators`: the TPU types that can be had, and those that a TPU Research Cloud grant covers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.table import Table

from contracts.errors import RequestError
from contracts.suggestions import did_you_mean
from infra import catalogue
from infra.catalogue import Accelerator, CatalogueError
from infra.config import ConfigError, GrantLine, reader
from launch import output
from launch.output import Terminal

MOST_CHIPS = 64
"""What is listed when nobody says how large: a line of a typical grant, and few enough rows for one screen."""

WIDTH = 110
"""Columns, however narrow the terminal or whatever the pipe: a figure that is cut short is a wrong figure."""

HARDWARE = ("type", "topology", "hosts", "chips", "devices", "HBM GiB", "TFLOP/s")
COLUMNS = (*HARDWARE, "on-demand", "spot", "zones")


def list_accelerators(*, zone: str | None, generation: str | None, max_chips: int | None) -> int:
    """Print the types of a zone, of a generation, of all; and what the columns mean."""
    matching = choose(zone=zone, generation=generation)
    shown = [accelerator for accelerator in matching if accelerator.chips <= (max_chips or MOST_CHIPS)]
    console = Terminal(markup=False, emoji=False, highlight=False, width=WIDTH)
    if shown:
        console.print(table(shown, zone))
    for line in notes(matching, shown, zone):
        console.print(line)
    return 0


def choose(*, zone: str | None, generation: str | None) -> list[Accelerator]:
    """Return the types of a generation that are listed in a zone, each None for any.

    Raises:
        RequestError: no such zone or generation, or one that has nothing to list.
    """
    chosen = None
    if generation is not None:
        try:
            chosen = catalogue.generation(generation.lower(), "any")
        except CatalogueError as error:
            raise RequestError(f"--generation: {error}") from None
    everything = catalogue.OFFERS["any"].values()
    zones = sorted({name for accelerator in everything for name in accelerator.zones})
    if zone is not None and zone not in zones:
        hint = did_you_mean(zone, zones) or f"; choose one of {', '.join(zones)}"
        raise RequestError(f'--zone: no TPU is listed in "{zone}"{hint}')
    matching = [
        accelerator
        for accelerator in everything
        if (chosen is None or accelerator.generation is chosen)
        and (zone is None or zone in accelerator.zones)
    ]
    if not matching and chosen is not None:
        raise RequestError(
            f"--zone: no {chosen.name} is listed in {zone}; it is in {', '.join(chosen.zones)}"
        )
    return matching


def table(shown: Sequence[Accelerator], zone: str | None) -> Table:
    """Return a table with a row for each type; prices are those of the zone, or the lowest of the type's zones."""
    rows = output.table(*(COLUMNS if zone is None else COLUMNS[:-1]), right=COLUMNS[2:], wrap=False)
    for accelerator in shown:
        zones = [zone] if zone else list(accelerator.zones)
        row = [
            *hardware(accelerator),
            _dollars([catalogue.price_usd_per_hour(accelerator, place, "on-demand") for place in zones]),
            _dollars([catalogue.price_usd_per_hour(accelerator, place, "spot") for place in zones]),
        ]
        rows.add_row(*row, *([] if zone else [str(len(zones))]))
    return rows


def hardware(accelerator: Accelerator) -> list[str]:
    """Return the cells of HARDWARE."""
    return [
        accelerator.type_name,
        accelerator.topology,
        f"{accelerator.hosts:,}",
        f"{accelerator.chips:,}",
        f"{accelerator.devices:,}",
        f"{accelerator.hbm_gib:,}",
        f"{accelerator.peak_bf16_flops_per_s / 1e12:,.0f}",
    ]


def _dollars(prices: Sequence[float | None]) -> str:
    amounts = [price for price in prices if price is not None]
    return f"{min(amounts):,.2f}" if amounts else "–"


def notes(matching: Sequence[Accelerator], shown: Sequence[Accelerator], zone: str | None) -> list[str]:
    """Return the lines under the table: what it leaves out, the zones, and where its prices come from."""
    lines = []
    if len(matching) > len(shown):
        largest = max(accelerator.chips for accelerator in matching)
        lines.append(f"{len(matching) - len(shown)} larger ones: --max-chips {largest}")
    if zone is None:
        for generation in dict.fromkeys(accelerator.generation for accelerator in shown or matching):
            one_host = ", ".join(name for name in generation.zones if name in generation.one_host_zones)
            slices = ", ".join(name for name in generation.zones if name in generation.slice_zones)
            zones = slices if slices == one_host else f"one host {one_host}; more {slices}"
            lines.append(f"{generation.name}: {zones}")
    place = f"in {zone}" if zone else "in its cheapest zone"
    if any(not accelerator.generation.offered for accelerator in shown):
        lines.append(
            "tpu7x: by Compute Engine or as node pools, not by the Cloud TPU API; two devices a chip (docs/apis.md)"
        )
    lines.append(
        f"USD per hour for the whole slice {place}: list prices of {catalogue.PRICES_READ_IN}, spot floats"
    )
    lines.append("TFLOP/s: peak in bf16; zones move, the API has the last word")
    return lines


KEY = "tpu-stack:grant"
GRANT_COLUMNS = (*HARDWARE, "at once")


def list_granted(path: Path, *, zone: str | None, generation: str | None) -> int:
    """Print, for each line of the grant in a stack's configuration, the types that it covers."""
    lines = [
        line
        for line in read_file(path)
        if zone in (None, line.zone) and generation in (None, line.generation)
    ]
    if not lines:
        filters = " and ".join(name for name in (zone, generation) if name)
        raise RequestError(f"{path}: no line of {KEY} is for {filters}; leave --zone and --generation out")
    console = Terminal(markup=False, emoji=False, highlight=False, width=WIDTH)
    for line in lines:
        until = f", until {line.until}" if line.until else ""
        console.print(
            f"{line.generation} in {line.zone}: {line.chips:,} {line.capacity} chips{until}", style="bold"
        )
        console.print(
            granted_table(line) if covered(line) else f"  no type of {line.generation} is listed there"
        )
        console.print()
    console.print("Only these are free: other zones, and all that is no TPU, are billed (docs/costs.md).")
    return 0


def read_file(path: Path) -> Sequence[GrantLine]:
    """Read the grant of a stack's configuration. Raises RequestError: there is none, or a wrong one."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else reason
        raise RequestError(
            f"--grant {path}: cannot be read as a stack's configuration ({reason}); name one such as Pulumi.dev.yaml"
        ) from None
    config = settings.get("config") if isinstance(settings, dict) else None
    value = config.get(KEY) if isinstance(config, dict) else None
    if not value:
        raise RequestError(f"--grant {path}: has no {KEY}; Pulumi.example.yaml shows how one is written")
    try:
        return reader.read_grant(value)
    except ConfigError as error:
        raise RequestError(f"--grant {path}:\n{error}") from None


def covered(line: GrantLine) -> list[Accelerator]:
    """Return the types of the line's generation that are listed in its zone and are no larger than the line."""
    return [
        accelerator
        for accelerator in catalogue.ACCELERATORS.values()
        if accelerator.generation.name == line.generation
        and line.zone in accelerator.zones
        and accelerator.chips <= line.chips
    ]


def granted_table(line: GrantLine) -> Table:
    """Return a table with a row for each type; `at once` is how many slices of it the line covers together."""
    rows = output.table(*GRANT_COLUMNS, right=GRANT_COLUMNS[2:], wrap=False)
    for accelerator in covered(line):
        rows.add_row(*hardware(accelerator), f"{line.chips // accelerator.chips:,}")
    return rows
