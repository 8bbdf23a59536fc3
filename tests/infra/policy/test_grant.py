"""What a grant covers, what it does not, and how that is said."""

import datetime
from typing import Any

import pytest
from hypothesis import given

from infra.config import Config, GrantLine, SliceConfig
from infra.policy import grant
from infra.policy.findings import Finding
from tests.infra.policy.stacks import LATER, TODAY, a_grant, a_slice, a_stack, only, stacks

EUROPE = "europe-west4-b"
YESTERDAY = TODAY - datetime.timedelta(days=1)


def found(config: Config) -> tuple[Finding, ...]:
    return tuple(grant.findings(config, grant.cover(config, TODAY), TODAY))


# --- what is covered ----------------------------------------------------------------------------------------


def v5e(chips: int, **changes: Any) -> SliceConfig:
    return a_slice(accelerator=f"v5litepod-{chips}", **changes)


@pytest.mark.parametrize(
    ("asked", "lines", "uses"),
    [
        (v5e(16), (a_grant(64),), [16]),
        (v5e(16, count=3), (a_grant(64),), [48]),
        (v5e(16), (a_grant(16, "v5litepod"),), [16]),  # as its types are called
        # The type counts cores, the grant chips.
        (
            a_slice(accelerator="v4-32", zone="us-central2-b", capacity="on-demand"),
            (a_grant(16, "v4", "us-central2-b", capacity="on-demand"),),
            [16],
        ),
        (v5e(16), (a_grant(16, until=TODAY),), [16]),  # through its last day
        (v5e(16), (a_grant(64, until=YESTERDAY),), [0]),
        (v5e(16), (a_grant(64, "v6e"),), [0]),
        (v5e(16), (a_grant(64, zone=EUROPE),), [0]),
        (v5e(16), (a_grant(64, capacity="on-demand"),), [0]),
        # Lines of one place add up, and what lasts longest is used first.
        (v5e(16), (a_grant(8, until=TODAY), a_grant(8, until=LATER)), [8, 8]),
        (v5e(8), (a_grant(8, until=TODAY), a_grant(8, until=LATER)), [0, 8]),
        (v5e(8), (a_grant(8), a_grant(8, until=None)), [0, 8]),
    ],
)
def test_a_grant_covers_chips_of_its_generation_zone_capacity_and_time(
    asked: SliceConfig, lines: tuple[GrantLine, ...], uses: list[int]
) -> None:
    coverage = grant.cover(a_stack(asked, grant=lines), TODAY)
    assert [each.used_chips for each in coverage.use] == uses
    assert coverage.covered_chips == (sum(uses),)


def test_a_slice_that_may_be_in_several_zones_takes_its_chips_in_each_and_is_covered_where_it_is_least() -> (
    None
):
    spread = v5e(16, name="a", more_zones=(EUROPE, "us-west4-a"))
    there = (a_grant(64), a_grant(32, zone=EUROPE))
    everywhere = (*there, a_grant(16, zone="us-west4-a"))
    coverage = grant.cover(a_stack(spread, v5e(16, name="b", zone=EUROPE), grant=everywhere), TODAY)
    assert coverage.covered_chips == (16, 16)
    assert [use.used_chips for use in coverage.use] == [16, 32, 16]
    # The other two could be where the first one is.
    late = a_stack(spread, v5e(16, name="b", zone=EUROPE), v5e(8, name="c", zone=EUROPE), grant=everywhere)
    assert grant.cover(late, TODAY).covered_chips == (16, 16, 0)
    refused = only(found(a_stack(spread, grant=there)))
    assert refused.severity == "error" and refused.path == "tpu-stack:slices[0].zones"
    assert "us-west4-a is not of the grant for v5e" in refused.message
    assert "and it may be there; all 16 chips" in refused.message
    # What is billed is the dearest of its zones: 0.48 USD a chip in us-west4.
    assert "7.68 USD an hour" in refused.message


@given(config=stacks)
def test_a_grant_covers_as_much_as_it_can_and_no_more_and_what_it_does_not_is_found(config: Config) -> None:
    coverage = grant.cover(config, TODAY)
    for use in coverage.use:
        assert 0 <= use.used_chips <= (0 if use.ended else use.line.chips)
    assert sum(coverage.covered_chips) == sum(use.used_chips for use in coverage.use)
    short = set()
    for index, (each, chips) in enumerate(zip(config.slices, coverage.covered_chips, strict=True)):
        asked = (each.accelerator.generation.name, each.zone, each.capacity)
        left = [
            use
            for use in coverage.use
            if (use.line.generation, use.line.zone, use.line.capacity) == asked
            and not use.ended
            and use.used_chips < use.line.chips
        ]
        assert 0 <= chips <= each.chips
        assert chips == each.chips or not left
        short |= {f"tpu-stack:slices[{index}"} if chips < each.chips else set()
    blamed = {each.path.split("]")[0] for each in found(config) if each.severity == "error"}
    assert blamed == (short if config.grant else set())


# --- what is not covered ------------------------------------------------------------------------------------


def test_without_a_grant_nothing_is_said() -> None:
    assert found(a_stack(a_slice(provisioning="direct"))) == ()


@pytest.mark.parametrize(
    ("asked", "lines", "key", "said"),
    [
        (
            (a_slice(accelerator="v5litepod-32", count=3),), (a_grant(64),), "",
            ('the grant has 64 v5e spot chips in us-central1-a; 32 of the 96 chips of "main" are billed at list price, '
             "7.84 USD an hour; if that is meant, set tpu-stack:allow-billable: true"),
        ),
        (
            (a_slice("b", "v5litepod-64"), a_slice("a", "v5litepod-32")), (a_grant(64),), "",
            "the grant has 64 v5e spot chips in us-central1-a, of which other slices use 32; 32 of the 64",
        ),
        (
            (a_slice(),), (a_grant(64, zone=EUROPE), a_grant(32, zone="us-west4-a", capacity="on-demand")), ".zone",
            ("us-central1-a is not of the grant for v5e, which has europe-west4-b (64 spot), us-west4-a (32 "
            'on-demand); all 16 chips of "main" are billed at list price, 3.92 USD an hour'),
        ),
        (
            (a_slice(capacity="on-demand"),), (a_grant(64),), ".capacity",
            ('the grant has v5e in us-central1-a as spot (64 chips), not as on-demand; all 16 chips of "main"'
            " are billed at list price, 19.20 USD an hour"),
        ),
        (
            (a_slice(),), (a_grant(64, "v6e"), a_grant(32, "v4", "us-central2-b")), ".accelerator",
            "the grant has no v5e, only v6e, v4; ",
        ),
        ((a_slice(capacity="reserved"),), (a_grant(64),), ".capacity", "billed at a price that is not known"),
        (
            (a_slice(),), (a_grant(64, until=YESTERDAY),), "",
            "the grant for v5e spot in us-central1-a ended on 2026-11-20; all 16 chips",
        ),
        ((a_slice(),), (a_grant(64, zone=EUROPE, until=YESTERDAY),), "", "the whole grant has ended"),
    ],
)  # fmt: skip
def test_the_key_to_blame_for_what_is_not_covered_is_named_with_what_the_grant_has(
    asked: tuple[SliceConfig, ...], lines: tuple[GrantLine, ...], key: str, said: str
) -> None:
    finding = only(each for each in found(a_stack(*asked, grant=lines)) if each.severity == "error")
    assert finding.path == f"tpu-stack:slices[0]{key}"
    assert said in finding.message


@pytest.mark.parametrize(
    ("days", "said"),
    [
        (-1, "ended on 2026-11-20: it covers nothing"),
        (0, "ends today, on 2026-11-21"),
        (1, "ends tomorrow"),
        (14, "ends in 14 days, on 2026-12-05"),
        (15, None),
    ],
)
def test_a_grant_that_has_ended_or_ends_within_14_days_warns(days: int, said: str | None) -> None:
    until = TODAY + datetime.timedelta(days=days)
    warnings = [
        each
        for each in found(a_stack(grant=(a_grant(64, until=until),)))
        if each.path == "tpu-stack:grant[0].until"
    ]
    assert [each.severity for each in warnings] == ["warning"] * (said is not None)
    assert all(said is not None and said in each.message for each in warnings)


def test_direct_under_a_grant_warns_that_grants_are_for_queued_resources() -> None:
    finding = only(found(a_stack(a_slice(provisioning="direct"), grant=(a_grant(64),))))
    assert (finding.severity, finding.path) == ("warning", "tpu-stack:slices[0].provisioning")
    assert "queued" in finding.message
