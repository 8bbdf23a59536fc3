"""The simulation of a year on spot slices: every second of it is some part, and capacity is what bounds it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bench import spot_year
from bench.spot_year import DAY_S, HOUR_S, POLICIES, YEAR_S, Assumed, Policy
from infra.config.slice_keys import ZONE_WAIT_S

PERSON, KEEPER, FIRST, RACE = POLICIES
ALWAYS = [(0.0, 2 * YEAR_S)]
NEVER: list[tuple[float, float]] = []


def test_every_second_of_the_year_is_counted_once_and_progress_is_at_most_what_there_was_capacity_for() -> (
    None
):
    for world in spot_year.WORLDS:
        zones = [
            spot_year.drawn(up, down, random.Random(index))
            for index, (up, down) in enumerate(zip(world.up_h, world.down_h, strict=True))
        ]
        there_s = sum(min(end, YEAR_S) - min(start, YEAR_S) for start, end in zones[0])
        shares = {}
        for policy in POLICIES:
            year = spot_year.simulate(zones, policy, Assumed(), random.Random(0))
            assert sum(year.seconds.values()) == pytest.approx(YEAR_S)
            assert min(year.seconds.values()) >= 0
            if policy.zones == 1:
                assert year.seconds["training"] + year.seconds["computed twice"] < there_s
            shares[policy] = year.seconds["training"]
        assert shares[PERSON] < shares[KEEPER] <= shares[FIRST] * 1.01


def test_a_year_without_preemption_is_all_progress_and_one_without_capacity_none() -> None:
    whole = spot_year.simulate([ALWAYS], KEEPER, Assumed(), random.Random(0))
    assert (whole.preempted, whole.seconds["training"] > YEAR_S - 400) == (0, True)
    none = spot_year.simulate([NEVER] * 3, RACE, Assumed(), random.Random(0))
    assert (none.seconds["training"], none.held_s) == (0, 0)
    # The third zone is found by either strategy.
    for policy in (FIRST, RACE):
        found = spot_year.simulate([NEVER, NEVER, ALWAYS], policy, Assumed(), random.Random(0))
        assert found.seconds["no capacity"] == (2 * ZONE_WAIT_S if policy == FIRST else 0)


def test_a_person_acts_in_working_hours_only_and_the_keeper_within_a_minute() -> None:
    rng, assumed = random.Random(0), Assumed()
    friday_evening = 4 * DAY_S + 19 * HOUR_S
    assert spot_year.acts_at(PERSON, friday_evening, assumed, rng) == 7 * DAY_S + 9 * HOUR_S
    assert 0 <= spot_year.acts_at(KEEPER, friday_evening, assumed, rng) - friday_evening <= 60
    noon = DAY_S + 12 * HOUR_S
    assert 0 <= spot_year.acts_at(Policy(title="", who="person"), noon, assumed, rng) - noon <= 1800


def test_a_trace_is_replayed_and_a_slice_needs_all_its_instances(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [16, 16, 15, 0]}))
    assert spot_year.replayed(file, 16)[:2] == [(0.0, 1200.0), (2400.0, 3600.0)]
    assert spot_year.replayed(file, 15)[:1] == [(0.0, 1800.0)]
    file.write_text("{}")
    with pytest.raises(SystemExit, match=r"no trace of spot capacity"):
        spot_year.replayed(file, 1)
