"""Reads `tpu-stack:grant`: the lines of a TPU Research Cloud grant, as its e-mail lists them. Pure."""

from __future__ import annotations

import typing

from contracts.inventory import Capacity
from infra import catalogue
from infra.catalogue import CatalogueError
from infra.config import ConfigError, GrantLine, formats
from infra.config.section import Section

CAPACITIES: tuple[Capacity, ...] = tuple(each for each in typing.get_args(Capacity) if each != "reserved")
MOST_CHIPS = 1_000_000


def read(root: Section, *, unlisted: bool) -> tuple[GrantLine, ...]:
    """unlisted: take zones that are not known here too."""
    return tuple(_line(section, unlisted) for section in root.sections("grant"))


def read_alone(value: object) -> tuple[GrantLine, ...]:
    """The lines of a value of `tpu-stack:grant`, whatever else the configuration says.

    Raises:
        ConfigError: with every mistake in them.
    """
    problems: list[str] = []
    root = Section({"grant": value}, prefix="tpu-stack:", problems=problems)
    lines = read(root, unlisted=True)
    if problems:
        raise ConfigError(tuple(problems))
    return lines


def _line(section: Section, unlisted: bool) -> GrantLine:
    generation = _generation(section)
    zone = section.text(
        "zone",
        "",
        rule=formats.zone(unlisted=unlisted),
        missing="a grant is for one zone; write it as the grant does",
    )
    chips = section.integer("chips", 0, least=1, most=MOST_CHIPS, missing="write how many the grant lists")
    capacity = section.choice(
        "capacity", "spot", CAPACITIES, missing="write on-demand or spot, as the grant does"
    )
    until = section.date("until")
    section.close()
    return GrantLine(generation=generation, zone=zone, chips=chips, capacity=capacity, until=until)


def _generation(section: Section) -> str:
    """Its name, of that or of the prefix that its types have."""
    text = section.text("type", None, missing="write the generation, such as v5e")
    if text is None:
        return ""
    try:
        which = catalogue.generation(text)
    except CatalogueError as error:
        if text in catalogue.ACCELERATORS:
            one = catalogue.ACCELERATORS[text]
            section.refuse(
                "type", f"is a size; write {one.generation.name}, and how many as chips: {one.chips}"
            )
        else:
            section.say("type", str(error))
        return ""
    if not which.offered:
        section.refuse("type", f"is not offered by the Cloud TPU API; choose one of {catalogue.NAMES}")
    return which.name
