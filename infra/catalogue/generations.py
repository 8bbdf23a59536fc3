"""The generations of TPU, from `tpus.toml`, and the shapes that their chips form. Look-ups, no I/O but that file.

Shapes, "AxB" or "AxBxC", say how many chips lie along each direction. Two dimensions (v2, v3, v5e, v6e): the shapes of
Google's pages for v5e and v6e (https://cloud.google.com/tpu/docs/v5e and …/v6e). The v2 and v3 pages name none; theirs
are the host bounds that torch_xla sets for these types, times the 2x2 chips of a host. Three dimensions (v4, v5p): a
cube of 4x4x4 chips is the unit that optical switches join, so a slice is a part of one cube or whole cubes. Of the
shapes of one size a type name means the one most like a cube (https://cloud.google.com/tpu/docs/types-topologies).
All read in November 2026.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from contracts.inventory import Capacity

SHAPE = re.compile(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){1,2}")

PLANES = {
    1: "1x1",
    4: "2x2",
    8: "2x4",
    16: "4x4",
    32: "4x8",
    64: "8x8",
    128: "8x16",
    256: "16x16",
    512: "16x32",
    1024: "32x32",
}
"""Chips → the shape in two dimensions; each number of chips has one."""

PARTS_OF_A_CUBE = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4"}

CUBE_SIDE = 4
CUBE_CHIPS = CUBE_SIDE**3

LONGEST_SIDE = 256
"""No type has a longer side. So prime numbers of cubes from 67 on, which only make a line, have no type: the v5p types
of the API (as SkyPilot's catalogue v8 lists them; read in November 2026) lack these six sizes and no other."""


def sides(topology: str) -> tuple[int, ...]:
    """Chips along each direction: "2x2x4" → (2, 2, 4).

    Raises:
        ValueError: the text is no shape of two or three dimensions.
    """
    if SHAPE.fullmatch(topology) is None:
        raise ValueError(f'"{topology}" is not a topology; write it as 4x8 or 4x4x8')
    return tuple(int(side) for side in topology.split("x"))


def chips_in(topology: str) -> int:
    """The number of chips of a shape.

    Raises:
        ValueError: the text is no shape.
    """
    return math.prod(sides(topology))


def cuboid(chips: int) -> str | None:
    """The three-dimensional shape that a type of so many chips has, or None if no type has so many."""
    if chips in PARTS_OF_A_CUBE:
        return PARTS_OF_A_CUBE[chips]
    cubes, remainder = divmod(chips, CUBE_CHIPS)
    if cubes == 0 or remainder:
        return None
    in_cubes = min(_boxes(cubes), key=sum)
    if in_cubes[-1] * CUBE_SIDE > LONGEST_SIDE:
        return None
    return "x".join(str(side * CUBE_SIDE) for side in in_cubes)


def is_made_of_cubes(topology: str) -> bool:
    """Whether v4 and v5p can be wired so: AxBxC with A ≤ B ≤ C, each a multiple of 4.

    Raises:
        ValueError: the text is no shape.
    """
    along = sides(topology)
    return len(along) == 3 and sorted(along) == list(along) and all(side % CUBE_SIDE == 0 for side in along)


def _boxes(volume: int) -> list[tuple[int, int, int]]:
    """Every a ≤ b ≤ c with a·b·c = volume."""
    return [
        (a, b, volume // a // b)
        for a in range(1, math.isqrt(volume) + 1)
        if volume % a == 0
        for b in range(a, math.isqrt(volume // a) + 1)
        if volume // a % b == 0
    ]


Prices = Mapping[str, Mapping[Capacity, float]]
"""Region → capacity → USD per chip and hour."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeKind:
    """The hosts of a generation as nodes of a cluster. A machine type is `prefix`-Nt, N being its chips.

    label: the value of cloud.google.com/gke-tpu-accelerator on its nodes.
    workload_policy: slices of several nodes are placed by a policy of their own that carries the topology.
    """

    prefix: str
    label: str
    chips: tuple[int, ...]
    boot_disk_type: str
    workload_policy: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeKind:
    """The hosts of a generation as instances of Compute Engine; their machine types and disks are those of its nodes.

    image: of a host. quota, spot_quota: the ids of its quotas in chips; spot_quota counts flex-start too; empty: not
    known. on_request: capacities that Google opens to a project that has asked for them.
    """

    image: str
    quota: str
    spot_quota: str = ""
    on_request: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """One generation. A type is called `type_prefix`-number, the number counting TensorCores or chips.

    sizes_chips: of the types; the file has `largest_chips` in its place where all parts of a cube and all numbers of
    cubes up to it are sizes. A slice of up to `most_chips_on_one_host` chips is one VM; a larger one has
    `chips_per_slice_host` on each.
    clock_mhz: of a core. ici_gb_per_s_per_chip: what a chip sends over all its links to other chips of the slice.
    dcn_gb_per_s_per_chip: its part of what its host sends to other slices; None: not published.
    api_name: of the Cloud TPU API; empty: only Compute Engine and GKE have it. quota_prefix: how the ids of its quotas
    begin. disk_types: of data disks, the default first; most_disks: beside the boot disk.
    zones: where it is listed; the file has `one_host_zones` and `slice_zones` where these differ. one_host_prices: for
    slices of one host, where these have other prices. nodes: None: GKE does not have it. compute: None: Compute Engine
    makes no slices of it. flex_start_zones: where Google lists that; queued_flex_start: the Cloud TPU API has it.
    """

    name: str
    type_prefix: str
    number_counts: Literal["cores", "chips"]
    dimensions: Literal[2, 3]
    sizes_chips: tuple[int, ...]
    most_chips_on_one_host: int
    chips_per_slice_host: int = 4
    cores_per_chip: int
    devices_per_chip: int
    hbm_gib_per_chip: int
    peak_bf16_tflops_per_chip: int
    clock_mhz: int
    hbm_gb_per_s_per_chip: int
    ici_gb_per_s_per_chip: int
    dcn_gb_per_s_per_chip: float | None = None
    api_name: str = ""
    runtime_version: str | None = None
    quota_prefix: str = ""
    disk_types: tuple[str, ...]
    most_disks: int
    one_host_zones: tuple[str, ...]
    slice_zones: tuple[str, ...]
    prices: Prices = dataclasses.field(default_factory=dict, repr=False, hash=False)
    one_host_prices: Prices = dataclasses.field(default_factory=dict, repr=False, hash=False)
    nodes: NodeKind | None = None
    compute: ComputeKind | None = None
    flex_start_zones: tuple[str, ...] = ()
    queued_flex_start: bool = False

    @property
    def offered(self) -> bool:
        """Whether the Cloud TPU API has it."""
        return bool(self.api_name)

    @property
    def zones(self) -> tuple[str, ...]:
        """Every zone in which some type of it is listed."""
        return tuple(dict.fromkeys((*self.one_host_zones, *self.slice_zones)))

    @property
    def peak_bf16_flops_per_s_per_chip(self) -> float:
        return self.peak_bf16_tflops_per_chip * 1e12

    def topology(self, chips: int) -> str:
        """The shape that a type of so many chips has.

        Raises:
            KeyError: no type has so many chips.
        """
        shape = PLANES.get(chips) if self.dimensions == 2 else cuboid(chips)
        if shape is None or chips not in self.sizes_chips:
            raise KeyError(f"{self.name} has no type of {chips} chips")
        return shape

    def usd_per_chip_hour(self, region: str, capacity: Capacity, *, hosts: int) -> float | None:
        """The list price of a chip in a slice of so many hosts; None where none is known, as for every reservation."""
        prices = self.one_host_prices if hosts == 1 and self.one_host_prices else self.prices
        return prices.get(region, {}).get(capacity)

    def lowest_usd_per_chip_hour(self, capacity: Capacity) -> float | None:
        """The least that a chip of a slice costs in any region; None where no price is known.

        Where there is no price at all, the most expensive generation stands for it; where flex-start has none, spot
        does, which is no more expensive.
        """
        if not self.prices:
            priced = [tpu_generation for tpu_generation in GENERATIONS if tpu_generation.prices]
            most_expensive = max(priced, key=lambda priced: priced.lowest_usd_per_chip_hour("on-demand") or 0)
            return most_expensive.lowest_usd_per_chip_hour(capacity)
        lowest = min((usd[capacity] for usd in self.prices.values() if capacity in usd), default=None)
        return (
            self.lowest_usd_per_chip_hour("spot") if lowest is None and capacity == "flex-start" else lowest
        )


def read(table: Mapping[str, Any], name: str) -> Generation:
    """The generation of one table of `tpus.toml`."""
    values = _with_tuples(table)
    values.pop("sources", None)
    if (zones := values.pop("zones", None)) is not None:
        values |= {"one_host_zones": zones, "slice_zones": zones}
    if (largest := values.pop("largest_chips", None)) is not None:
        sizes = (*PARTS_OF_A_CUBE, *range(CUBE_CHIPS, largest + 1, CUBE_CHIPS))
        values["sizes_chips"] = tuple(chips for chips in sizes if cuboid(chips))
    if (nodes := values.pop("nodes", None)) is not None:
        values["nodes"] = NodeKind(**_with_tuples(nodes))
    if (compute := values.pop("compute", None)) is not None:
        values["compute"] = ComputeKind(**_with_tuples(compute))
    return Generation(name=name, **values)


def _with_tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


_TABLES = tomllib.loads(Path(__file__).with_name("tpus.toml").read_text(encoding="utf-8"))

PRICES_READ_IN: str = _TABLES["prices_read_in"]

GENERATIONS = tuple(
    read(table, name) for name, table in _TABLES.items() if isinstance(table, dict) and name != "sources"
)
"""All that are known, the oldest first."""

OFFERED = tuple(tpu_generation for tpu_generation in GENERATIONS if tpu_generation.offered)
"""Those that the Cloud TPU API makes."""

RUNTIME_VERSIONS: tuple[str, ...] = (
    *dict.fromkeys(
        tpu_generation.runtime_version for tpu_generation in OFFERED if tpu_generation.runtime_version
    ),
    *_TABLES["other_runtime_versions"],
)
"""Those with a name of their own, Google's of today first."""
_FRAMEWORK_RUNTIME = re.compile(
    r"tpu-vm-(?:v4-)?(?:tf|pt)-[0-9]+\.[0-9]+(?:\.[0-9]+)?(?:-pod)?(?:-(?:pjrt|se))?"
)


def is_runtime_version(name: str) -> bool:
    """Whether it is one of the above, or named as those for TensorFlow and PyTorch are: tpu-vm-tf-2.18.0-pod-pjrt."""
    return name in RUNTIME_VERSIONS or _FRAMEWORK_RUNTIME.fullmatch(name) is not None
