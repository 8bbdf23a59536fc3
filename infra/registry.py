"""The repository of the training images; hosts may read it."""

from __future__ import annotations

import dataclasses

import pulumi
from pulumi_gcp import artifactregistry

from infra import naming
from infra.config import Config

READ = "roles/artifactregistry.reader"
DAY_S = 24 * 60 * 60
UNTAGGED_DAYS = 7  # a build that is being pushed has layers without a tag
OLD_DAYS = 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegistryArgs:
    """member: who pulls, as an IAM principal."""

    config: Config
    member: pulumi.Input[str]


class Registry(pulumi.ComponentResource):
    """`url` is what an image's name begins with."""

    def __init__(self, name: str, args: RegistryArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("tpu-stack:registry:Registry", name, {}, opts)
        images = args.config.images
        child = pulumi.ResourceOptions(parent=self)
        repository = artifactregistry.Repository(
            "repository",
            repository_id=images.repository,
            project=args.config.project,
            location=images.region,
            format="DOCKER",
            description=f"Training images of {args.config.stack}",
            cleanup_policy_dry_run=False,
            # By their ids, in the order in which Google gives them back.
            cleanup_policies=[
                artifactregistry.RepositoryCleanupPolicyArgs(
                    id="delete-old",
                    action="DELETE",
                    condition=artifactregistry.RepositoryCleanupPolicyConditionArgs(
                        tag_state="ANY", older_than=f"{OLD_DAYS * DAY_S}s"
                    ),
                ),
                artifactregistry.RepositoryCleanupPolicyArgs(
                    id="delete-untagged",
                    action="DELETE",
                    condition=artifactregistry.RepositoryCleanupPolicyConditionArgs(
                        tag_state="UNTAGGED", older_than=f"{UNTAGGED_DAYS * DAY_S}s"
                    ),
                ),
                # What is kept wins over what is deleted (https://cloud.google.com/artifact-registry/docs/repositories/
                # cleanup-policy): the newest versions stay, tagged or not, since runs name images by digest.
                artifactregistry.RepositoryCleanupPolicyArgs(
                    id="keep-newest",
                    action="KEEP",
                    most_recent_versions=artifactregistry.RepositoryCleanupPolicyMostRecentVersionsArgs(
                        keep_count=images.keep
                    ),
                ),
            ],
            labels=naming.labels(args.config.stack),
            # An image can be built again, but not the same: runs name theirs by digest.
            opts=pulumi.ResourceOptions(parent=self, protect=args.config.protect),
        )
        artifactregistry.RepositoryIamMember(
            "hosts",
            project=args.config.project,
            location=images.region,
            repository=repository.repository_id,
            role=READ,
            member=args.member,
            opts=child,
        )
        self.url = f"{images.region}-docker.pkg.dev/{args.config.project}/{images.repository}"
        self.register_outputs({"url": self.url})
