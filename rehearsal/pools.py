"""How much TPU there is: chips in pools, one for each zone, type prefix and tier, and limits on them."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Literal, get_args

Tier = Literal["on-demand", "spot", "reserved"]


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hold:
    """Chips of a pool that something holds."""

    pool: Pool
    chips: int


class Limits:
    """A number of chips for each pool: its own where it is named, else that for all others; None is no end."""

    def __init__(self, named: dict[Pool, int], others: int | None) -> None:
        self.others = others
        self._named: dict[Pool, int] = {}
        for pool, chips in named.items():
            self.set(pool, chips)

    def set(self, pool: Pool, chips: int) -> None:
        """Change one pool's number. Raises ValueError for a negative one."""
        if chips < 0:
            raise ValueError(f"chips={chips} of {pool}: give 0 or more")
        self._named[pool] = chips

    def of(self, pool: Pool) -> int | None:
        """Chips of a pool; None: no end."""
        return self._named.get(pool, self.others)

    def pools(self) -> list[Pool]:
        """The pools that are named."""
        return list(self._named)

    def fits(self, wanted: Iterable[Hold], held: Iterable[Hold]) -> bool:
        """Whether what is wanted still fits beside what is held."""
        return self.first_over(wanted, held) is None

    def first_over(self, wanted: Iterable[Hold], held: Iterable[Hold]) -> Pool | None:
        """The first pool that what is wanted would overdraw."""
        wanted = list(wanted)
        total = sums([*wanted, *held])
        over = (
            hold.pool
            for hold in wanted
            if (limit := self.of(hold.pool)) is not None and total[hold.pool] > limit
        )
        return next(over, None)


def sums(holds: Iterable[Hold]) -> dict[Pool, int]:
    """Chips held in each pool."""
    total: dict[Pool, int] = {}
    for hold in holds:
        total[hold.pool] = total.get(hold.pool, 0) + hold.chips
    return total
