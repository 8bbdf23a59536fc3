"""The Google APIs that a stack needs, switched on. They stay on when the stack goes: others may be using them."""

from __future__ import annotations

import pulumi
from pulumi_gcp import projects

from infra.config import Config

ALWAYS = (
    "cloudresourcemanager", "compute", "iam", "iap", "oslogin", "storage", "artifactregistry", "tpu",
)  # fmt: skip
FILESTORE = "file"


class Services(pulumi.ComponentResource):
    """Everything else depends on this."""

    def __init__(self, name: str, config: Config, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("tpu-stack:services:Services", name, {}, opts)
        filestore = config.nfs is not None and config.nfs.kind == "filestore"
        for service in (*ALWAYS, *([FILESTORE] if filestore else [])):
            projects.Service(
                service,
                service=f"{service}.googleapis.com",
                project=config.project,
                disable_on_destroy=False,
                opts=pulumi.ResourceOptions(parent=self),
            )
        self.register_outputs({})
