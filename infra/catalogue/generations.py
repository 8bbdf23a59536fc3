"""The generations of TPU: what a chip is, what a type's number counts, which sizes there are and where. Data, no I/O.

Cores, memory and peak of a chip, sizes and hosts: Google's page of each generation (https://cloud.google.com/tpu/docs/v2
and v3, v4, v5e, v5p, v6e, tpu7x). Devices per chip: JAX takes the two cores of a v4 or v5p chip as one device
("megacore"), those of v2, v3 and TPU7x one by one (https://docs.jax.dev, jax.experimental.pallas.tpu.ChipVersion).
Clock: v2, v3 and v4 by Jouppi et al. 2023 (arXiv:2304.01433); of the others, which nobody publishes, the peak divided
by what a core's matrix units do in a cycle (131,072 operations for v5e and v5p, 524,288 for v6e and TPU7x). Memory and
links: those pages, and Jouppi et al. for v2, v3 and v4; a page that counts both directions of a link is halved.
Runtime versions: https://cloud.google.com/tpu/docs/runtimes. Zones: https://cloud.google.com/tpu/docs/regions-zones for
North America and Europe, elsewhere SkyPilot's price catalogue v8, which is made from Google's SKUs; zones that only
single tenants get are left out. Which v4 and v5p sizes there are: the same catalogue. All read in November 2026.

Shapes, "AxB" or "AxBxC", say how many chips lie along each direction. Two dimensions (v2, v3, v5e, v6e): the shapes of
Google's pages for v5e and v6e (https://cloud.google.com/tpu/docs/v5e and …/v6e). The v2 and v3 pages name none; theirs
are the host bounds that torch_xla sets for these types, times the 2x2 chips of a host. Three dimensions (v4, v5p): a
cube of 4x4x4 chips is the unit that optical switches join, so a slice is a part of one cube or whole cubes. Of the
shapes of one size a type name means the one most like a cube (https://cloud.google.com/tpu/docs/types-topologies).
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Literal

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """One generation. A type is called `type_prefix`-number, the number counting TensorCores or chips.

    A slice of up to `most_chips_on_one_host` chips is one VM; a larger one has `chips_per_slice_host` on each.
    clock_mhz: of a core. ici_gb_per_s_per_chip: what a chip sends over all its links to other chips of the slice.
    offered: by the Cloud TPU API; Compute Engine and GKE have others.
    """

    name: str
    type_prefix: str
    number_counts: Literal["cores", "chips"]
    dimensions: Literal[2, 3]
    cores_per_chip: int
    devices_per_chip: int
    hbm_gib_per_chip: int
    peak_bf16_tflops_per_chip: int
    clock_mhz: int
    hbm_gb_per_s_per_chip: int
    ici_gb_per_s_per_chip: int
    most_chips_on_one_host: int
    chips_per_slice_host: int = 4
    sizes_chips: tuple[int, ...]
    runtime_version: str | None
    one_host_zones: tuple[str, ...]
    slice_zones: tuple[str, ...]
    offered: bool = True

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


def _cubes(*, most_chips: int) -> tuple[int, ...]:
    """Parts of a cube, and every number of whole cubes that a type has."""
    sizes = (*PARTS_OF_A_CUBE, *range(CUBE_CHIPS, most_chips + 1, CUBE_CHIPS))
    return tuple(chips for chips in sizes if cuboid(chips))


_V5E_ZONES = (
    "us-central1-a",
    "us-south1-a",
    "us-west1-c",
    "us-west4-a",
    "europe-west4-a",
    "europe-west4-b",
)
_V5P_ZONES = ("us-central1-a", "us-east5-a", "europe-west4-b")
_V6E_ZONES = (
    "us-central1-b",
    "us-east1-d",
    "us-east5-a",
    "us-east5-b",
    "us-south1-ai1b",
    "europe-west4-a",
    "asia-northeast1-b",
    "asia-south1-b",
    "asia-south1-c",
    "asia-southeast1-b",
    "southamerica-west1-a",
)

_TPU7X_ZONES = ("us-central1-ai1a", "us-central1-c")

V2 = Generation(
    name="v2",
    type_prefix="v2",
    number_counts="cores",
    dimensions=2,
    cores_per_chip=2,
    devices_per_chip=2,
    hbm_gib_per_chip=16,
    peak_bf16_tflops_per_chip=45,
    clock_mhz=700,
    hbm_gb_per_s_per_chip=700,
    ici_gb_per_s_per_chip=248,
    most_chips_on_one_host=4,
    sizes_chips=(4, 16, 64, 128, 256),
    runtime_version="tpu-ubuntu2204-base",
    one_host_zones=("us-central1-b", "us-central1-c", "europe-west4-a", "asia-east1-c"),
    slice_zones=("us-central1-a", "europe-west4-a"),
)
V3 = Generation(
    name="v3",
    type_prefix="v3",
    number_counts="cores",
    dimensions=2,
    cores_per_chip=2,
    devices_per_chip=2,
    hbm_gib_per_chip=32,
    peak_bf16_tflops_per_chip=123,
    clock_mhz=940,
    hbm_gb_per_s_per_chip=900,
    ici_gb_per_s_per_chip=280,
    most_chips_on_one_host=4,
    sizes_chips=(4, 16, 32, 64, 128, 256, 512, 1024),
    runtime_version="tpu-ubuntu2204-base",
    one_host_zones=("us-central1-a", "us-central1-b", "europe-west4-a"),
    slice_zones=("europe-west4-a",),
)
V4 = Generation(
    name="v4",
    type_prefix="v4",
    number_counts="cores",
    dimensions=3,
    cores_per_chip=2,
    devices_per_chip=1,
    hbm_gib_per_chip=32,
    peak_bf16_tflops_per_chip=275,
    clock_mhz=1050,
    hbm_gb_per_s_per_chip=1200,
    ici_gb_per_s_per_chip=300,
    most_chips_on_one_host=4,
    sizes_chips=_cubes(most_chips=2048),
    runtime_version="tpu-ubuntu2204-base",
    one_host_zones=("us-central2-b",),
    slice_zones=("us-central2-b",),
)
V5E = Generation(
    name="v5e",
    type_prefix="v5litepod",
    number_counts="chips",
    dimensions=2,
    cores_per_chip=1,
    devices_per_chip=1,
    hbm_gib_per_chip=16,
    peak_bf16_tflops_per_chip=197,
    clock_mhz=1500,
    hbm_gb_per_s_per_chip=819,
    ici_gb_per_s_per_chip=200,
    most_chips_on_one_host=8,
    sizes_chips=(1, 4, 8, 16, 32, 64, 128, 256),
    runtime_version="v2-alpha-tpuv5-lite",
    one_host_zones=_V5E_ZONES,
    slice_zones=_V5E_ZONES,
)
V5P = Generation(
    name="v5p",
    type_prefix="v5p",
    number_counts="cores",
    dimensions=3,
    cores_per_chip=2,
    devices_per_chip=1,
    hbm_gib_per_chip=95,
    peak_bf16_tflops_per_chip=459,
    clock_mhz=1750,
    hbm_gb_per_s_per_chip=2765,
    ici_gb_per_s_per_chip=600,
    most_chips_on_one_host=4,
    sizes_chips=_cubes(most_chips=6144),
    runtime_version="v2-alpha-tpuv5",
    one_host_zones=_V5P_ZONES,
    slice_zones=_V5P_ZONES,
)
V6E = Generation(
    name="v6e",
    type_prefix="v6e",
    number_counts="chips",
    dimensions=2,
    cores_per_chip=1,
    devices_per_chip=1,
    hbm_gib_per_chip=32,
    peak_bf16_tflops_per_chip=918,
    clock_mhz=1750,
    hbm_gb_per_s_per_chip=1638,
    ici_gb_per_s_per_chip=400,
    most_chips_on_one_host=8,
    sizes_chips=(1, 4, 8, 16, 32, 64, 128, 256),
    runtime_version="v2-alpha-tpuv6e",
    one_host_zones=_V6E_ZONES,
    slice_zones=_V6E_ZONES,
)
TPU7X = Generation(
    name="tpu7x",
    type_prefix="tpu7x",
    number_counts="cores",
    dimensions=3,
    cores_per_chip=2,
    devices_per_chip=2,
    hbm_gib_per_chip=192,
    peak_bf16_tflops_per_chip=2307,
    clock_mhz=2200,
    hbm_gb_per_s_per_chip=7380,
    ici_gb_per_s_per_chip=600,
    most_chips_on_one_host=4,
    sizes_chips=_cubes(most_chips=9216),
    runtime_version=None,
    one_host_zones=_TPU7X_ZONES,
    slice_zones=_TPU7X_ZONES,
    offered=False,
)

GENERATIONS = (V2, V3, V4, V5E, V5P, V6E, TPU7X)
"""All that are known, the oldest first."""

OFFERED = tuple(tpu_generation for tpu_generation in GENERATIONS if tpu_generation.offered)
"""Those that the Cloud TPU API makes."""

RUNTIME_VERSIONS = (
    *dict.fromkeys(
        tpu_generation.runtime_version for tpu_generation in OFFERED if tpu_generation.runtime_version
    ),
    *("tpu-vm-base", "tpu-vm-v4-base", "v2-alpha-tpuv4", "v2-alpha-tpuv4-pod"),
)
"""Those with a name of their own, Google's of today first."""
_FRAMEWORK_RUNTIME = re.compile(
    r"tpu-vm-(?:v4-)?(?:tf|pt)-[0-9]+\.[0-9]+(?:\.[0-9]+)?(?:-pod)?(?:-(?:pjrt|se))?"
)


def is_runtime_version(name: str) -> bool:
    """Whether it is one of the above, or named as those for TensorFlow and PyTorch are: tpu-vm-tf-2.18.0-pod-pjrt."""
    return name in RUNTIME_VERSIONS or _FRAMEWORK_RUNTIME.fullmatch(name) is not None
