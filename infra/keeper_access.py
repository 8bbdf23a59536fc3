"""What the keeper needs of the cloud: an account with a role of its own.

The role has what the Cloud TPU API asks for (queued resources are under the permissions of nodes:
https://docs.cloud.google.com/iam/docs/roles-permissions/tpu), and a log-in to the hosts as root, which preparing them
takes. A condition on names is not in it: that the API gives IAM the names is written nowhere.
"""

from __future__ import annotations

import dataclasses

import pulumi
from pulumi_gcp import projects, secretmanager, serviceaccount, storage

from infra import naming
from infra.bucket_and_images import BUCKET_ROLES
from infra.config import Config
from infra.iam import LONGEST_ACCOUNT_ID, USE_ACCOUNT

PERMISSIONS = (
    "compute.instances.osAdminLogin", "compute.instances.osLogin", "tpu.nodes.create", "tpu.nodes.delete",
    "tpu.nodes.get", "tpu.nodes.list", "tpu.nodes.update", "tpu.operations.get",
)  # fmt: skip
ON_COMPUTE_PERMISSIONS = (
    "compute.disks.create", "compute.disks.use", "compute.disks.useReadOnly", "compute.images.useReadOnly",
    "compute.instanceGroupManagers.create", "compute.instanceGroupManagers.delete",
    "compute.instanceGroupManagers.get", "compute.instanceGroupManagers.list",
    "compute.instanceGroupManagers.update", "compute.instanceGroups.create", "compute.instanceGroups.delete",
    "compute.instanceTemplates.get", "compute.instanceTemplates.useReadOnly", "compute.instances.create",
    "compute.instances.delete", "compute.instances.get", "compute.instances.getGuestAttributes",
    "compute.instances.list", "compute.instances.setLabels", "compute.instances.setMetadata",
    "compute.instances.setServiceAccount", "compute.instances.setTags", "compute.networks.use",
    "compute.reservations.get", "compute.resourcePolicies.use", "compute.subnetworks.use",
    "compute.subnetworks.useExternalIp", "compute.zoneOperations.get", "compute.zones.list",
)  # fmt: skip
"""Of a stack with slices that Compute Engine makes (https://cloud.google.com/compute/docs/reference/rest/v1)."""
READ_SECRET = "roles/secretmanager.secretAccessor"


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
        has_compute = any(slice_config.on_compute for slice_config in config.slices)
        role = projects.IAMCustomRole(
            "keeper",
            # A role that was deleted keeps its id for weeks, and a stack of the same name has another owner.
            role_id=pulumi.Output.from_input(args.owner).apply(lambda owner: f"tpuStackKeeper_{owner}"),
            project=config.project,
            title=f"Keeper of tpu-stack {config.stack}",
            description="Makes and removes TPUs, and prepares their hosts",
            permissions=sorted([*PERMISSIONS, *(ON_COMPUTE_PERMISSIONS if has_compute else ())]),
            opts=child,
        )
        projects.IAMMember("keep", project=config.project, role=role.name, member=member, opts=child)
        # Administrators become root on the gateway, which OS Login allows only to those who may use its account.
        uses: list[tuple[str, pulumi.Input[str], pulumi.Input[str]]] = [("hosts", member, args.hosts_account)]
        uses += [(f"keeper {person}", person, account.name) for person in config.access.administrators]
        for account_label, user, account_name in uses:
            serviceaccount.IAMMember(
                f"use account of {account_label}",
                service_account_id=account_name,
                role=USE_ACCOUNT,
                member=user,
                opts=child,
            )
        for scope, bucket_role in BUCKET_ROLES.items():
            storage.BucketIAMMember(
                f"keeper {scope}", bucket=args.bucket, role=bucket_role, member=member, opts=child
            )
        for secret in config.notify.secrets:
            secretmanager.SecretIamMember(
                secret, project=config.project, secret_id=secret, role=READ_SECRET, member=member, opts=child
            )
        self.register_outputs({"email": self.email})
