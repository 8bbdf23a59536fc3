"""Shapes of slices: how many chips lie along each direction, written "AxB" or "AxBxC". Pure, no I/O.

Two dimensions (v2, v3, v5e, v6e): the shapes of Google's pages for v5e and v6e
(https://cloud.google.com/tpu/docs/v5e and …/v6e, read in November 2026). The v2 and v3 pages name none; theirs are the
host bounds that torch_xla sets for these types, times the 2x2 chips of a host.

Three dimensions (v4, v5p): a cube of 4x4x4 chips is the unit that optical switches join, so a slice is a part of one
cube or whole cubes. Of the shapes of one size a type name means the one most like a cube
(https://cloud.google.com/tpu/docs/types-topologies and …/v5p, read in November 2026).
"""

from __future__ import annotations

import math
import re

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
    cubes, rest = divmod(chips, CUBE_CHIPS)
    if cubes == 0 or rest:
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
