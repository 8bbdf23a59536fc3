"""The bucket of a stack: in one region, closed to the public, readable and writable by the hosts."""

from __future__ import annotations

import dataclasses

import pulumi
from pulumi_gcp import storage

from infra import naming
from infra.config import BucketConfig, Config

DAY_S = 24 * 60 * 60
TEMPORARY_PREFIX = "tmp/"
ABANDONED_UPLOAD_DAYS = 7

READ_AND_WRITE = "roles/storage.objectUser"
"""Objects: create, read, list, overwrite, delete; nothing about the bucket itself."""
SEE_BUCKET = "roles/storage.legacyBucketReader"
"""Client libraries ask for the bucket's own data first, such as its region."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageBucketArgs:
    """member: who reads and writes, as an IAM principal."""

    config: Config
    bucket: BucketConfig
    member: pulumi.Input[str]


class StorageBucket(pulumi.ComponentResource):
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
        for what, role in (("objects", READ_AND_WRITE), ("metadata", SEE_BUCKET)):
            storage.BucketIAMMember(
                what,
                bucket=bucket.name,
                role=role,
                member=args.member,
                opts=pulumi.ResourceOptions(parent=self),
            )
        self.register_outputs({})
