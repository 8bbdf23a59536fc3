"""All rules over a configuration, before anything is made: what is wrong with it, and what it costs. Pure."""

from __future__ import annotations

import dataclasses
import datetime

from infra.config import Config
from infra.policy import costs, egress, estimate, exposure, grant, supply
from infra.policy.costs import Cost
from infra.policy.findings import Finding, warning
from infra.policy.grant import GrantUse

BUDGET = "tpu-stack:budget-usd-per-hour"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Review:
    """findings: in the order of the rules, and within one of the slices."""

    findings: tuple[Finding, ...]
    cost: Cost
    grant_use: tuple[GrantUse, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """What stops `pulumi up`."""
        return tuple(found for found in self.findings if found.severity == "error")

    @property
    def table(self) -> str:
        """Cost and use of the grant, for the preview."""
        return "\n".join([costs.table(self.cost), *([grant.table(self.grant_use)] if self.grant_use else [])])


def review(config: Config, *, today: datetime.date) -> Review:
    """Never raises for a configuration that the reader has accepted."""
    coverage = grant.cover(config, today)
    cost = estimate.cost_of(config, coverage.covered_chips)
    return Review(
        findings=(
            *supply.findings(config),
            *grant.findings(config, coverage, today),
            *egress.findings(config),
            *_budget(config, cost),
            *exposure.findings(config),
        ),
        cost=cost,
        grant_use=coverage.use,
    )


def _budget(config: Config, cost: Cost) -> list[Finding]:
    budget = config.budget_usd_per_hour
    if budget is None:
        return []
    if cost.usd_per_hour > budget:
        dearest = max(
            (line for line in cost.lines if not line.covered_by_grant),
            key=lambda line: line.usd_per_hour or 0,
        )
        return [
            Finding(
                severity="error",
                path=BUDGET,
                message=f"{budget:,.2f} USD an hour is less than the {cost.usd_per_hour:,.2f} that is billed, most "
                f"of it for {dearest.what} ({dearest.usd_per_hour or 0:,.2f}); raise the budget or ask for less",
            )
        ]
    if cost.not_known:
        return [
            warning(
                BUDGET,
                f"that {budget:,.2f} USD an hour is enough cannot be proven: no price is known for "
                f"{', '.join(cost.not_known)}; the rest costs {cost.usd_per_hour:,.2f}",
            )
        ]
    return []
