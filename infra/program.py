"""The program: read the configuration, say what it costs and what is wrong with it, declare everything, export.

`infra/__main__.py` calls `declare` under Pulumi's language host; tests and the offline preview hand the same function
to the engine themselves.
"""

from __future__ import annotations

import datetime

import pulumi

from contracts import inventory
from infra import offered, policy, sdk_loader
from infra.config import Config, ConfigError, reader
from infra.stack import declare_stack

LOGS = {"error": pulumi.log.error, "warning": pulumi.log.warn, "note": pulumi.log.info}


def declare() -> None:
    """Declare the stack of the current configuration.

    Raises:
        pulumi.RunError: the configuration is wrong or a policy refuses it; nothing was declared. Every reason has been
            logged, so that the engine shows them all, and no traceback.
    """
    try:
        config = reader.from_pulumi()
    except ConfigError as error:
        # One by one: what is raised the engine says twice.
        for problem in error.problems:
            pulumi.log.error(problem)
        many = "a mistake" if len(error.problems) == 1 else f"{len(error.problems)} mistakes"
        raise pulumi.RunError(f"nothing was made: the configuration has {many}") from None
    review(config)
    sdk_loader.load_by_class()
    stack = declare_stack(config)
    pulumi.export("inventory", stack.inventory.apply(inventory.to_json))
    pulumi.export("image_repository", stack.image_repository)


def review(config: Config) -> None:
    """Log what the policies find, what the zones do not offer (a preview alone asks), and what the stack costs.

    Raises:
        pulumi.RunError: a finding is an error.
    """
    reviewed = policy.review(config, today=datetime.datetime.now(datetime.UTC).date())
    asked = offered.ask(config, _setting) if pulumi.runtime.is_dry_run() else offered.Offered()
    for finding in (*reviewed.findings, *offered.findings(config, asked)):
        LOGS[finding.severity](f"{finding.path}: {finding.message}")
    pulumi.log.info(reviewed.table)
    refused = sum(finding.severity == "error" for finding in reviewed.findings)
    if refused:
        raise pulumi.RunError(f"nothing was made: {refused} of the findings above are errors")


def _setting(key: str) -> str | None:
    """A key of the provider, in the clear where it is a secret."""
    return pulumi.Config("gcp").get(key.removeprefix("gcp:"))
