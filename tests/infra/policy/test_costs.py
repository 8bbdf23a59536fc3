"""Totals are the sums of their lines, and the table shows every line in columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.policy import costs
from infra.policy.costs import Cost, CostLine, Rate

PRINTABLE = st.characters(min_codepoint=32, max_codepoint=126)

lines = st.builds(
    CostLine,
    what=st.text(PRINTABLE, min_size=1, max_size=40),
    quantity=st.text(PRINTABLE, max_size=30),
    usd_per_hour=st.none() | st.floats(0, 1e5),
    covered_by_grant=st.booleans(),
)


def a_cost(*made: CostLine, rates: Sequence[Rate] = (), assumptions: Sequence[str] = ()) -> Cost:
    return Cost(lines=made, rates=tuple(rates), assumptions=tuple(assumptions))


@given(made=st.lists(lines, max_size=8))
def test_a_total_is_the_sum_of_its_lines_in_any_order(made: list[CostLine]) -> None:
    cost = a_cost(*made)
    assert cost.usd_per_hour + cost.covered_usd_per_hour == pytest.approx(
        math.fsum(each.usd_per_hour or 0 for each in made)
    )
    assert cost.usd_per_hour == pytest.approx(
        math.fsum(each.usd_per_hour or 0 for each in made if not each.covered_by_grant)
    )
    backwards = a_cost(*reversed(made))
    assert (cost.usd_per_hour, cost.covered_usd_per_hour) == (
        backwards.usd_per_hour,
        backwards.covered_usd_per_hour,
    )


def test_a_day_is_24_hours() -> None:
    cost = a_cost(
        CostLine(what="a", quantity="", usd_per_hour=2.0),
        CostLine(what="b", quantity="", usd_per_hour=3.0, covered_by_grant=True),
    )
    assert (cost.usd_per_day, cost.covered_usd_per_day) == (48, 72)


def test_only_what_is_billed_can_be_of_unknown_price() -> None:
    cost = a_cost(
        CostLine(what="a", quantity="", usd_per_hour=None),
        CostLine(what="b", quantity="", usd_per_hour=None, covered_by_grant=True),
    )
    assert cost.not_known == ("a",)


def test_the_table_has_aligned_columns_totals_rates_and_assumptions() -> None:
    cost = a_cost(
        CostLine(what="slice main", quantity="16 chips", usd_per_hour=1234.5, covered_by_grant=True),
        CostLine(what="gateway", quantity="1 e2-small", usd_per_hour=0.01675),
        CostLine(what="disk", quantity="8 GiB hyperdisk", usd_per_hour=None),
        rates=[Rate(what="bucket", usd=0.02, per="GiB and month")],
        assumptions=["List prices."],
    )
    assert costs.table(cost).splitlines() == [
        "Cost at list prices:",
        "what                  quantity          USD/hour    USD/day",
        "slice main            16 chips         1,234.500  29,628.00  grant",
        "gateway               1 e2-small           0.017       0.40",
        "disk                  8 GiB hyperdisk  not known  not known",
        "billed                                     0.017       0.40",
        "covered by the grant                   1,234.500  29,628.00",
        "and at prices that are not known: disk",
        "and bucket by use: 0.020 USD per GiB and month",
        "List prices.",
    ]


def test_the_table_speaks_of_no_grant_where_nothing_is_covered() -> None:
    assert "grant" not in costs.table(a_cost(CostLine(what="a", quantity="", usd_per_hour=1)))


@given(made=st.lists(lines, min_size=1, max_size=8))
def test_the_table_has_a_row_for_each_line_with_its_prices_below_each_other(made: list[CostLine]) -> None:
    _, *rows = costs.table(a_cost(*made)).splitlines()
    end = rows[0].index("USD/hour") + len("USD/hour")
    for each, row in zip(made, rows[1:], strict=False):
        assert row.startswith(each.what.rstrip())
        assert row[end - 1] != " "
        assert row == row.rstrip()
