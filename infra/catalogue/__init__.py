"""The TPUs that Google offers: generations, types, topologies, hosts, zones, runtimes and prices. Look-ups, no I/O.

Availability moves, so what a zone or price here says is worth a warning, never a refusal that cannot be overridden: the
Cloud TPU API's own lists of accelerator types and runtime versions are the truth where there are credentials to ask it.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from contracts.inventory import Capacity
from infra.catalogue.generations import (
    GENERATIONS,
    OFFERED,
    PRICES_READ_IN,
    Generation,
    NodeKind,
    chips_in,
    is_made_of_cubes,
)
from infra.catalogue.zones import ZONE

__all__ = [
    "ACCELERATORS",
    "GENERATIONS",
    "OFFERS",
    "PRICES_READ_IN",
    "ZONE",
    "Accelerator",
    "CatalogueError",
    "Generation",
    "Offer",
    "accelerator",
    "by_topology",
    "generation",
    "price_usd_per_hour",
    "zone_region",
]


class CatalogueError(ValueError):
    """A value is not in the catalogue; the message names it, the rule and the valid choices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One slice: the type that is asked for by name, and what is behind the name."""

    type_name: str
    generation: Generation
    topology: str
    chips: int

    @property
    def hosts(self) -> int:
        """Worker VMs: one up to the generation's limit (8 chips for v5e and v6e), beyond it one for every 4 chips."""
        on_one = self.generation.most_chips_on_one_host
        return 1 if self.chips <= on_one else self.chips // self.generation.chips_per_slice_host

    @property
    def chips_per_host(self) -> int:
        return self.chips // self.hosts

    @property
    def devices_per_host(self) -> int:
        """JAX devices that a host's process sees: two a chip for v2, v3 and tpu7x, one for the others."""
        return self.chips_per_host * self.generation.devices_per_chip

    @property
    def devices(self) -> int:
        return self.chips * self.generation.devices_per_chip

    @property
    def hbm_gib(self) -> int:
        """Memory of all chips together."""
        return self.chips * self.generation.hbm_gib_per_chip

    @property
    def peak_bf16_flops_per_s(self) -> float:
        """The peak of all chips together."""
        return self.chips * self.generation.peak_bf16_flops_per_s_per_chip

    @property
    def node_kind(self) -> NodeKind | None:
        """The kind of its hosts as nodes of a cluster; None if GKE has none of its generation."""
        return self.generation.nodes

    @property
    def machine_type(self) -> str | None:
        """The machine type of those nodes, and of instances of Compute Engine, such as ct6e-standard-4t."""
        return f"{self.node_kind.prefix}-{self.chips_per_host}t" if self.node_kind else None

    @property
    def zones(self) -> tuple[str, ...]:
        """Where this type is listed; a slice may have fewer zones than one host of the same generation."""
        return self.generation.one_host_zones if self.hosts == 1 else self.generation.slice_zones

    def unlisted_in(self, zone: str) -> str:
        """What is said of a zone that is none of `zones`."""
        return f"{zone} does not list {self.type_name}; these do: {', '.join(self.zones)}"

    @property
    def has_default_topology(self) -> bool:
        """Whether the type's name is enough to ask for it; otherwise the API wants generation and topology."""
        return self.topology == self.generation.topology(self.chips)


def _accelerator(tpu_generation: Generation, chips: int, shape: str) -> Accelerator:
    number = chips * tpu_generation.cores_per_chip if tpu_generation.number_counts == "cores" else chips
    return Accelerator(
        type_name=f"{tpu_generation.type_prefix}-{number}",
        generation=tpu_generation,
        topology=shape,
        chips=chips,
    )


_ALL: dict[str, Accelerator] = {
    tpu.type_name: tpu
    for tpu_generation in GENERATIONS
    for tpu in (
        _accelerator(tpu_generation, chips, tpu_generation.topology(chips))
        for chips in tpu_generation.sizes_chips
    )
}

ACCELERATORS = {name: tpu for name, tpu in _ALL.items() if tpu.generation.offered}
"""Type name → accelerator, in order of generation and size: all that the Cloud TPU API offers."""

Offer = Literal["cloud-tpu", "compute", "gke", "any"]
"""Who offers an accelerator: the Cloud TPU API (the default), Compute Engine, GKE, or any of them."""

OFFERS: dict[Offer, dict[str, Accelerator]] = {
    "cloud-tpu": ACCELERATORS,
    "compute": {name: tpu for name, tpu in _ALL.items() if tpu.generation.compute},
    "gke": {name: tpu for name, tpu in _ALL.items() if tpu.node_kind},
    "any": _ALL,
}
_OFFERED_BY: dict[Offer, str] = {
    "cloud-tpu": "the Cloud TPU API",
    "compute": "Compute Engine",
    "gke": "GKE",
}


def accelerator(type_name: str, offer: Offer = "cloud-tpu") -> Accelerator:
    """The accelerator called `type_name`, such as v6e-16, in the topology that its name stands for by itself.

    Raises:
        CatalogueError: no such generation or size, or one that is not offered.
    """
    among = OFFERS[offer]
    if type_name in among:
        return among[type_name]
    plain = type_name.strip().lower().removeprefix("tpu-")
    if plain in among:
        raise CatalogueError(f'"{type_name}" is not an accelerator type; did you mean {plain}?')
    prefix, _, number = plain.partition("-")
    tpu_generation = _find(prefix)
    if tpu_generation is None:
        raise CatalogueError(
            f'"{type_name}" is not an accelerator type; write one such as v4-8 or v6e-16, of {_names(offer)}'
        )
    shapes = _shapes(type_name, tpu_generation, offer)
    renamed = f"{tpu_generation.type_prefix}-{number}"
    if renamed in among:
        raise CatalogueError(
            f'"{type_name}" is not an accelerator type: those of {tpu_generation.name} are called '
            f"{tpu_generation.type_prefix}; "
            f"did you mean {renamed}?"
        )
    names = [tpu.type_name for tpu in shapes.values()]
    counted = f"; the number counts TensorCores, {tpu_generation.cores_per_chip} a chip"
    raise CatalogueError(
        f'"{type_name}" is not a {tpu_generation.name} size; choose one of {_few(names)}'
        + (counted if tpu_generation.number_counts == "cores" else "")
    )


def by_topology(generation_name: str, shape: str, offer: Offer = "cloud-tpu") -> Accelerator:
    """The accelerator of a generation in a topology.

    v4, v5p and tpu7x come in other shapes of whole cubes too (4x4x16 beside the 4x8x8 that v4-512 stands for): such a
    one has the same type name and `has_default_topology` False.

    Raises:
        CatalogueError: no such generation, one that is not offered, or no such topology.
    """
    tpu_generation = generation(generation_name, offer)
    shapes = _shapes(generation_name, tpu_generation, offer)
    if shape in shapes:
        return shapes[shape]
    try:
        chips = chips_in(shape)
        if tpu_generation.dimensions == 3 and is_made_of_cubes(shape) and chips in tpu_generation.sizes_chips:
            return _accelerator(tpu_generation, chips, shape)
    except ValueError as error:
        raise CatalogueError(f"{error}; topologies of {tpu_generation.name}: {_few(list(shapes))}") from None
    cuboids = ", or another AxBxC of multiples of 4, A ≤ B ≤ C" if tpu_generation.dimensions == 3 else ""
    owners = ", ".join(dict.fromkeys(tpu.generation.name for tpu in _ALL.values() if tpu.topology == shape))
    instead = f" but one of {owners}" if owners else ""
    raise CatalogueError(
        f'"{shape}" is not a {tpu_generation.name} topology{instead}; choose one of {_few(list(shapes))}{cuboids}'
    )


def _shapes(name: str, tpu_generation: Generation, offer: Offer) -> dict[str, Accelerator]:
    """The accelerators of a generation by their topology. name: what is named where it is not offered."""
    shapes = {tpu.topology: tpu for tpu in OFFERS[offer].values() if tpu.generation is tpu_generation}
    if shapes:
        return shapes
    others = " and ".join(
        by_whom
        for other, by_whom in _OFFERED_BY.items()
        if any(tpu.generation is tpu_generation for tpu in OFFERS[other].values())
    )
    raise CatalogueError(
        f'"{name}" is not offered by {_OFFERED_BY[offer]}, only by {others}; choose one of {_names(offer)}'
    )


def generation(name: str, offer: Offer = "cloud-tpu") -> Generation:
    """The generation called `name`, or whose types begin with it (v5litepod is v5e); offered or not.

    Raises:
        CatalogueError: there is none.
    """
    match = _find(name)
    if match is None:
        raise CatalogueError(f'"{name}" is not a TPU generation; choose one of {_names(offer)}')
    return match


def zone_region(zone: str) -> str:
    """us-central1-b → us-central1, and the same for AI zones (us-central1-ai1a).

    Raises:
        CatalogueError: not the name of a zone.
    """
    match = ZONE.fullmatch(zone)
    if match is None:
        raise CatalogueError(f'"{zone}" is not a zone; write it as us-central1-b')
    return match[1]


def price_usd_per_hour(tpu: Accelerator, zone: str, capacity: Capacity) -> float | None:
    """The list price of a whole slice in a zone; None where none is known, as for every reservation.

    A zone that is not listed for the type has the price of its region.

    Raises:
        CatalogueError: not the name of a zone.
    """
    per_chip = tpu.generation.usd_per_chip_hour(zone_region(zone), capacity, hosts=tpu.hosts)
    return None if per_chip is None else per_chip * tpu.chips


NAMES = ", ".join(tpu_generation.name for tpu_generation in OFFERED)
"""Of the generations that the Cloud TPU API offers."""


def _find(name: str) -> Generation | None:
    return next(
        (
            tpu_generation
            for tpu_generation in GENERATIONS
            if name in (tpu_generation.name, tpu_generation.type_prefix)
        ),
        None,
    )


def _names(offer: Offer) -> str:
    return ", ".join(dict.fromkeys(tpu.generation.name for tpu in OFFERS[offer].values()))


def _few(names: list[str]) -> str:
    """The names; of many, the first six and the last."""
    return ", ".join(names) if len(names) <= 10 else f"{', '.join(names[:6])} … {names[-1]}"
