"""What is wrong with a queued resource's properties, before anything is sent. Pure; all mistakes at once.

A configuration has been through `infra.config.reader`, whose messages speak of what the user wrote. This is the second
line: what a program gives wrongly would otherwise be heard of hours later, or by Google only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from infra import catalogue, naming
from infra.cloud_tpu.wanted import is_unknown

Props = Mapping[str, Any]
Mistake = tuple[str, str]  # the property's name and what is wrong with it

GENERATIONS = ("V2", "V3", "V4", "V5LITE_POD", "V5P", "V6E")  # AcceleratorConfig.type of tpu.v2
TOPOLOGY = re.compile(r"[1-9]\d*x[1-9]\d*(x[1-9]\d*)?")
RESERVATION = re.compile(r"(projects|folders|organizations)/[^/]+/locations/[^/]+/reservations/[^/]+")
DISK = re.compile(r"projects/[^/]+/(zones|regions)/[^/]+/disks/[^/]+")
CAPACITIES = ("on-demand", "spot", "reserved")
MODES = ("read-write", "read-only")
MOST_NODES = 256

TEXTS = (
    "project", "zone", "queued_resource_id", "owner", "accelerator_type", "accelerator_generation", "topology",
    "runtime_version", "capacity", "reservation_name", "network", "subnetwork", "service_account_email",
    "boot_disk_kms_key", "description",
)  # fmt: skip
NUMBERS = ("node_count", "guaranteed_s", "valid_until_s", "wait_s")
TABLES = ("metadata", "labels")
REQUIRED = ("project", "zone", "queued_resource_id", "owner", "runtime_version", "capacity", "wait_s")
KNOWN = frozenset({*TEXTS, *NUMBERS, *TABLES, "external_addresses", "tags", "data_disks"})


def found_in(props: Props) -> tuple[Mistake, ...]:
    """Properties whose value is not known yet, in a preview, are left out."""
    given = {
        name: value
        for name, value in props.items()
        if value is not None and not name.startswith("__") and not is_unknown(value)
    }
    unknown = {name for name, value in props.items() if is_unknown(value)}
    missing = [(name, "is missing") for name in REQUIRED if name not in given and name not in unknown]
    odd = [(name, "is no property of a queued resource") for name in given if name not in KNOWN]
    types = _wrong_types(given)
    wrong = {name for name, _ in types}
    rules = _rules({name: value for name, value in given.items() if name not in wrong}, unknown | wrong)
    return (*missing, *odd, *types, *rules)


def _wrong_types(given: Props) -> list[Mistake]:
    def is_text(value: object) -> bool:
        return isinstance(value, str)

    def is_whole(value: object) -> bool:
        if isinstance(value, float):
            return value.is_integer()
        return isinstance(value, int) and not isinstance(value, bool)

    def is_table(value: object) -> bool:
        return isinstance(value, Mapping) and all(isinstance(item, str) for item in value.values())

    checks: list[tuple[tuple[str, ...], Callable[[object], bool], str]] = [
        (TEXTS, is_text, "must be a text"),
        (NUMBERS, is_whole, "must be a whole number"),
        (TABLES, is_table, "must be a table of texts"),
        (("external_addresses",), lambda value: isinstance(value, bool), "must be true or false"),
        (("tags", "data_disks"), lambda value: isinstance(value, list | tuple), "must be a list"),
    ]
    return [
        (name, f"{_shown(given[name])} {rule}")
        for names, holds, rule in checks
        for name in names
        if name in given and not holds(given[name])
    ]


def _rules(given: Props, unknown: set[str]) -> list[Mistake]:
    found: list[Mistake] = []

    def require(name: str, holds: bool, rule: str) -> None:
        if name in given and not holds:
            found.append((name, f"{_shown(given[name])} {rule}"))

    def matches(name: str, pattern: re.Pattern[str]) -> bool:
        return pattern.fullmatch(str(given.get(name, ""))) is not None

    nodes = int(given.get("node_count", 1))
    longest = naming.LONGEST - (len(f"-{nodes - 1}") if nodes > 1 else 0)
    own_id = str(given.get("queued_resource_id", ""))
    require("project", bool(given.get("project")), "must not be empty")
    require("zone", matches("zone", catalogue.ZONE), "is no zone; such as us-central1-a")
    require(
        "queued_resource_id",
        matches("queued_resource_id", naming.NAME) and len(own_id) <= longest,
        f"must be at most {longest} lower-case letters, digits and hyphens, the first a letter",
    )
    owner = str(given.get("owner", ""))
    require("owner", bool(owner) and matches("owner", naming.LABEL_VALUE), "must be fit for a label")
    require("runtime_version", bool(given.get("runtime_version")), "must not be empty")
    require("capacity", given.get("capacity") in CAPACITIES, f"must be {', '.join(CAPACITIES)}")
    require("node_count", 1 <= nodes <= MOST_NODES, f"must be 1 to {MOST_NODES}")
    require("wait_s", given.get("wait_s", 0) >= 0, "must not be negative")
    for name in ("guaranteed_s", "valid_until_s"):
        require(name, given.get(name, 1) > 0, "must be more than 0")
    require(
        "accelerator_generation",
        given.get("accelerator_generation") in GENERATIONS,
        f"must be {', '.join(GENERATIONS)}",
    )
    require("topology", matches("topology", TOPOLOGY), "must be such as 4x4 or 2x2x4")
    found += _hardware(given, unknown)
    found += _capacity(given, unknown)
    for key, value in given.get("labels", {}).items():
        if not naming.LABEL_KEY.fullmatch(key) or not naming.LABEL_VALUE.fullmatch(value):
            found.append(("labels", f'"{key}: {value}" has letters that a label must not have'))
        if key == naming.OWNER_LABEL:
            found.append(("labels", f'"{key}" is set by itself, from owner'))
    for tag in given.get("tags", ()):
        if not isinstance(tag, str) or not naming.NAME.fullmatch(tag):
            found.append(("tags", f"{_shown(tag)} is no network tag: lower-case letters, digits and hyphens"))
    return found + _disks(given, nodes)


def _hardware(given: Props, unknown: set[str]) -> list[Mistake]:
    by_type, by_shape = "accelerator_type" in given, {"accelerator_generation", "topology"} & set(given)
    if by_type and by_shape:
        return [("accelerator_type", f"excludes {' and '.join(sorted(by_shape))}: give one or the other")]
    incomplete = not by_type and len(by_shape) < 2
    if incomplete and not {"accelerator_type", "accelerator_generation", "topology"} & unknown:
        return [("accelerator_type", "is missing; or give accelerator_generation and topology")]
    return []


def _capacity(given: Props, unknown: set[str]) -> list[Mistake]:
    found: list[Mistake] = []
    if {"capacity", "reservation_name"} & unknown:
        return found
    reserved = given.get("capacity") == "reserved"
    if reserved and not RESERVATION.fullmatch(given.get("reservation_name", "")):
        found.append(
            ("reservation_name", "must be projects/P/locations/Z/reservations/R for reserved capacity")
        )
    if not reserved and given.get("reservation_name"):
        found.append(("reservation_name", f"goes with reserved capacity, not with {given.get('capacity')}"))
    if given.get("capacity") == "spot" and given.get("guaranteed_s"):
        found.append(("guaranteed_s", "is not to be had for spot capacity, which can be taken at any time"))
    return found


def _disks(given: Props, nodes: int) -> list[Mistake]:
    found: list[Mistake] = []
    for index, disk in enumerate(given.get("data_disks", ())):
        at = f"data_disks[{index}]"
        if not isinstance(disk, Mapping) or not DISK.fullmatch(str(disk.get("source_disk"))):
            found.append((at, "needs a source_disk, projects/P/zones/Z/disks/D"))
        elif disk.get("mode", MODES[0]) not in MODES:
            found.append((at, f"{_shown(disk.get('mode'))} must be {' or '.join(MODES)}"))
        elif nodes > 1 and disk.get("mode", MODES[0]) == MODES[0]:
            found.append((at, f"can be written by one node only, and there are {nodes}: use read-only"))
    return found


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
