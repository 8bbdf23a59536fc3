"""Who the hosts are to Google: one service account, which gets no role in the project.

The bucket and the image repository admit it, each in its own file; nothing else does.
"""

from __future__ import annotations

import pulumi
from pulumi_gcp import serviceaccount

from infra import naming
from infra.config import Config

LONGEST_ACCOUNT_ID = 30


class Identity(pulumi.ComponentResource):
    """`email` goes on the hosts, `member` into bindings, `account` is the account's full name."""

    def __init__(self, name: str, config: Config, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("tpu-stack:identity:Identity", name, {}, opts)
        account = serviceaccount.Account(
            "hosts",
            account_id=naming.resource_name(config.stack, longest=LONGEST_ACCOUNT_ID),
            project=config.project,
            display_name=f"TPU hosts of {config.stack}",
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.account = account.name
        self.email = account.email
        self.member = account.email.apply(lambda email: f"serviceAccount:{email}")
        self.register_outputs({"email": self.email})
