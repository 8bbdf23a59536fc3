"""Devices become a grid on every topology, and what is cut over it can be had whole."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from contracts.errors import RequestError
from jobs.flax_mlm import sharding

pytestmark = pytest.mark.usefixtures("two_devices")


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a TPU's device says of itself, as far as a mesh asks."""

    id: int
    coords: tuple[int, int, int]
    slice_index: int
    process_index: int = 0
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"


def chips(columns: int, rows: int, slices: int = 1) -> list[Chip]:
    return [
        Chip(id=number, coords=(number % columns, number // columns % rows, 0), slice_index=of)
        for of in range(slices)
        for number in range(of * columns * rows, (of + 1) * columns * rows)
    ]


@pytest.mark.parametrize("topology", [(2, 2), (2, 4), (4, 4), (4, 8), (16, 16)])
def test_any_number_that_divides_the_chips_of_a_slice_makes_groups(topology: tuple[int, int]) -> None:
    devices = chips(*topology)
    for fsdp in (1, 2, 4, 8, 16, 32, 64):
        if len(devices) % fsdp == 0:
            made = sharding.grid(fsdp, devices)
            assert made.shape == (len(devices) // fsdp, fsdp)
            assert {chip.id for chip in made.flat} == {chip.id for chip in devices}


def test_a_group_lies_within_its_slice() -> None:
    made = sharding.grid(4, chips(2, 4, slices=2))
    assert made.shape == (4, 4)
    assert all(len({chip.slice_index for chip in group}) == 1 for group in made)


def test_a_group_larger_than_a_slice_is_refused_with_what_would_do() -> None:
    with pytest.raises(RequestError, match="--fsdp 16: .* the 8 devices of one .* divides 8"):
        sharding.grid(16, chips(2, 4, slices=2))


def test_what_is_cut_comes_whole_to_the_host() -> None:
    mesh = sharding.make_mesh(2)
    tree = {"matrix": np.arange(8.0).reshape(4, 2), "vector": np.arange(3.0)}
    placed = jax.device_put(tree, sharding.shardings(tree, mesh))
    assert placed["matrix"].addressable_shards[0].data.shape == (2, 2)
    for name, found in sharding.to_host(placed, mesh).items():
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, tree[name])
