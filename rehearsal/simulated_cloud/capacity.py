"""The simulated capacity: chips in pools, limits on them, and the types that each zone offers."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping

from contracts.aliases import Json
from infra import catalogue
from rehearsal.simulator.api_error import ApiError, invalid

KINDS = {generation.api_name: generation.name for generation in catalogue.GENERATIONS if generation.api_name}
"""The API's names of generations (enum of AcceleratorConfig.type) and the catalogue's."""
OFFERED_GENERATIONS = [generation for generation in catalogue.GENERATIONS if generation.offered]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChipPool:
    """Chips that can stand for one another: us-central1-a:v5litepod:spot.

    tier: on-demand, spot, reserved or flex-start.
    """

    zone: str
    prefix: str
    tier: str

    def __str__(self) -> str:
        return f"{self.zone}:{self.prefix}:{self.tier}"

    @classmethod
    def parse(cls, text: str) -> "ChipPool":
        """Read ZONE:PREFIX:TIER. Raises ValueError."""
        zone, prefix, tier = text.split(":")
        return cls(zone=zone, prefix=prefix, tier=tier)


def first_over(
    limits: Mapping[ChipPool, int], requested: Counter[ChipPool], held: Counter[ChipPool]
) -> ChipPool | None:
    """The first pool whose limit the requested chips would exceed beside the held ones; None: they fit. A pool without
    a limit is endless."""
    over = (pool for pool, chips in requested.items() if pool in limits and chips + held[pool] > limits[pool])
    return next(over, None)


class Offers:
    """What each zone offers: those of the catalogue, and those of further pools."""

    def __init__(self, pools: Iterable[ChipPool]) -> None:
        self._pools = {(pool.zone, pool.prefix) for pool in pools}
        listed = {zone for generation in OFFERED_GENERATIONS for zone in generation.zones}
        self.zones = sorted(listed | {zone for zone, _ in self._pools})

    def require_zone(self, zone: str) -> None:
        """Raises ApiError PERMISSION_DENIED for a zone that is not there: Google does not tell the two apart."""
        if zone not in self.zones:
            raise ApiError(
                "PERMISSION_DENIED", f"Permission denied on 'locations/{zone}' (or it may not exist)."
            )

    def accelerators(self, zone: str) -> list[catalogue.Accelerator]:
        """Every type that the zone offers."""
        return [
            tpu
            for tpu in catalogue.ACCELERATORS.values()
            if zone in tpu.zones or (zone, tpu.generation.type_prefix) in self._pools
        ]

    def accelerator(self, node: Json, zone: str, at: str) -> catalogue.Accelerator:
        """The accelerator that a node requests, by type or by configuration. Raises ApiError INVALID_ARGUMENT."""
        type_name, config = node.get("acceleratorType"), node.get("acceleratorConfig")
        if (type_name is None) == (config is None):
            raise invalid(at, "give acceleratorType or acceleratorConfig, and not both")
        try:
            if config is None:
                tpu = catalogue.accelerator(str(type_name))
            elif config["type"] not in KINDS:
                raise invalid(f"{at}.acceleratorConfig.type", f"choose one of {', '.join(KINDS)}")
            else:
                tpu = catalogue.by_topology(KINDS[config["type"]], config["topology"])
        except catalogue.CatalogueError as error:
            raise invalid(at, f"CloudTpu received an invalid AcceleratorType: {error}") from None
        if tpu.type_name not in {offered.type_name for offered in self.accelerators(zone)}:
            raise invalid(
                at, f"CloudTpu received an invalid AcceleratorType: {zone} does not offer {tpu.type_name}"
            )
        return tpu

    def runtime_versions(self) -> list[str]:
        """The runtime versions, the same in every zone."""
        return sorted(
            {generation.runtime_version for generation in OFFERED_GENERATIONS if generation.runtime_version}
        )


def accelerator_config(accelerator: catalogue.Accelerator) -> Json:
    """An accelerator as the API's AcceleratorConfig."""
    return {"type": accelerator.generation.api_name, "topology": accelerator.topology}
