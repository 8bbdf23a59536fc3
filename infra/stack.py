"""All components of a stack, and what depends on what."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import pulumi
from pulumi_gcp import projects

from contracts import inventory
from infra import control_folder, startup
from infra.bucket_and_images import Registry, RegistryArgs, StorageBucket, StorageBucketArgs
from infra.config import Config, NfsConfig
from infra.control_folder import Specification, SpecificationArgs
from infra.file_server import Filestore, FilestoreArgs, GatewayArgs, GatewayServer
from infra.gke.cluster import Gke, GkeArgs, Pools, PoolsArgs, existing, slice_entry
from infra.gke.node_pools import UNKNOWN, Hooks, Observed
from infra.iam import Access, AccessArgs, Identity
from infra.keeper_access import KeeperAccount, KeeperAccountArgs
from infra.network import Network
from infra.slice_apis.lifecycles import CLOUD_TPU, COMPUTE
from infra.slices import TpuSlice, TpuSliceArgs
from infra.stack_identity import StackIdentity

SERVICES = (
    "cloudresourcemanager", "compute", "iam", "storage", "artifactregistry", "tpu",
)  # fmt: skip
LOGIN_SERVICES = ("iap", "oslogin")
FILESTORE_SERVICE = "file"
SECRETS_SERVICE = "secretmanager"
CLUSTER_SERVICE = "container"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """inventory: contract 1. image_repository: what the name of a pushed image begins with."""

    inventory: pulumi.Output[inventory.Inventory]
    image_repository: str


def declare_stack(
    config: Config,
    granted_chips: Sequence[int] | None = None,
    *,
    observed: Observed = UNKNOWN,
    hooks: Hooks | None = None,
) -> Stack:
    """Declare everything that `config` asks for. granted_chips: how many of each slice's a grant covers. observed,
    hooks: of `infra.gke.node_pools`."""
    services = Services("services", config)
    after_services = pulumi.ResourceOptions(depends_on=[services])
    # A stack that is only a cluster has nobody who logs in and no hosts to log in to.
    identity = Identity("identity", config, after_services) if config.has_machines else None
    network = Network("network", config, after_services)
    # What holds data comes first. The engine refuses to replace what is protected, and then nothing else has been made.
    hosts = identity.member if identity else None
    registry = Registry("registry", RegistryArgs(config=config, member=hosts), after_services)
    bucket = _bucket(config, hosts, after_services)
    server = _file_server(config, config.nfs, network, after_services) if config.nfs else None
    vms = {
        slice_config.name: TpuSlice(config, slice_config, after_services)
        for slice_config in config.slices
        if not slice_config.in_cluster
    }
    stores = [registry, *([bucket] if bucket else [])]
    disks = [disk for tpu_slice in vms.values() for disk in tpu_slice.disks.values()]
    data = [*stores, *([server.data] if server else []), *disks]
    network.connect(config, after=data)
    after_data = pulumi.ResourceOptions(depends_on=[services, *data])
    if identity:
        people = AccessArgs(config=config, account=identity.account, bucket=bucket.name if bucket else None)
        Access("access", people, after_data)
    if isinstance(server, GatewayServer) and config.nfs:
        server.reserve(_gateway_args(config, config.nfs, network), after=[network, *stores])
    if identity:
        _prepare_slices(config, vms, network, identity, server, after=[network, identity, *data])
    templates = [template for vm in vms.values() for template in vm.templates]
    # It is deleted before all that its TPUs stand on, of which some may be in no state.
    below = pulumi.ResourceOptions(depends_on=[network, *([identity] if identity else []), *data, *templates])
    owner = _owner(config, below)
    if isinstance(server, GatewayServer):
        # It installs packages through the network's way out, and its keeper writes to the bucket.
        server.serve(_keeper_email(config, bucket, identity, owner, after_data), after=[network, *stores])
    cluster = _cluster(config, network, bucket, owner, [network, *stores], observed, hooks)
    for vm in vms.values():
        vm.ask(owner, after=[network, *([identity] if identity else []), *stores])
    granted: Sequence[int | None] = granted_chips or [None] * len(config.slices)

    def stack_inventory(
        entries: Mapping[str, pulumi.Input[inventory.Slice]],
    ) -> pulumi.Output[inventory.Inventory]:
        return _inventory(config, server, entries, granted, cluster)

    if bucket:
        specified = SpecificationArgs(
            config=config,
            bucket=bucket.name,
            owner=owner,
            slices={name: vm.inputs for name, vm in vms.items() if vm.inputs is not None},
            vacant=stack_inventory({name: vm.vacant for name, vm in vms.items()}),
        )
        Specification("specification", specified, after_services)
    return Stack(
        inventory=stack_inventory({name: vm.entry for name, vm in vms.items()}),
        image_repository=registry.url,
    )


def _bucket(
    config: Config, hosts: pulumi.Output[str] | None, opts: pulumi.ResourceOptions
) -> StorageBucket | None:
    if config.bucket is None:
        return None
    args = StorageBucketArgs(config=config, bucket=config.bucket, member=hosts)
    return StorageBucket("storage", args, opts)


def _owner(config: Config, opts: pulumi.ResourceOptions) -> pulumi.Output[str]:
    """Declare the stack's id, which knows where and by which APIs the stack may ask for TPUs."""
    tpu_vms = [slice_config for slice_config in config.slices if not slice_config.in_cluster]
    zones = {zone for slice_config in tpu_vms for zone in slice_config.zones}
    apis = {COMPUTE if slice_config.on_compute else CLOUD_TPU for slice_config in tpu_vms}
    url = control_folder.folder_url(config)
    return StackIdentity("owner", config.project, zones, url, opts, apis=apis or {CLOUD_TPU}).owner


def _keeper_email(
    config: Config,
    bucket: StorageBucket | None,
    identity: Identity | None,
    owner: pulumi.Input[str],
    opts: pulumi.ResourceOptions,
) -> pulumi.Output[str] | None:
    """Declare the keeper's account; return its name, or None where the stack has no keeper."""
    if not (config.keeper and bucket and identity):
        return None
    args = KeeperAccountArgs(config=config, bucket=bucket.name, hosts_account=identity.account, owner=owner)
    return KeeperAccount("keeper", args, opts).email


def _gateway_args(config: Config, nfs: NfsConfig, network: Network) -> GatewayArgs:
    subnetwork = network.subnetworks[nfs.region]
    return GatewayArgs(config=config, nfs=nfs, subnetwork=subnetwork, tag=network.gateway_tag)


def _prepare_slices(
    config: Config,
    vms: Mapping[str, TpuSlice],
    network: Network,
    identity: Identity,
    server: GatewayServer | Filestore | None,
    *,
    after: Sequence[pulumi.Resource],
) -> None:
    for slice_config in config.slices:
        if slice_config.name in vms:
            slice_args = TpuSliceArgs(
                config=config,
                slice_config=slice_config,
                network=network.network,
                subnetworks=network.subnetworks,
                tag=network.host_tag,
                service_account=identity.email,
                share=server.share if server else None,
                lease_url=control_folder.lease_url(config, slice_config.name),
                store_url=control_folder.folder_url(config),
            )
            vms[slice_config.name].prepare(slice_args, after=after)


def _inventory(
    config: Config,
    server: GatewayServer | Filestore | None,
    vms: Mapping[str, pulumi.Input[inventory.Slice]],
    granted: Sequence[int | None],
    cluster: Gke | None,
) -> pulumi.Output[inventory.Inventory]:
    """vms: the entries of the slices that are TPU VMs, by name."""
    parts = pulumi.Output.all(
        slices=[
            vms[slice_config.name] if slice_config.name in vms else slice_entry(config, slice_config)
            for slice_config in config.slices
        ],
        gateway=server.entry if isinstance(server, GatewayServer) else None,
        share=server.share if server else None,
        cluster=cluster.entry if cluster else None,
    )
    elsewhere = existing(config.cluster) if config.cluster and config.cluster.context else None
    return parts.apply(
        lambda outputs: inventory.Inventory(
            stack=config.stack,
            project=config.project,
            storage=_storage(config, outputs["share"]),
            images=dict(config.images.references),
            gateway=outputs["gateway"],
            slices=tuple(
                dataclasses.replace(entry, granted_chips=chips)
                for entry, chips in zip(outputs["slices"], granted, strict=True)
            ),
            has_keeper=config.keeper,
            idle_hours=config.idle_hours,
            cluster=outputs["cluster"] or elsewhere,
        )
    )


class Services(pulumi.ComponentResource):
    """The Google APIs that a stack needs, switched on. Everything else depends on this.

    They stay on when the stack goes: others may be using them.
    """

    def __init__(self, name: str, config: Config, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("tpu-stack:services:Services", name, {}, opts)
        filestore = config.nfs is not None and config.nfs.kind == "filestore"
        more = [*(LOGIN_SERVICES if config.has_machines else ())]
        more += [FILESTORE_SERVICE] * filestore + [SECRETS_SERVICE] * bool(config.notify.secrets)
        more += [CLUSTER_SERVICE] * bool(config.gke)
        for service in (*SERVICES, *more):
            projects.Service(
                service,
                service=f"{service}.googleapis.com",
                project=config.project,
                disable_on_destroy=False,
                opts=pulumi.ResourceOptions(parent=self),
            )
        self.register_outputs({})


def _cluster(
    config: Config,
    network: Network,
    bucket: StorageBucket | None,
    owner: pulumi.Input[str],
    needed: Sequence[pulumi.Resource],
    observed: Observed,
    hooks: Hooks | None,
) -> Gke | None:
    """Declare the stack's own cluster and its node pools."""
    if config.gke is None:
        return None
    args = GkeArgs(
        config=config,
        cluster=config.gke,
        owner=owner,
        network=network.network,
        subnetwork=network.subnetworks[config.gke.region],
        bucket=bucket.bucket if bucket else None,
        observed=observed,
        hooks=hooks,
    )
    cluster = Gke("cluster", args, pulumi.ResourceOptions(depends_on=list(needed)))
    after_cluster = pulumi.ResourceOptions(depends_on=[network, cluster])
    for slice_config in config.slices:
        if slice_config.in_cluster:
            pools = PoolsArgs(
                config=config,
                slice_config=slice_config,
                cluster=cluster.name,
                zone=config.gke.zone,
                nodes=cluster.nodes,
                observed=observed,
                hooks=hooks,
            )
            Pools(slice_config.name, pools, after_cluster)
    return cluster


def _file_server(
    config: Config, nfs: NfsConfig, network: Network, opts: pulumi.ResourceOptions
) -> GatewayServer | Filestore:
    if nfs.kind == "filestore":
        return Filestore("filestore", FilestoreArgs(config=config, nfs=nfs, network=network.network), opts)
    return GatewayServer("gateway", config, nfs, opts)


def _storage(config: Config, share: startup.TpuHost | None) -> inventory.Storage:
    return inventory.Storage(
        bucket_url=f"gs://{config.bucket.name}" if config.bucket else None,
        bucket_region=config.bucket.region if config.bucket else None,
        nfs_source=f"{share.server}:{share.export}" if share else None,
        nfs_mount=share.mount if share else None,
    )
