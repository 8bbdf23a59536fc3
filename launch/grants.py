"""What a TPU Research Cloud grant gives, line by line: which types fit in it, and how often at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from contracts.errors import RequestError
from infra import catalogue
from infra.catalogue import Accelerator
from infra.config import ConfigError, GrantLine, grant
from launch.accelerators import HARDWARE, WIDTH, hardware

KEY = "tpu-stack:grant"
COLUMNS = (*HARDWARE, "at once")


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
    console = Console(markup=False, emoji=False, highlight=False, width=WIDTH)
    for line in lines:
        until = f", until {line.until}" if line.until else ""
        console.print(
            f"{line.generation} in {line.zone}: {line.chips:,} {line.capacity} chips{until}", style="bold"
        )
        console.print(table(line) if covered(line) else f"  no type of {line.generation} is listed there")
        console.print()
    console.print("Only these are free: other zones, and all that is no TPU, are billed (docs/costs.md).")
    return 0


def read_file(path: Path) -> Sequence[GrantLine]:
    """Raises RequestError: the file cannot be read, has no grant, or a wrong one."""
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
        return grant.read_alone(value)
    except ConfigError as error:
        raise RequestError(f"--grant {path}:\n{error}") from None


def covered(line: GrantLine) -> list[Accelerator]:
    """The types of the line's generation that are listed in its zone and are no larger than the line."""
    return [
        made
        for made in catalogue.ACCELERATORS.values()
        if made.generation.name == line.generation and line.zone in made.zones and made.chips <= line.chips
    ]


def table(line: GrantLine) -> Table:
    """A row for each type; `at once` is how many slices of it the line covers together."""
    made = Table(box=None, header_style="dim")
    for heading in COLUMNS:
        made.add_column(heading, justify="left" if heading in COLUMNS[:2] else "right", no_wrap=True)
    for each in covered(line):
        made.add_row(*hardware(each), f"{line.chips // each.chips:,}")
    return made
