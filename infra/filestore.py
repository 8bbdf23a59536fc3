"""NFS from Google's Filestore: no VM to look after, from 1 TiB on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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
            opts=pulumi.ResourceOptions(parent=self, protect=args.config.protect),
        )
        address = instance.networks.apply(_address)
        self.share = address.apply(
            lambda found: startup.TpuHost(
                server=found, export=f"/{SHARE}", mount=args.nfs.mount, version="3", root="kept"
            )
        )
        self.register_outputs({"address": address})


def _address(networks: Sequence[filestore.outputs.InstanceNetwork]) -> str:
    """The first; a preview of an instance that is still to be made may know its network and no address."""
    addresses = networks[0].ip_addresses or ()
    if not addresses and pulumi.runtime.is_dry_run():
        return "not-known-yet"
    return addresses[0]
