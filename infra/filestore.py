"""NFS from Google's Filestore: no VM to look after, from 1 TiB on."""

from __future__ import annotations

import dataclasses

import pulumi
from pulumi_gcp import filestore

from infra import naming, startup
from infra.config import Config, NfsConfig
from infra.network import client_ranges

TIER = "BASIC_HDD"
SHARE = "share"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilestoreArgs:
    """network: full name."""

    config: Config
    nfs: NfsConfig
    network: pulumi.Input[str]


class Filestore(pulumi.ComponentResource):
    """`share` is what a host mounts."""

    def __init__(self, name: str, args: FilestoreArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("tpu-stack:filestore:Filestore", name, {}, opts)
        instance = filestore.Instance(
            "instance",
            name=naming.resource_name(args.config.stack, "share"),
            project=args.config.project,
            location=args.nfs.zone,
            tier=TIER,
            description=f"NFS server of {args.config.stack}",
            file_shares=filestore.InstanceFileSharesArgs(
                name=SHARE,
                capacity_gb=args.nfs.size_gib,
                nfs_export_options=[
                    filestore.InstanceFileSharesNfsExportOptionArgs(
                        ip_ranges=list(client_ranges(args.config)),
                        access_mode="READ_WRITE",
                        squash_mode="NO_ROOT_SQUASH",
                    )
                ],
            ),
            networks=[
                filestore.InstanceNetworkArgs(
                    network=args.network, modes=["MODE_IPV4"], connect_mode="DIRECT_PEERING"
                )
            ],
            labels=naming.labels(args.config.stack),
            deletion_protection_enabled=args.config.protect,
            deletion_protection_reason="It holds the data of runs; set tpu-stack:protect to false first.",
            opts=pulumi.ResourceOptions(parent=self, protect=args.config.protect),
        )
        address = instance.networks.apply(lambda networks: (networks[0].ip_addresses or ())[0])
        self.share = address.apply(
            lambda found: startup.TpuHost(
                server=found, export=f"/{SHARE}", mount=args.nfs.mount, version="3", root="kept"
            )
        )
        self.register_outputs({"address": address})
