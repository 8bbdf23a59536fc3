"""Where data and images are kept: the bucket, closed to the public, and the repository of the training images."""

from __future__ import annotations

import dataclasses
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, DiffResult, Resource, UpdateResult
from pulumi_gcp import artifactregistry, storage

from contracts.durations import DAY_S
from contracts.inventory import CONTROL
from infra import documents, naming
from infra.config import BucketConfig, Config
from infra.slice_apis import plugin
from infra.slice_apis.plugin import Provider
from infra.slice_apis.retry import CloudTpuError

TEMPORARY_PREFIX = "tmp/"
ABANDONED_UPLOAD_DAYS = 7

READ_AND_WRITE = "roles/storage.objectUser"
"""Objects: create, read, list, overwrite, delete; nothing about the bucket itself."""
SEE_BUCKET = "roles/storage.legacyBucketReader"
"""Client libraries ask for the bucket's own data first, such as its region."""
SHOWN = 5
"""So many names of what a bucket holds are in a message."""
BUCKET_ROLES = {"objects": READ_AND_WRITE, "metadata": SEE_BUCKET}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageBucketArgs:
    """member: who reads and writes, as an IAM principal; None: no host."""

    config: Config
    bucket: BucketConfig
    member: pulumi.Input[str] | None


class StorageBucket(pulumi.ComponentResource):
    """A bucket in one region. Hosts read and write all but the control documents. `name` is known once it exists."""

    def __init__(
        self, name: str, args: StorageBucketArgs, opts: pulumi.ResourceOptions | None = None
    ) -> None:
        super().__init__("tpu-stack:buckets:StorageBucket", name, {}, opts)
        bucket = storage.Bucket(
            "bucket",
            name=args.bucket.name,
            project=args.config.project,
            location=args.bucket.region.upper(),
            storage_class="STANDARD",
            uniform_bucket_level_access=True,
            public_access_prevention="enforced",
            force_destroy=False,
            soft_delete_policy=storage.BucketSoftDeletePolicyArgs(
                retention_duration_seconds=args.bucket.soft_delete_days * DAY_S
            ),
            lifecycle_rules=[
                storage.BucketLifecycleRuleArgs(
                    action=storage.BucketLifecycleRuleActionArgs(type="Delete"),
                    condition=storage.BucketLifecycleRuleConditionArgs(
                        age=args.bucket.temporary_days, matches_prefixes=[TEMPORARY_PREFIX]
                    ),
                ),
                storage.BucketLifecycleRuleArgs(
                    action=storage.BucketLifecycleRuleActionArgs(type="AbortIncompleteMultipartUpload"),
                    condition=storage.BucketLifecycleRuleConditionArgs(age=ABANDONED_UPLOAD_DAYS),
                ),
            ],
            labels=naming.labels(args.config.stack),
            opts=pulumi.ResourceOptions(parent=self, protect=args.config.protect),
        )
        self.name, self.bucket = bucket.name, bucket
        StackObjects("objects", bucket.name, args.config.protect, pulumi.ResourceOptions(parent=self))
        for scope, role in BUCKET_ROLES.items() if args.member is not None else ():
            storage.BucketIAMMember(
                scope,
                bucket=bucket.name,
                role=role,
                member=args.member,
                condition=bucket_condition(args.config, role),
                opts=pulumi.ResourceOptions(parent=self),
            )
        self.register_outputs({})


class StackObjectsProvider(Provider):
    """Raises CloudTpuError if the bucket holds data that the stack has not put there, or does not answer."""

    def create(self, props: dict[str, Any]) -> CreateResult:
        return CreateResult(str(props["bucket"]), props)

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> DiffResult:
        changed = [name for name in ("bucket", "protect") if _olds.get(name) != _news.get(name)]
        return DiffResult(changes=bool(changed), replaces=[name for name in changed if name == "bucket"])

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> UpdateResult:
        return UpdateResult(_news)

    def delete(self, _id: str, _props: dict[str, Any]) -> None:
        if _props["protect"]:
            return
        bucket = str(_props["bucket"])
        with plugin.plain_errors():
            try:
                data = [path for path in documents.top_level(bucket) if path != f"{CONTROL}/"]
                if data:
                    raise CloudTpuError(
                        f"gs://{bucket} holds {', '.join(data[:SHOWN])}{' …' if len(data) > SHOWN else ''}, and a "
                        f"bucket with data is not deleted; remove what nobody needs, `gcloud storage rm --recursive "
                        f"'gs://{bucket}/**'` for all of it, and try again"
                    )
                documents.Documents(f"gs://{bucket}/{CONTROL}").clear()
            except documents.MissingError:
                pass
            except documents.DocumentsError as error:
                raise CloudTpuError(
                    f"what the stack keeps in its bucket cannot be removed: {error}"
                ) from None


class StackObjects(Resource, module="tpu_stack", name="StackObjects"):
    """The stack's own objects in its bucket (leases, stock-outs), which are removed before the bucket.

    Everything that writes them must depend on this. protect: nothing is removed, since the bucket stays.
    """

    def __init__(
        self,
        name: str,
        bucket: pulumi.Input[str],
        protect: bool,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__(StackObjectsProvider(), name, {"bucket": bucket, "protect": protect}, opts)


def bucket_condition(config: Config, role: str) -> storage.BucketIAMMemberConditionArgs | None:
    """Excludes the control documents, which decide which TPUs are made and what runs on them, from hosts and jobs."""
    if config.bucket is None or role != READ_AND_WRITE:
        return None
    control = f"projects/_/buckets/{config.bucket.name}/objects/{CONTROL}/"
    return storage.BucketIAMMemberConditionArgs(
        title="All but the control documents", expression=f'!resource.name.startsWith("{control}")'
    )


READ_IMAGES = "roles/artifactregistry.reader"
UNTAGGED_DAYS = 7  # a build that is being pushed has layers without a tag
OLD_DAYS = 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegistryArgs:
    """member: who pulls, as an IAM principal; None: nobody."""

    config: Config
    member: pulumi.Input[str] | None


class Registry(pulumi.ComponentResource):
    """The hosts may read it. `url` is what an image's name begins with."""

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
        if args.member is not None:
            artifactregistry.RepositoryIamMember(
                "hosts",
                project=args.config.project,
                location=images.region,
                repository=repository.repository_id,
                role=READ_IMAGES,
                member=args.member,
                opts=child,
            )
        self.url = f"{images.region}-docker.pkg.dev/{args.config.project}/{images.repository}"
        self.register_outputs({"url": self.url})
