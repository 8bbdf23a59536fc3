"""A stack's control documents: their folder in its bucket, and the one that says what its slices are made of.

`pulumi up` makes a slice by that specification, as the keeper and `fab recover` do: `infra.slice_apis.lifecycle`, under
the slice's lease (`infra.documents.lease`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pulumi
from pulumi_gcp import storage

from contracts import inventory
from contracts.inventory import CONTROL, SPECIFICATION
from infra.config import Config, NotifyConfig
from infra.documents import lease

VERSION = 1
CHANNELS = {
    "slack": "TPU_STACK_SLACK_WEBHOOK",
    "webhook": "TPU_STACK_WEBHOOK",
    "smtp": "TPU_STACK_SMTP",
}
"""Key of the configuration → the variable by which `console.notify` finds the channel."""


def folder_url(config: Config) -> str | None:
    """The folder of the control documents; None where there is no bucket."""
    return f"gs://{config.bucket.name}/{CONTROL}" if config.bucket else None


def lease_url(config: Config, slice_name: str) -> str | None:
    """The URL of a slice's lease; None where there is no bucket."""
    control_url = folder_url(config)
    return None if control_url is None else lease.document_url(control_url, slice_name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecificationArgs:
    """bucket: its name. owner: the stack's id. slices: the inputs of each queued resource, by the slice's name.

    vacant: the inventory with slices that have no hosts yet.
    """

    config: Config
    bucket: pulumi.Input[str]
    owner: pulumi.Input[str]
    slices: Mapping[str, pulumi.Input[Mapping[str, Any]]]
    vacant: pulumi.Input[inventory.Inventory]


class Specification(pulumi.ComponentResource):
    """The specification of the stack's slices, in the bucket.

    It depends on no slice and no slice on it: `pulumi up` makes it first and `pulumi destroy` removes it first, so that
    a keeper, which reads it before it makes a slice, makes none that is being destroyed.
    """

    def __init__(
        self, name: str, args: SpecificationArgs, opts: pulumi.ResourceOptions | None = None
    ) -> None:
        super().__init__("tpu-stack:control:Specification", name, {}, opts)
        values = pulumi.Output.all(owner=args.owner, slices=args.slices, vacant=args.vacant)
        storage.BucketObject(
            "specification",
            bucket=args.bucket,
            name=f"{CONTROL}/{SPECIFICATION}",
            content=values.apply(lambda parts: specification_json(args.config, **parts)),
            content_type="application/json",
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.register_outputs({})


def specification_json(
    config: Config, owner: str, slices: Mapping[str, Any], vacant: inventory.Inventory
) -> str:
    """The specification as JSON. Parameters: as in `SpecificationArgs`."""
    return json.dumps(
        {
            "version": VERSION,
            "stack": config.stack,
            "project": config.project,
            "owner": owner,
            "slices": dict(slices),
            "inventory": inventory.to_json(vacant),
            "environment": environment(config.notify, config.project),
        },
        indent=1,
        sort_keys=True,
    )


def environment(notify: NotifyConfig, project: str) -> dict[str, str]:
    """The variables of the keeper: the channels of its notifications, by the names of their secrets."""
    names = dataclasses.asdict(notify)
    return {
        variable: f"secret:projects/{project}/secrets/{names[key]}"
        for key, variable in CHANNELS.items()
        if names[key]
    }
