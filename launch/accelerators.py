"""The table of TPUs that can be had, for a person who chooses one. What it knows is the catalogue's."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from contracts.errors import RequestError
from infra import catalogue
from infra.catalogue import Accelerator, CatalogueError

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
    console = Console(markup=False, emoji=False, highlight=False, width=WIDTH)
    if shown:
        console.print(table(shown, zone))
    for line in notes(found, shown, zone):
        console.print(line)
    return 0


def choose(*, zone: str | None, generation: str | None) -> list[Accelerator]:
    """The types of a generation that are listed in a zone, each None for any.

    Raises:
        RequestError: no such zone or generation, or one that has nothing to list.
    """
    which = None
    if generation is not None:
        try:
            which = catalogue.generation(generation.lower())
        except CatalogueError as error:
            raise RequestError(f"--generation: {error}") from None
        if not which.offered:
            raise RequestError(
                f"--generation: {which.name} is not offered by the Cloud TPU API, only by Compute Engine and GKE"
            )
    known = sorted({each for made in catalogue.ACCELERATORS.values() for each in made.zones})
    if zone is not None and zone not in known:
        raise RequestError(f'--zone: no TPU is listed in "{zone}"; choose one of {", ".join(known)}')
    found = [
        made
        for made in catalogue.ACCELERATORS.values()
        if (which is None or made.generation is which) and (zone is None or zone in made.zones)
    ]
    if not found and which is not None:
        raise RequestError(f"--zone: no {which.name} is listed in {zone}; it is in {', '.join(which.zones)}")
    return found


def table(shown: Sequence[Accelerator], zone: str | None) -> Table:
    """A row for each; prices are those of the zone, or the lowest of the type's zones."""
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
    """The cells of HARDWARE."""
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
    """What the table leaves out, where the types are to be had, and what its prices are."""
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
    said.append(
        f"USD per hour for the whole slice {where}: list prices of {catalogue.PRICES_READ_IN}, spot floats"
    )
    said.append("TFLOP/s: peak in bf16; zones move, the API has the last word")
    return said
