"""How much TPU there is, and of what kind: chips in pools, limits on them, and the types that each zone offers."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal, get_args

from infra import catalogue
from rehearsal.tpu_api.api_error import ApiError, invalid

Json = dict[str, Any]
Tier = Literal["on-demand", "spot", "reserved"]

# The API's names of generations (enum of AcceleratorConfig.type) and the catalogue's.
KINDS = {"V2": "v2", "V3": "v3", "V4": "v4", "V5LITE_POD": "v5e", "V5P": "v5p", "V6E": "v6e"}
OFFERED_GENERATIONS = [which for which in catalogue.GENERATIONS if which.offered]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """Chips that can stand for one another: us-central1-a:v5litepod:spot."""

    zone: str
    prefix: str
    tier: Tier

    def __str__(self) -> str:
        return f"{self.zone}:{self.prefix}:{self.tier}"

    @classmethod
    def parse(cls, text: str) -> "Pool":
        """From ZONE:PREFIX:TIER. Raises ValueError."""
        match = re.fullmatch(r"([a-z0-9-]+):(\w+):([\w-]+)", text)
        if match is None:
            raise ValueError(f"pool={text!r}: write ZONE:PREFIX:TIER, such as us-central1-a:v5litepod:spot")
        for tier in get_args(Tier):
            if tier == match[3]:
                return cls(zone=match[1], prefix=match[2], tier=tier)
        raise ValueError(f"pool={text!r}: the tier is one of {', '.join(get_args(Tier))}")


class Limits:
    """A number of chips for each pool: its own where it is named, else that for all others; None is no end."""

    def __init__(self, named: dict[Pool, int], others: int | None) -> None:
        self._named = dict(named)
        self._others = others

    def set(self, pool: Pool, chips: int) -> None:
        """Change one pool's number."""
        self._named[pool] = chips

    def of(self, pool: Pool) -> int | None:
        """Chips of a pool; None: no end."""
        return self._named.get(pool, self._others)

    def first_over(self, wanted: Counter[Pool], held: Counter[Pool]) -> Pool | None:
        """The first pool that what is wanted would overdraw beside what is held; None: it fits."""
        for pool, chips in wanted.items():
            limit = self.of(pool)
            if limit is not None and chips + held[pool] > limit:
                return pool
        return None


class Offers:
    """The catalogue's zones, and those of the pools that are named besides."""

    def __init__(self, pools: Iterable[Pool]) -> None:
        self._pools = {(pool.zone, pool.prefix) for pool in pools}
        listed = {zone for which in OFFERED_GENERATIONS for zone in which.zones}
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
        return sorted({which.runtime_version for which in OFFERED_GENERATIONS if which.runtime_version})


def config_of(accelerator: catalogue.Accelerator) -> Json:
    """An accelerator as the API's AcceleratorConfig."""
    kind = next(kind for kind, name in KINDS.items() if name == accelerator.generation.name)
    return {"type": kind, "topology": accelerator.topology}
