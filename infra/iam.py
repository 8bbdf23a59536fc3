"""Who the hosts are to Google, and who may log in to them."""

from __future__ import annotations

import dataclasses

import pulumi
from pulumi_gcp import projects, serviceaccount, storage

from contracts.inventory import CONTROL, RECORDED
from infra import naming
from infra.config import Config
from infra.documents import lease

LONGEST_ACCOUNT_ID = 30


class Identity(pulumi.ComponentResource):
    """One service account, which gets no role in the project: only the bucket and the image repository admit it.

    `email` goes on the hosts, `member` into bindings, `account` is the account's full name.
    """

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


TUNNEL = "roles/iap.tunnelResourceAccessor"
LOG_IN = "roles/compute.osLogin"
LOG_IN_AS_ROOT = "roles/compute.osAdminLogin"
USE_ACCOUNT = "roles/iam.serviceAccountUser"
"""OS Login refuses a VM that runs as a service account to those who may not use that account
(https://cloud.google.com/compute/docs/oslogin/set-up-oslogin)."""


LEASES = (
    ("names", "roles/storage.legacyBucketReader", None),
    ("leases", "roles/storage.objectUser", f"{CONTROL}/{lease.FOLDER}/"),
    ("hosts", "roles/storage.objectViewer", f"{CONTROL}/{RECORDED}"),
)
"""Roles on the bucket and their objects, so that people can launch where runs are on a share. They may take a slice's
lease and see its current hosts, no more: who can write the control documents decides what runs."""

ALWAYS = 'request.time > timestamp("2020-01-01T00:00:00Z")'
"""A condition that holds. OS Login is asked about machines whose names are Google's own, so no name is in it."""

LOG_IN_METADATA = {
    "enable-oslogin": "TRUE",
    "block-project-ssh-keys": "TRUE",
    "serial-port-enable": "FALSE",
    # A machine publishes its SSH host keys there, and whether its start-up script is through.
    "enable-guest-attributes": "TRUE",
}
"""Of every machine: people come in by OS Login and in no other way."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccessArgs:
    """account: the full name of the hosts' service account. bucket: the name of the stack's, None where it has none."""

    config: Config
    account: pulumi.Input[str]
    bucket: pulumi.Input[str] | None


class Access(pulumi.ComponentResource):
    """A tunnel through IAP to port 22, an OS Login account, leave to use the hosts' service account, and leases."""

    def __init__(self, name: str, args: AccessArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("tpu-stack:access:Access", name, {}, opts)
        access, config = args.config.access, args.config
        bucket = f"projects/_/buckets/{config.bucket.name}" if config.bucket else ""
        child = pulumi.ResourceOptions(parent=self)
        people = [(member, LOG_IN_AS_ROOT) for member in access.administrators]
        people += [(member, LOG_IN) for member in access.members if member not in access.administrators]
        for member, log_in in people:
            for purpose, role, expression in (
                ("tunnel", TUNNEL, "destination.port == 22"),
                ("log in", log_in, ALWAYS),
            ):
                projects.IAMMember(
                    f"{purpose} {member}",
                    project=args.config.project,
                    role=role,
                    member=member,
                    # The title is part of the binding, so that each stack has its own.
                    condition=projects.IAMMemberConditionArgs(
                        title=f"SSH to {naming.resource_name(args.config.stack)}", expression=expression
                    ),
                    opts=child,
                )
            for purpose, role, prefix in LEASES if args.bucket is not None else ():
                objects = f"{bucket}/objects/{prefix}"
                storage.BucketIAMMember(
                    f"{purpose} {member}",
                    bucket=args.bucket,
                    role=role,
                    member=member,
                    condition=storage.BucketIAMMemberConditionArgs(
                        title=f"{purpose.capitalize()} of slices",
                        expression=f'resource.name.startsWith("{objects}")',
                    )
                    if prefix
                    else None,
                    opts=child,
                )
            serviceaccount.IAMMember(
                f"use account {member}",
                service_account_id=args.account,
                role=USE_ACCOUNT,
                member=member,
                opts=child,
            )
        self.register_outputs({})
