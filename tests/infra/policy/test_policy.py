"""All rules together: the budget, what an allowance changes, and that a review is a function of the configuration."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra import policy
from infra.config import Allowances, Config, NetworkConfig
from infra.policy import Review
from infra.policy.findings import Finding
from tests.infra.policy.stacks import NOTHING_ALLOWED, TODAY, a_grant, a_slice, a_stack, only, stacks

ROOT = Path(__file__).resolve().parents[3]
EXPOSED = NetworkConfig(existing=None, subnetwork=None, external_addresses=True)
ALLOWANCES = {
    "unlisted": "tpu-stack:allow-unlisted",
    "billable": "tpu-stack:allow-billable",
    "cross_region": "tpu-stack:allow-cross-region",
}


def review(config: Config) -> Review:
    return policy.review(config, today=TODAY)


# --- the budget ---------------------------------------------------------------------------------------------


def budget(config: Config, usd_per_hour: float | None) -> tuple[Finding, ...]:
    reviewed = review(dataclasses.replace(config, budget_usd_per_hour=usd_per_hour))
    return tuple(each for each in reviewed.findings if each.path == policy.BUDGET)


GRANTED = a_stack(grant=(a_grant(16),))


@pytest.mark.parametrize(
    ("config", "usd_per_hour", "severities", "said"),
    [
        (
            a_stack(),
            2,
            ["error"],
            ("2.00 USD an hour is less than the 3.98 that is billed, most of it for slice main: v5litepod-16, "
            "us-central1-a (3.92); raise the budget or ask for less"),
        ),
        # What a grant covers does not count, and is not what costs most.
        (GRANTED, 0.10, [], ""),
        (GRANTED, 0.01, ["error"], "most of it for gateway: data disk (0.03)"),
        (a_stack(a_slice(capacity="reserved")), 2, ["warning"], "cannot be proven: no price is known for slice main"),
        # An unknown price does not hide that the known ones are too high.
        (a_stack(a_slice("a"), a_slice("b", capacity="reserved")), 2, ["error"], "is less than"),
        (a_stack(), None, [], ""),
        (a_stack(a_slice(accelerator="v5litepod-256", count=8), grant=(a_grant(2048),)), None, [], ""),
    ],
)  # fmt: skip
def test_more_than_the_budget_is_an_error_that_names_both_and_what_costs_most(
    config: Config, usd_per_hour: float | None, severities: list[str], said: str
) -> None:
    found = budget(config, usd_per_hour)
    assert [each.severity for each in found] == severities
    assert all(said in each.message for each in found)


def test_just_the_budget_is_enough() -> None:
    total = review(a_stack()).cost.usd_per_hour
    assert budget(a_stack(), total) == ()
    assert only(budget(a_stack(), total - 1e-6)).severity == "error"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"count": 8, "accelerator": "v5litepod-16"}, None),
        ({"count": 256, "accelerator": "v5litepod-256"}, "missing; 65,536 chips and what belongs to them are billed"),
        # No price is known there: the lowest of elsewhere is enough to see that somebody has to say that it is meant.
        ({"zone": "us-south1-ai1b", "accelerator": "v6e-256", "capacity": "on-demand"}, "missing; 256 chips"),
        ({"count": 256, "accelerator": "v5litepod-256", "capacity": "reserved", "reservation": "r"}, None),
    ],
)  # fmt: skip
def test_above_a_stated_cost_an_hour_somebody_has_to_write_a_budget(
    asked: dict[str, Any], said: str | None
) -> None:
    config = a_stack(a_slice(**asked))
    found = budget(config, None)
    assert [(each.severity, each.path) for each in found] == [("error", policy.BUDGET)] * (said is not None)
    assert said is None or only(found).message.startswith(said)
    # allow-billable says which chips, and not how dear they may be.
    allowed = dataclasses.replace(config.allow, billable=True)
    assert budget(dataclasses.replace(config, allow=allowed), None) == found
    assert said is None or [each.severity for each in budget(config, 60_000)] in ([], ["warning"])
    assert said is None or [each.severity for each in budget(config, 50)] == ["error"]


# --- a whole review -----------------------------------------------------------------------------------------


def test_each_kind_of_mistake_is_found_in_one_review_and_none_in_a_paid_stack_in_one_place() -> None:
    assert review(a_stack()).findings == ()
    config = a_stack(
        a_slice(zone="us-west4-b", provisioning="direct"),
        grant=(a_grant(8),),
        budget_usd_per_hour=0.01,
        network=EXPOSED,
        protect=False,
    )
    keys = (
        "slices[0].zone", "slices[0].provisioning", "storage.bucket.region", "storage.nfs.zone", "images.region",
        "budget-usd-per-hour", "network.external-addresses", "protect",
    )  # fmt: skip
    assert {each.path for each in review(config).findings} == {f"tpu-stack:{key}" for key in keys}


def test_the_table_shows_costs_and_use_of_the_grant_as_the_one_in_the_docs_does() -> None:
    granted = a_slice(accelerator="v5litepod-64", zone="europe-west4-b")
    reviewed = review(a_stack(granted, region="europe-west4", grant=(a_grant(64, zone="europe-west4-b"),)))
    *lines, used = reviewed.table.splitlines()
    shown = [f"    {line}" for line in lines if line not in reviewed.cost.assumptions]
    assert "\n".join(shown) in (ROOT / "docs" / "costs.md").read_text()
    assert used.startswith("grant: 64 of 64 v5e spot chips")
    reserved = review(a_stack(a_slice(capacity="reserved"))).table
    assert "16 chips, reserved   not known  not known" in reserved and "grant:" not in reserved
    assert "and at prices that are not known: slice main: v5litepod-16, us-central1-a" in reserved


@pytest.mark.parametrize("name", ALLOWANCES)
@given(config=stacks)
def test_an_allowance_turns_its_errors_into_warnings_and_changes_nothing_else(
    name: str, config: Config
) -> None:
    advice = f"; if that is meant, set {ALLOWANCES[name]}: true"
    before = review(config)
    after = review(dataclasses.replace(config, allow=dataclasses.replace(NOTHING_ALLOWED, **{name: True})))
    expected = [
        dataclasses.replace(each, severity="warning", message=each.message.removesuffix(advice))
        if each.message.endswith(advice)
        else each
        for each in before.findings
    ]
    assert list(after.findings) == expected
    assert (after.cost, after.grant_use) == (before.cost, before.grant_use)


@given(config=stacks, order=st.randoms(use_true_random=False))
def test_a_review_is_the_same_each_time_and_in_each_order_counts_every_chip_once_and_says_each_thing_in_a_line(
    config: Config, order: Any
) -> None:
    reviewed = review(config)
    assert reviewed == review(config)
    chips = [each.quantity.split()[0] for each in reviewed.cost.lines if " chip" in each.quantity]
    assert sum(map(int, chips)) == sum(each.chips for each in config.slices)
    for each in reviewed.findings:
        assert each.path.startswith("tpu-stack:")
        assert "\n" not in each.message
        assert len(each.message) < 400
    shuffled = list(config.slices)
    order.shuffle(shuffled)
    other = review(dataclasses.replace(config, slices=tuple(shuffled)))
    assert reviewed.cost.usd_per_hour == other.cost.usd_per_hour
    assert reviewed.cost.covered_usd_per_hour == other.cost.covered_usd_per_hour
    assert sorted(reviewed.cost.lines, key=repr) == sorted(other.cost.lines, key=repr)
    assert reviewed.grant_use == other.grant_use
    allow = Allowances(unlisted=True, billable=True, cross_region=True)
    allowed = review(dataclasses.replace(config, allow=allow))
    assert {each.path for each in allowed.errors} <= {policy.BUDGET}  # nothing else cannot be allowed


def test_neither_the_reader_nor_a_rule_needs_pulumi() -> None:
    script = "import sys, infra.config.reader, infra.policy; print([m for m in sys.modules if m.startswith('pulumi')])"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
