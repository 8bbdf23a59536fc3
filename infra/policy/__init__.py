"""All rules over a configuration, before anything is made: what is wrong with it, and what it costs. Pure."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator

from infra.config import Config
from infra.policy import costs, grant, risks
from infra.policy.costs import HourlyCost
from infra.policy.findings import Finding, error, warning
from infra.policy.grant import GrantUse

BUDGET = "tpu-stack:budget-usd-per-hour"
ASKS_ABOVE_USD_PER_HOUR = 100.0
"""What may be billed an hour before a budget has to be written down: 2,400 USD a day and more is no slip of the pen."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Review:
    """findings: in the order of the rules, and within one of the slices. covered_chips: of each slice by a grant."""

    findings: tuple[Finding, ...]
    cost: HourlyCost
    grant_use: tuple[GrantUse, ...]
    covered_chips: tuple[int, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that stop `pulumi up`."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def table(self) -> str:
        """Cost and use of the grant, for the preview."""
        return "\n".join([costs.table(self.cost), *([grant.table(self.grant_use)] if self.grant_use else [])])


def review(config: Config, *, today: datetime.date) -> Review:
    """Apply all rules. Never raises for a configuration that the reader has accepted."""
    coverage = grant.cover(config, today)
    cost = costs.stack_cost(config, coverage.covered_chips)
    return Review(
        findings=(
            *risks.supply(config),
            *grant.findings(config, coverage, today),
            *risks.egress(config),
            *_budget(config, cost, costs.least_usd_per_hour(config, coverage.covered_chips)),
            *risks.exposure(config),
        ),
        cost=cost,
        grant_use=coverage.use,
        covered_chips=coverage.covered_chips,
    )


def _budget(config: Config, cost: HourlyCost, least_usd_per_hour: float) -> Iterator[Finding]:
    """least_usd_per_hour: with what TPUs cost elsewhere in place of a price that is not known."""
    budget, billed = config.budget_usd_per_hour, cost.usd_per_hour
    missing = ", ".join(cost.not_known)
    if budget is None:
        if least_usd_per_hour > ASKS_ABOVE_USD_PER_HOUR:
            chips = sum(slice_config.chips for slice_config in config.slices)
            yield error(
                BUDGET,
                f"missing; {chips:,} chips and what belongs to them are billed at {least_usd_per_hour:,.2f} "
                f"USD an hour or more, and above {ASKS_ABOVE_USD_PER_HOUR:,.0f} you have to allow it by a figure: "
                "write a budget that covers it, ask for less, or write the grant that pays for it",
            )
    elif billed > budget:
        billed_lines = (line for line in cost.lines if not line.covered_by_grant)
        dearest = max(billed_lines, key=lambda line: line.usd_per_hour or 0)
        yield error(
            BUDGET,
            f"{budget:,.2f} USD an hour is less than the {billed:,.2f} that is billed, most of it for "
            f"{dearest.item} ({dearest.usd_per_hour or 0:,.2f}); raise the budget or ask for less",
        )
    elif least_usd_per_hour > budget:
        yield error(
            BUDGET,
            f"{budget:,.2f} USD an hour is less than the {least_usd_per_hour:,.2f} that is billed at least, with the "
            f"lowest price of elsewhere for {missing}; raise the budget or ask for less",
        )
    elif missing:
        yield warning(
            BUDGET,
            f"that {budget:,.2f} USD an hour is enough cannot be proven: no price is known for {missing}; the rest "
            f"costs {billed:,.2f}",
        )
