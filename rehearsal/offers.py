"""What the simulated cloud has on offer in each zone: accelerator types and runtime versions, out of the catalogue."""

from collections.abc import Iterable
from typing import Any

from infra import catalogue
from infra.catalogue import generations
from rehearsal.errors import ApiError, invalid
from rehearsal.pools import Pool

Json = dict[str, Any]

# The API's names of generations (enum of AcceleratorConfig.type) and the catalogue's.
KINDS = {"V2": "v2", "V3": "v3", "V4": "v4", "V5LITE_POD": "v5e", "V5P": "v5p", "V6E": "v6e"}
_KIND_OF = {name: kind for kind, name in KINDS.items()}
_OFFERED = [which for which in catalogue.GENERATIONS if which.offered]


class Offers:
    """The catalogue's zones, and those of the pools that are named besides."""

    def __init__(self, pools: Iterable[Pool]) -> None:
        self._pools = {(pool.zone, pool.prefix) for pool in pools}
        for zone, prefix in self._pools:
            if prefix not in {which.type_prefix for which in _OFFERED}:
                raise ValueError(
                    f"pool {zone}:{prefix}: types begin with {', '.join(w.type_prefix for w in _OFFERED)}"
                )
        listed = {zone for which in _OFFERED for zone in which.zones}
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
            which
            for which in catalogue.ACCELERATORS.values()
            if zone in which.zones or (zone, which.generation.type_prefix) in self._pools
        ]

    def accelerator(self, node: Json, zone: str, at: str) -> catalogue.Accelerator:
        """The one that a node asks for, by type or by configuration. Raises ApiError INVALID_ARGUMENT."""
        asked, config = node.get("acceleratorType"), node.get("acceleratorConfig")
        if (asked is None) == (config is None):
            raise invalid(at, "give acceleratorType or acceleratorConfig, and not both")
        try:
            if config is None:
                found = catalogue.accelerator(str(asked))
            elif config["type"] not in KINDS:
                raise invalid(f"{at}.acceleratorConfig.type", f"choose one of {', '.join(KINDS)}")
            else:
                found = catalogue.by_topology(KINDS[config["type"]], config["topology"])
        except catalogue.CatalogueError as error:
            raise invalid(at, f"CloudTpu received an invalid AcceleratorType: {error}") from None
        if found.type_name not in {which.type_name for which in self.accelerators(zone)}:
            raise invalid(
                at, f"CloudTpu received an invalid AcceleratorType: {zone} does not offer {found.type_name}"
            )
        return found

    def runtime_versions(self) -> list[str]:
        """Those that are listed, in every zone the same."""
        return sorted({which.runtime_version for which in _OFFERED if which.runtime_version})

    def has_runtime(self, version: str) -> bool:
        """Whether a node may have it."""
        return generations.is_runtime_version(version)


def config_of(accelerator: catalogue.Accelerator) -> Json:
    """An accelerator as the API's AcceleratorConfig."""
    return {"type": _KIND_OF[accelerator.generation.name], "topology": accelerator.topology}
