"""Simulates a year of a run on a spot slice: a person recovers it, or the keeper does, in one zone or in three.

It is a simulation: nothing is asked of Google. When a zone has capacity comes from what others have published:

  traces   whether a zone had spot instances, every few minutes, for weeks, of "Can't Be Late" (NSDI 2024),
           https://github.com/skypilot-org/spot-traces: AWS, not Google, because nobody has published any of TPUs. With
           --traces FOLDER (a clone of it) they are replayed, over and over until a year is full, so that zones which
           were short of capacity at the same time are so here. Without, hours with and without capacity are drawn from
           exponential distributions with the means of the same traces, and zones are independent of each other.
  tpu      SkyPilot's report of 42 recoveries in about 4 days of 7 jobs on spot TPUs, 6 to 13 minutes each with the wait
           for capacity: a preemption in 16 hours. There is no trace of it, so it is always drawn.

python -m bench.spot_year [--traces FOLDER] [--seeds 20] [--svg FILE]"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from infra.catalogue import accelerator
from infra.catalogue.prices import PRICES
from infra.config.slice_keys import ZONE_WAIT_S
from keeper.install import EVERY_S

HOUR_S, DAY_S = 3600.0, 86400.0
YEAR_S = 365 * DAY_S
TYPE, REGION = "v5litepod-16", "us-central1"
GATEWAY_USD_PER_HOUR = 0.0168
"""e2-small; the gateway that a stack with NFS has anyway."""

Interval = tuple[float, float]
Zone = Sequence[Interval]
"""When a zone has capacity: intervals of seconds, in order."""
PARTS = ("training", "computed twice", "starting", "no capacity", "nobody acts")
COLOURS = ("#2a9d8f", "#e9c46a", "#457b9d", "#adb5bd", "#e76f51")


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """Three zones, the best first, as a user would write them. up_h, down_h: mean hours with and without capacity.

    files: of the same zones in the folder of traces; enough: how many instances make a slice.
    """

    title: str
    up_h: tuple[float, float, float]
    down_h: tuple[float, float, float]
    files: tuple[str, str, str] | None = None
    enough: int = 1


WORLDS = (
    World(
        title="spot TPUs as SkyPilot met them",
        up_h=(16.0, 16.0, 16.0),
        down_h=(0.05, 0.05, 0.05),
    ),
    World(
        title="one instance, 45 days",
        up_h=(4.3, 2.3, 1.7),
        down_h=(2.0, 1.6, 2.1),
        files=tuple(
            f"availability/1-node/aws-02-15-2023/{zone}_v100_1.json"
            for zone in ("us-east-2b", "us-east-1f", "us-east-1d")
        ),  # type: ignore[arg-type]
    ),
    World(
        title="16 instances at once, 11 days",
        up_h=(1.7, 1.8, 2.0),
        down_h=(2.0, 2.5, 2.8),
        files=tuple(
            f"availability/16-node/aws-08-27-2023/{zone}_v100_1.json"
            for zone in ("us-east-2b", "us-west-2a", "us-west-2c")
        ),  # type: ignore[arg-type]
        enough=16,
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Who asks for a lost slice again, in how many zones, and how."""

    title: str
    who: Literal["person", "keeper"]
    zones: int = 1
    strategy: Literal["first", "race"] = "first"


POLICIES = (
    Policy(title="a person in working hours, one zone", who="person"),
    Policy(title="the keeper, one zone", who="keeper"),
    Policy(title="the keeper, three zones, first", who="keeper", zones=3),
    Policy(title="the keeper, three zones, race", who="keeper", zones=3, strategy="race"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assumed:
    """What is neither measured nor published, the same for all policies.

    made_s: from a zone's capacity to ACTIVE. resumed_s: from ACTIVE to the first step. checkpoint_s: between two; what
    a preemption costs is up to that, since the warning of 30 s is not counted on. looks_s: of a person, from 9 to 18 on
    workdays.
    """

    made_s: float = 180.0
    resumed_s: float = 90.0
    checkpoint_s: float = 600.0
    looks_s: float = 1800.0


@dataclasses.dataclass
class Year:
    """Seconds by part. held_s: for which the slice is paid. preempted: how often."""

    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    held_s: float = 0.0
    preempted: int = 0


def drawn(up_h: float, down_h: float, rng: random.Random) -> Zone:
    found, now = [], 0.0
    while now < YEAR_S:
        up_s = rng.expovariate(1 / up_h) * HOUR_S
        found.append((now, now + up_s))
        now += up_s + rng.expovariate(1 / down_h) * HOUR_S
    return found


def replayed(file: Path, enough: int) -> Zone:
    """Return a trace, again and again. Raises SystemExit where it cannot be read."""
    try:
        trace = json.loads(file.read_text(encoding="utf-8"))
        gap_s, counts = float(trace["metadata"]["gap_seconds"]), [int(each) for each in trace["data"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        sys.exit(
            f"{file}: no trace of spot capacity ({error}); clone skypilot-org/spot-traces, --traces FOLDER"
        )
    found: list[Interval] = []
    for tick in range(int(YEAR_S / gap_s)):
        if counts[tick % len(counts)] < enough:
            continue
        start, end = tick * gap_s, (tick + 1) * gap_s
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def next_up(zone: Zone, now: float) -> Interval:
    """Return when the zone has capacity from `now` on; the end of the year where it has none."""
    index = max(0, bisect_right(zone, (now, float("inf"))) - 1)
    for start, end in zone[index : index + 2]:
        if end > now:
            return max(start, now), end
    return YEAR_S, YEAR_S


def acts_at(policy: Policy, now: float, assumed: Assumed, rng: random.Random) -> float:
    """Return when somebody acts on what happened at `now`. The year begins on a Monday at midnight."""
    if policy.who == "keeper":
        return now + rng.random() * EVERY_S
    now += rng.random() * assumed.looks_s
    day, hour = int(now // DAY_S), now % DAY_S / HOUR_S
    while day % 7 >= 5 or hour >= 18:
        day, hour = day + 1, 0.0
    return max(now, day * DAY_S + max(hour, 9.0) * HOUR_S)


def granted(zones: Sequence[Zone], policy: Policy, now: float) -> tuple[float, float]:
    """Return from when to when the slice can be had, asked for from `now` on."""
    asked = [next_up(zone, now) for zone in zones[: policy.zones]]
    if policy.strategy == "race" or policy.zones == 1:
        return min(asked, key=lambda found: found[0])  # of several at once the first that is named
    while now < YEAR_S:
        for zone in zones[: policy.zones]:
            start, end = next_up(zone, now)
            if start <= now + ZONE_WAIT_S:
                return start, end
            now += ZONE_WAIT_S
    return YEAR_S, YEAR_S


def simulate(zones: Sequence[Zone], policy: Policy, assumed: Assumed, rng: random.Random) -> Year:
    """Return what one year comes to."""
    year, now = Year(), 0.0

    def spend(part: str, until: float) -> None:
        nonlocal now
        until = min(until, YEAR_S)
        year.seconds[part] += max(0.0, until - now)
        now = max(now, until)

    while now < YEAR_S:
        spend("nobody acts", acts_at(policy, now, assumed, rng))
        start, lost = granted(zones, policy, now)
        spend("no capacity", start)
        spend("starting", min(now + assumed.made_s, lost))
        held_since = now
        spend("starting", min(now + assumed.resumed_s, lost))
        began = now
        spend("training", lost)
        year.held_s += now - held_since
        if now >= YEAR_S:
            break
        year.preempted += 1
        unsaved_s = min(now - began, rng.random() * assumed.checkpoint_s)
        year.seconds["training"] -= unsaved_s
        year.seconds["computed twice"] += unsaved_s
    return year


def usd_per_useful_hour(year: Year) -> float:
    """At list prices; the keeper's share is the gateway, which is counted whole."""
    price = PRICES["v5e"][REGION].usd_per_chip_hour("spot")
    assert price is not None
    usd = year.held_s / HOUR_S * accelerator(TYPE).chips * price + YEAR_S / HOUR_S * GATEWAY_USD_PER_HOUR
    return usd / (year.seconds["training"] / HOUR_S)


def picture(rows: Sequence[tuple[str, str, dict[str, float]]]) -> str:
    """Return an SVG: a bar for each world and policy, its parts as shares of the year. Pure."""
    left, width, bar, lines = 250, 560, 18, []
    y, before = 44, ""
    for world, policy, share in rows:
        if world != before:
            lines.append(f'<text x="8" y="{y + 22}" font-weight="bold">{world}</text>')
            y, before = y + 32, world
        lines.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{policy}</text>')
        x = float(left)
        for part, colour in zip(PARTS, COLOURS, strict=True):
            long = share[part] * width
            lines.append(
                f'<rect x="{x:.1f}" y="{y}" width="{long:.1f}" height="{bar}" fill="{colour}">'
                f"<title>{part}: {share[part]:.1%}</title></rect>"
            )
            x += long
        lines.append(f'<text x="{left + width + 8}" y="{y + 13}">{share["training"]:.1%}</text>')
        y += bar + 6
    legend, x = [], left
    for part, colour in zip(PARTS, COLOURS, strict=True):
        legend.append(f'<rect x="{x}" y="14" width="12" height="12" fill="{colour}"/>')
        legend.append(f'<text x="{x + 17}" y="24">{part}</text>')
        x += 36 + 7 * len(part)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 {y + 12}">',
            "<style>text { font: 12px sans-serif }</style>",
            f'<rect width="880" height="{y + 12}" fill="#ffffff"/>',
            *legend,
            *lines,
            "</svg>\n",
        ]
    )


def main(arguments: Sequence[str]) -> None:
    """Prints the table, and draws the picture where it is asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.spot_year", description=__doc__)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    print(
        "| capacity | who recovers | makes progress | computed twice | starting | no capacity | nobody acts |"
        " USD per useful hour | preemptions |\n|---|---|---|---|---|---|---|---|---|"
    )
    for world in WORLDS:
        is_replayed = options.traces is not None and world.files is not None
        for policy in POLICIES:
            years = []
            for seed in range(options.seeds):
                rng = random.Random(seed)
                zones = (
                    [replayed(options.traces / file, world.enough) for file in world.files or ()]
                    if is_replayed
                    else [drawn(up, down, rng) for up, down in zip(world.up_h, world.down_h, strict=True)]
                )
                years.append(simulate(zones, policy, Assumed(), rng))
            share = {part: statistics.mean(year.seconds[part] for year in years) / YEAR_S for part in PARTS}
            usd = statistics.mean(map(usd_per_useful_hour, years))
            title = f"{world.title} ({'replayed' if is_replayed else 'drawn'})"
            rows.append((title, policy.title, share))
            print(
                f"| {title} | {policy.title} | "
                + " | ".join(f"{share[part]:.1%}" for part in PARTS)
                + f" | {usd:.2f} | {statistics.mean(year.preempted for year in years):.0f} |",
                flush=True,
            )
    if options.svg:
        options.svg.write_text(picture(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
