"""The file system that all hosts mount: NFS from a small VM, the gateway, or from Google's Filestore."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pulumi
from pulumi_gcp import compute, filestore

from contracts import inventory
from infra import naming, startup
from infra.config import GATEWAY_BOOT_GIB, GATEWAY_DISK_TYPE, Config, NfsConfig
from infra.iam import LOG_IN_METADATA
from infra.network import client_ranges

EXPORT = "/srv/share"
OWNER_ID = 1000
"""User and group of every file of the share, whoever writes it: OS Login gives each person an id of their own."""

DEVICE_NAME = "share"
IMAGE = "debian-cloud/debian-12"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatewayArgs:
    """subnetwork: full name. tag: what the firewall knows the VM by."""

    config: Config
    nfs: NfsConfig
    subnetwork: pulumi.Input[str]
    tag: str


class GatewayServer(pulumi.ComponentResource):
    """A small NFS server. Its data is on a separate disk, so the VM can be replaced, and its address stays the same.

    It is made in three steps: first the disk, `data`; then, by `reserve`, its address; then, by `serve`, the VM.
    `share` is what a host mounts, `entry` what the inventory says of the VM.
    """

    share: pulumi.Output[startup.TpuHost]
    entry: pulumi.Output[inventory.Gateway]

    def __init__(
        self, name: str, config: Config, nfs: NfsConfig, opts: pulumi.ResourceOptions | None = None
    ) -> None:
        super().__init__("tpu-stack:gateway:Gateway", name, {}, opts)
        self.data = compute.Disk(
            "data",
            name=naming.resource_name(config.stack, "share"),
            project=config.project,
            zone=nfs.zone,
            type=GATEWAY_DISK_TYPE,
            size=nfs.size_gib,
            labels=naming.labels(config.stack),
            opts=pulumi.ResourceOptions(parent=self, protect=config.protect),
        )

    def reserve(self, args: GatewayArgs, after: Sequence[pulumi.Resource]) -> None:
        """Reserve the address. after: what is made before it."""
        self._args = args
        self._address = compute.Address(
            "address",
            name=naming.resource_name(args.config.stack, "gateway"),
            project=args.config.project,
            region=args.nfs.region,
            address_type="INTERNAL",
            subnetwork=args.subnetwork,
            labels=naming.labels(args.config.stack),
            # Where both move, one after the other, since the engine deletes the VM before the first and lets only that
            # one wait for it. The disk first: it may be protected, and then nothing has been touched.
            opts=pulumi.ResourceOptions(parent=self, depends_on=[self.data, *after]),
        )
        self.share = self._address.address.apply(
            lambda address: startup.TpuHost(server=address, export=EXPORT, mount=args.nfs.mount)
        )

    def serve(self, service_account: pulumi.Input[str] | None, after: Sequence[pulumi.Resource]) -> None:
        """Make the VM. service_account: the keeper's, if any. after: what is made before it."""
        zone, address = self._args.nfs.zone, self._address
        machine = self._machine(self._args, address, service_account, after)
        self.entry = pulumi.Output.all(machine.name, address.address).apply(
            lambda outputs: inventory.Gateway(
                name=outputs[0], zone=zone, address=outputs[1], host_keys=(), user=None
            )
        )
        self.register_outputs({"address": address.address})

    def _machine(
        self,
        args: GatewayArgs,
        address: compute.Address,
        service_account: pulumi.Input[str] | None,
        after: Sequence[pulumi.Resource],
    ) -> compute.Instance:
        labels = naming.labels(args.config.stack)
        return compute.Instance(
            "machine",
            name=naming.resource_name(args.config.stack, "gateway"),
            project=args.config.project,
            zone=args.nfs.zone,
            machine_type=args.nfs.machine_type,
            description=f"NFS server of {args.config.stack}",
            boot_disk=compute.InstanceBootDiskArgs(
                initialize_params=compute.InstanceBootDiskInitializeParamsArgs(
                    image=IMAGE, size=GATEWAY_BOOT_GIB, type=GATEWAY_DISK_TYPE, labels=labels
                )
            ),
            attached_disks=[
                compute.InstanceAttachedDiskArgs(source=self.data.self_link, device_name=DEVICE_NAME)
            ],
            network_interfaces=[
                compute.InstanceNetworkInterfaceArgs(subnetwork=args.subnetwork, network_ip=address.address)
            ],
            metadata={
                **LOG_IN_METADATA,
                "startup-script": startup.gateway_script(
                    startup.GatewaySettings(
                        export=EXPORT,
                        clients=client_ranges(args.config),
                        uid=OWNER_ID,
                        gid=OWNER_ID,
                        disk=DEVICE_NAME,
                    )
                ),
            },
            shielded_instance_config=compute.InstanceShieldedInstanceConfigArgs(
                enable_secure_boot=True, enable_vtpm=True, enable_integrity_monitoring=True
            ),
            allow_stopping_for_update=True,
            labels=labels,
            tags=[args.tag],
            # A server of files asks nothing of Google; the keeper does. What it may do is up to its account's roles.
            service_account=compute.InstanceServiceAccountArgs(
                email=service_account, scopes=["cloud-platform"]
            )
            if service_account is not None
            else None,
            opts=pulumi.ResourceOptions(
                parent=self,
                depends_on=after,
                delete_before_replace=True,
                # Else a disk or address that is made again is deleted while the VM runs with it: the provider takes
                # another one for a change in place.
                replace_on_changes=["attachedDisks", "networkInterfaces"],
                # The image family moves on with every release of Debian's images; the VM updates itself.
                ignore_changes=["bootDisk.initializeParams.image"],
            ),
        )


TIER = "BASIC_HDD"
SHARE = "share"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilestoreArgs:
    """network: full name."""

    config: Config
    nfs: NfsConfig
    network: pulumi.Input[str]


class Filestore(pulumi.ComponentResource):
    """No VM to look after, from 1 TiB on. `share` is what a host mounts, `data` what holds it."""

    def __init__(self, name: str, args: FilestoreArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("tpu-stack:filestore:Filestore", name, {}, opts)
        self.data = filestore.Instance(
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
        address = self.data.networks.apply(_address)
        self.share = address.apply(
            lambda address: startup.TpuHost(
                server=address, export=f"/{SHARE}", mount=args.nfs.mount, version="3", root="kept"
            )
        )
        self.register_outputs({"address": address})


def _address(networks: Sequence[filestore.outputs.InstanceNetwork]) -> str:
    """The first; a preview of an instance that is still to be made may know its network and no address."""
    addresses = networks[0].ip_addresses or ()
    if not addresses and pulumi.runtime.is_dry_run():
        return "not-known-yet"
    return addresses[0]
