"""What the keeper needs of the cloud: an account with a role of its own, and the description of what it may bring back.

The role has what the Cloud TPU API asks for (queued resources are under the permissions of nodes:
https://docs.cloud.google.com/iam/docs/roles-permissions/tpu), and a log-in to the hosts as root, which preparing them
takes. A condition on names is not in it: that the API gives IAM the names is written nowhere.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pulumi
from pulumi_gcp import projects, secretmanager, serviceaccount, storage

from contracts import inventory
from infra import lease, naming
from infra.bucket_and_images import BUCKET_ROLES, KEEPER_FOLDER
from infra.config import Config, NotifyConfig, SliceConfig
from infra.iam import LONGEST_ACCOUNT_ID, USE_ACCOUNT
from infra.keeper_dismissal import KeeperDismissal

PERMISSIONS = (
    "compute.instances.osAdminLogin", "compute.instances.osLogin", "tpu.nodes.create", "tpu.nodes.delete",
    "tpu.nodes.get", "tpu.nodes.list", "tpu.nodes.update", "tpu.operations.get",
)  # fmt: skip
READ_SECRET = "roles/secretmanager.secretAccessor"
DESCRIPTION = "stack.json"
VERSION = 1
CHANNELS = {
    "slack": "TPU_STACK_SLACK_WEBHOOK",
    "webhook": "TPU_STACK_WEBHOOK",
    "smtp": "TPU_STACK_SMTP",
}
"""Key of the configuration → the variable by which `console.notify` finds the channel."""


def store_url(config: Config) -> str | None:
    """Where the keeper keeps what it watches; None where there is no keeper."""
    return f"gs://{config.bucket.name}/{KEEPER_FOLDER}" if config.keeper and config.bucket else None


def stock_outs_url(config: Config, each: SliceConfig) -> str | None:
    """Where it is remembered which zones had no room for a slice: with a keeper, or where it has several zones."""
    wanted = config.bucket is not None and (config.keeper or each.more_zones)
    return f"gs://{config.bucket.name}/{KEEPER_FOLDER}" if wanted and config.bucket else None


def lease_url(config: Config, slice_name: str) -> str | None:
    """The document of who may change a slice; None where there is no keeper."""
    store = store_url(config)
    return None if store is None else lease.url_of(store, slice_name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeeperAccountArgs:
    """bucket: its name. hosts_account: the full name of the hosts' service account. owner: the stack's id."""

    config: Config
    bucket: pulumi.Input[str]
    hosts_account: pulumi.Input[str]
    owner: pulumi.Input[str]


class KeeperAccount(pulumi.ComponentResource):
    """A service account without keys, for the gateway. `email` is its name there."""

    def __init__(
        self, name: str, args: KeeperAccountArgs, opts: pulumi.ResourceOptions | None = None
    ) -> None:
        super().__init__("tpu-stack:keeper:KeeperAccount", name, {}, opts)
        config, child = args.config, pulumi.ResourceOptions(parent=self)
        account = serviceaccount.Account(
            "keeper",
            account_id=naming.resource_name(config.stack, "keeper", longest=LONGEST_ACCOUNT_ID),
            project=config.project,
            display_name=f"Keeper of {config.stack}",
            opts=child,
        )
        self.email = account.email
        member = account.email.apply(lambda email: f"serviceAccount:{email}")
        role = projects.IAMCustomRole(
            "keeper",
            # A role that was deleted keeps its id for weeks, and a stack of the same name has another owner.
            role_id=pulumi.Output.from_input(args.owner).apply(lambda owner: f"tpuStackKeeper_{owner}"),
            project=config.project,
            title=f"Keeper of tpu-stack {config.stack}",
            description="Makes and removes TPUs, and prepares their hosts",
            permissions=list(PERMISSIONS),
            opts=child,
        )
        projects.IAMMember("keep", project=config.project, role=role.name, member=member, opts=child)
        # Administrators become root on the gateway, which OS Login allows only to those who may use its account.
        uses: list[tuple[str, pulumi.Input[str], pulumi.Input[str]]] = [("hosts", member, args.hosts_account)]
        uses += [(f"keeper {person}", person, account.name) for person in config.access.administrators]
        for whose, user, account_name in uses:
            serviceaccount.IAMMember(
                f"use account of {whose}",
                service_account_id=account_name,
                role=USE_ACCOUNT,
                member=user,
                opts=child,
            )
        for what, bucket_role in BUCKET_ROLES.items():
            storage.BucketIAMMember(
                f"keeper {what}", bucket=args.bucket, role=bucket_role, member=member, opts=child
            )
        for secret in config.notify.secrets:
            secretmanager.SecretIamMember(
                secret, project=config.project, secret_id=secret, role=READ_SECRET, member=member, opts=child
            )
        self.register_outputs({"email": self.email})


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescriptionArgs:
    """bucket: its name. owner: the stack's id. slices: the inputs of each queued resource, by the slice's name.

    vacant: the inventory with slices that have no hosts yet.
    """

    config: Config
    bucket: pulumi.Input[str]
    owner: pulumi.Input[str]
    slices: Mapping[str, pulumi.Input[Mapping[str, Any]]]
    vacant: pulumi.Input[inventory.Inventory]


class Description(pulumi.ComponentResource):
    """What a keeper has to know of the stack, in the bucket; `text` is the same, for the stack's outputs.

    It depends on no slice and no slice on it: it is there as soon as `pulumi up` has begun, and it goes as soon as
    `pulumi destroy` has, so that a keeper that looks before it makes something makes nothing that is being destroyed.
    """

    def __init__(self, name: str, args: DescriptionArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("tpu-stack:keeper:Description", name, {}, opts)
        known = pulumi.Output.all(owner=args.owner, slices=args.slices, vacant=args.vacant)
        self.text = known.apply(lambda parts: describe(args.config, **parts))
        storage.BucketObject(
            "description",
            bucket=args.bucket,
            name=f"{KEEPER_FOLDER}/{DESCRIPTION}",
            content=self.text,
            content_type="application/json",
            opts=pulumi.ResourceOptions(parent=self),
        )
        store = pulumi.Output.from_input(args.bucket).apply(lambda bucket: f"gs://{bucket}/{KEEPER_FOLDER}")
        KeeperDismissal("dismissal", store, args.owner, pulumi.ResourceOptions(parent=self))
        self.register_outputs({})


def describe(config: Config, owner: str, slices: Mapping[str, Any], vacant: inventory.Inventory) -> str:
    """The description as JSON. Parameters: as in `DescriptionArgs`."""
    return json.dumps(
        {
            "version": VERSION,
            "stack": config.stack,
            "project": config.project,
            "store": store_url(config),
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
