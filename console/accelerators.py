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
from launch.output import Terminal

MOST_CHIPS = 64
"""What is listed when nobody says how large: a line of a typical grant, and few enough rows for one screen."""

WIDTH = 110
"""Columns, however narrow the terminal or whatever the pipe: a figure that is cut short is a wrong figure."""

HARDWARE = ("type", "topology", "hosts", "chips", "devices", "HBM GiB", "TFLOP/s")
COLUMNS = (*HARDWARE, "on-demand", "spot", "zones")


def list_accelerators(*, zone: str | None, generation: str | None, max_chips: int | None) -> int:
    """Print the types of a zone, of a generation, of all; and what the columns mean."""
    found = choose(zone=zone, generation=generation)
    shown = [each for each in found if each.chips <= (max_chips or MOST_CHIPS)]
    console = Terminal(markup=False, emoji=False, highlight=False, width=WIDTH)
    if shown:
        console.print(table(shown, zone))
    for line in notes(found, shown, zone):
        console.print(line)
    return 0


def choose(*, zone: str | None, generation: str | None) -> list[Accelerator]:
    """Return the types of a generation that are listed in a zone, each None for any.

    Raises:
        RequestError: no such zone or generation, or one that has nothing to list.
    """
    which = None
    if generation is not None:
        try:
            which = catalogue.generation(generation.lower(), "any")
        except CatalogueError as error:
            raise RequestError(f"--generation: {error}") from None
    everything = catalogue.OFFERS["any"].values()
    known = sorted({each for made in everything for each in made.zones})
    if zone is not None and zone not in known:
        meant = did_you_mean(zone, known) or f"; choose one of {', '.join(known)}"
        raise RequestError(f'--zone: no TPU is listed in "{zone}"{meant}')
    found = [
        made
        for made in everything
        if (which is None or made.generation is which) and (zone is None or zone in made.zones)
    ]
    if not found and which is not None:
        raise RequestError(f"--zone: no {which.name} is listed in {zone}; it is in {', '.join(which.zones)}")
    return found


def table(shown: Sequence[Accelerator], zone: str | None) -> Table:
    """Return a table with a row for each type; prices are those of the zone, or the lowest of the type's zones."""
    made = Table(box=None, pad_edge=False, header_style="dim")
    for heading in COLUMNS if zone is None else COLUMNS[:-1]:
        made.add_column(heading, justify="left" if heading in ("type", "topology") else "right", no_wrap=True)
    for each in shown:
        zones = [zone] if zone else list(each.zones)
        row = [
            *hardware(each),
            _dollars([catalogue.price_usd_per_hour(each, place, "on-demand") for place in zones]),
            _dollars([catalogue.price_usd_per_hour(each, place, "spot") for place in zones]),
        ]
        made.add_row(*row, *([] if zone else [str(len(zones))]))
    return made


def hardware(each: Accelerator) -> list[str]:
    """Return the cells of HARDWARE."""
    return [
        each.type_name,
        each.topology,
        f"{each.hosts:,}",
        f"{each.chips:,}",
        f"{each.devices:,}",
        f"{each.hbm_gib:,}",
        f"{each.peak_bf16_flops_per_s / 1e12:,.0f}",
    ]


def _dollars(prices: Sequence[float | None]) -> str:
    known = [price for price in prices if price is not None]
    return f"{min(known):,.2f}" if known else "–"


def notes(found: Sequence[Accelerator], shown: Sequence[Accelerator], zone: str | None) -> list[str]:
    """Return the lines under the table: what it leaves out, the zones, and where its prices come from."""
    said = []
    if len(found) > len(shown):
        largest = max(each.chips for each in found)
        said.append(f"{len(found) - len(shown)} larger ones: --max-chips {largest}")
    if zone is None:
        for which in dict.fromkeys(each.generation for each in shown or found):
            alone = [each for each in which.zones if each in which.one_host_zones]
            slices = [each for each in which.zones if each in which.slice_zones]
            said.append(
                f"{which.name}: {', '.join(slices)}"
                if slices == alone
                else f"{which.name}: one host {', '.join(alone)}; more {', '.join(slices)}"
            )
    where = f"in {zone}" if zone else "in its cheapest zone"
    if any(not each.generation.offered for each in shown):
        said.append("tpu7x: only as node pools of a cluster, docs/kubernetes.md")
    said.append(
        f"USD per hour for the whole slice {where}: list prices of {catalogue.PRICES_READ_IN}, spot floats"
    )
    said.append("TFLOP/s: peak in bf16; zones move, the API has the last word")
    return said


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
        asked = " and ".join(each for each in (zone, generation) if each)
        raise RequestError(f"{path}: no line of {KEY} is for {asked}; leave --zone and --generation out")
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
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RequestError(
            f"--grant {path}: cannot be read as a stack's configuration ({error}); name one such as Pulumi.dev.yaml"
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
        made
        for made in catalogue.ACCELERATORS.values()
        if made.generation.name == line.generation and line.zone in made.zones and made.chips <= line.chips
    ]


def granted_table(line: GrantLine) -> Table:
    """Return a table with a row for each type; `at once` is how many slices of it the line covers together."""
    made = Table(box=None, header_style="dim")
    for heading in GRANT_COLUMNS:
        made.add_column(heading, justify="left" if heading in GRANT_COLUMNS[:2] else "right", no_wrap=True)
    for each in covered(line):
        made.add_row(*hardware(each), f"{line.chips // each.chips:,}")
    return made
