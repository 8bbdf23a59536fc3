"""One slice: its disks, the queued resource, node or instances that it is, and what the inventory says of it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pulumi
from pulumi_gcp import compute, tpu

from contracts import inventory
from infra import catalogue, naming, startup
from infra.compute import instances
from infra.compute_slice import ComputeSlice, ComputeSliceArgs, SliceRemains
from infra.config import Config, DataDisk, SliceConfig
from infra.iam import LOG_IN_METADATA
from infra.node_workers import NodeWorkers, NodeWorkersArgs
from infra.queued_resource import DataDiskArgs, QueuedResource, QueuedResourceArgs, SliceArgs, input_props
from infra.slice_apis.slice_api import MODES, SCOPES
from infra.slice_apis.workers import inventory_hosts

IN_FLIGHT_S = 30
"""When its time is over, the gcp provider gives a request in flight so much longer, and one that is refused because a
quota is used up (HTTP 429), and asked again and again, is in flight all the time."""

LONGEST_SUFFIX = 8
"""What a group puts behind its name to call an instance, at most."""

FIRST_WORD_S = 120.0
"""A node of one host is there in about a minute; a large slice in a few."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuSliceArgs:
    """slice_config: the slice's part of `config`.

    network, subnetworks (by region): full names. tag: what the firewall knows the hosts by. share: what they mount;
    None: nothing.
    lease_url: of the slice's lease. store_url: where stock-outs and deletions are remembered. None: there is no bucket.
    """

    config: Config
    slice_config: SliceConfig
    network: pulumi.Input[str]
    subnetworks: Mapping[str, pulumi.Input[str]]
    tag: str
    service_account: pulumi.Input[str]
    share: pulumi.Input[startup.TpuHost] | None
    lease_url: str | None = None
    store_url: str | None = None


class TpuSlice(pulumi.ComponentResource):
    """`entry` is what the inventory says of it, `vacant` the same without hosts, which is known before it is made.

    It is made in three steps: first its `disks`; then, by `prepare`, what is free of charge and must outlive it, its
    `templates`; then, by `ask`, what has a price. inputs: of what waits for capacity; None where it is a node.
    """

    entry: pulumi.Output[inventory.Slice]
    vacant: inventory.Slice
    inputs: pulumi.Output[dict[str, Any]] | None = None
    templates: tuple[pulumi.Resource, ...] = ()

    def __init__(
        self, config: Config, slice_config: SliceConfig, opts: pulumi.ResourceOptions | None = None
    ) -> None:
        super().__init__("tpu-stack:slices:TpuSlice", slice_config.name, {}, opts)
        self.disks = {
            disk.name: _disk(config, slice_config, disk, self)
            for disk in slice_config.data_disks
            if disk.source is None
        }

    def prepare(self, args: TpuSliceArgs, after: Sequence[pulumi.Resource]) -> None:
        """Make the templates and policies of a slice on Compute Engine. after: what is made before them."""
        slice_config = args.slice_config
        self._args = args
        self.vacant = entry(slice_config, f"{_kind(slice_config)} {_node_id(args)}", [])
        if slice_config.on_compute:
            compute_args = _on_compute(args, self)
            opts = pulumi.ResourceOptions(parent=self, depends_on=after)
            stack, regions = args.config.stack, slice_config.regions
            subnetworks = {region: args.subnetworks[region] for region in regions}
            templates = instances.templates(stack, slice_config.name, compute_args, subnetworks, opts)
            policies = (
                instances.policies(stack, slice_config.name, compute_args, regions, opts)
                if slice_config.accelerator.hosts > 1
                else {}
            )
            self.templates = (*templates.values(), *policies.values())
            self._compute_args = dataclasses.replace(
                compute_args,
                templates={region: template.self_link for region, template in templates.items()},
                policies={region: policy.self_link for region, policy in policies.items()} or None,
            )

    def ask(self, owner: pulumi.Input[str], after: Sequence[pulumi.Resource]) -> None:
        """Make the queued resource, the node or the instances.

        owner: the id that tells this stack's from others'. after: what is made before it.
        """
        slice_config = self._args.slice_config
        if slice_config.provisioning == "direct":
            workers = _direct(self._args, owner, self, after)
            outputs = pulumi.Output.all(nodes=[{"workers": workers.workers}], created="")
        else:
            requested = self._requested(owner, after)
            outputs = pulumi.Output.all(
                nodes=requested.nodes,
                created=requested.create_time,
                active_at=requested.active_at,
                zone=requested.zone,
                ends_at=requested.ends_at,
            )
        self.entry = outputs.apply(
            lambda outputs: entry(
                slice_config,
                self.vacant.origin,
                outputs["nodes"],
                zone=outputs.get("zone"),
                moments={name: outputs.get(name) or "" for name in inventory.MOMENTS},
            )
        )
        self.register_outputs({})

    def _requested(
        self, owner: pulumi.Input[str], after: Sequence[pulumi.Resource]
    ) -> QueuedResource | ComputeSlice:
        """Make what waits for capacity, and keep its inputs."""
        name = self._args.slice_config.name
        if self._args.slice_config.on_compute:
            compute_args = dataclasses.replace(self._compute_args, owner=owner)
            return ComputeSlice(name, compute_args, self._after_remains(name, compute_args, after))
        queued_args = _asked_for(self._args, owner, self)
        return QueuedResource(name, queued_args, self._after_remains(name, queued_args, after))

    def _after_remains(
        self, name: str, slice_args: SliceArgs, after: Sequence[pulumi.Resource]
    ) -> pulumi.ResourceOptions:
        self.inputs = pulumi.Output.from_input(input_props(slice_args))
        remains = SliceRemains(name, slice_args, pulumi.ResourceOptions(parent=self, depends_on=after))
        return pulumi.ResourceOptions(parent=self, depends_on=[*after, remains])


def _kind(slice_config: SliceConfig) -> str:
    """The kind of the slice's origin in the inventory."""
    if slice_config.on_compute:
        return "instance" if slice_config.accelerator.hosts == 1 else "group"
    return "queued-resource" if slice_config.provisioning == "queued" else "node"


def _common(args: TpuSliceArgs, owner: pulumi.Input[str], parent: TpuSlice) -> SliceArgs:
    """Return what the two APIs call the same."""
    slice_config = args.slice_config
    has_more_zones = bool(slice_config.more_zones)
    subnetworks = {zone: args.subnetworks[catalogue.zone_region(zone)] for zone in slice_config.zones}
    return SliceArgs(
        project=args.config.project,
        owner=owner,
        zone=slice_config.zone,
        capacity=slice_config.capacity,
        reservation_name=slice_config.reservation,
        run_duration_s=slice_config.run_duration_s,
        valid_until_s=slice_config.valid_until_s,
        wait_s=slice_config.wait_s,
        network=args.network,
        subnetwork=None if has_more_zones else subnetworks[slice_config.zone],
        external_addresses=args.config.network.external_addresses,
        service_account_email=args.service_account,
        metadata=_metadata(args),
        labels=_labels(args.config, slice_config),
        tags=[args.tag],
        data_disks=[
            DataDiskArgs(source_disk=_source(disk, parent), mode=disk.mode)
            for disk in slice_config.data_disks
        ],
        boot_disk_kms_key=slice_config.boot_disk_kms_key,
        description=_description(args),
        lease_url=args.lease_url,
        store_url=args.store_url,
        zones=list(slice_config.zones) if has_more_zones else None,
        strategy=slice_config.strategy if has_more_zones else None,
        zone_wait_s=slice_config.zone_wait_s if has_more_zones else None,
        subnetworks=subnetworks if has_more_zones else None,
    )


def _asked_for(args: TpuSliceArgs, owner: pulumi.Input[str], parent: TpuSlice) -> QueuedResourceArgs:
    accelerator = args.slice_config.accelerator
    by_name = accelerator.has_default_topology
    return QueuedResourceArgs(
        queued_resource_id=_node_id(args),
        accelerator_type=accelerator.type_name if by_name else None,
        accelerator_generation=None if by_name else accelerator.generation.api_name,
        topology=None if by_name else accelerator.topology,
        runtime_version=args.slice_config.runtime_version,
        node_count=args.slice_config.count,
        guaranteed_s=args.slice_config.guaranteed_s,
        **vars(_common(args, owner, parent)),
    )


def _on_compute(args: TpuSliceArgs, parent: TpuSlice) -> ComputeSliceArgs:
    """What a slice is asked for with, without owner, templates and policies."""
    slice_config, accelerator = args.slice_config, args.slice_config.accelerator
    machine_type, boot_disk_type = accelerator.machine_type, slice_config.boot_disk_type
    assert machine_type and boot_disk_type, "the catalogue has both of all that Compute Engine offers"
    return ComputeSliceArgs(
        slice_id=_node_id(args),
        accelerator_type=accelerator.type_name,
        generation=accelerator.generation.name,
        topology=accelerator.topology,
        machine_type=machine_type,
        hosts=accelerator.hosts,
        count=slice_config.count,
        reservation_bound=slice_config.reservation_bound,
        image=slice_config.image,
        boot_disk_gib=slice_config.boot_disk_gib,
        boot_disk_type=boot_disk_type,
        **vars(_common(args, "", parent)),
    )


def _direct(
    args: TpuSliceArgs, owner: pulumi.Input[str], parent: TpuSlice, after: Sequence[pulumi.Resource]
) -> NodeWorkers:
    slice_config, name = args.slice_config, args.slice_config.name
    node_id = _node_id(args)
    by_name = slice_config.accelerator.has_default_topology
    node = tpu.V2Vm(
        name,
        name=node_id,
        project=args.config.project,
        zone=slice_config.zone,
        accelerator_type=slice_config.accelerator.type_name if by_name else None,
        accelerator_config=None
        if by_name
        else tpu.V2VmAcceleratorConfigArgs(
            type=slice_config.accelerator.generation.api_name, topology=slice_config.accelerator.topology
        ),
        runtime_version=slice_config.runtime_version,
        description=_description(args),
        # Google shows nothing of an on-demand node; a block that is sent empty would replace it at every `up`.
        scheduling_config=tpu.V2VmSchedulingConfigArgs(spot=True)
        if slice_config.capacity == "spot"
        else None,
        network_config=tpu.V2VmNetworkConfigArgs(
            network=args.network,
            subnetwork=args.subnetworks[slice_config.region],
            enable_external_ips=args.config.network.external_addresses,
        ),
        service_account=tpu.V2VmServiceAccountArgs(email=args.service_account, scopes=list(SCOPES)),
        metadata=_metadata(args),
        labels=pulumi.Output.from_input(owner).apply(
            lambda owner: {**_labels(args.config, slice_config), naming.OWNER_LABEL: owner}
        ),
        tags=[args.tag],
        data_disks=[
            tpu.V2VmDataDiskArgs(source_disk=_source(disk, parent), mode=MODES[disk.mode])
            for disk in slice_config.data_disks
        ],
        opts=pulumi.ResourceOptions(
            parent=parent,
            depends_on=after,
            # The name is fixed, so that a create that failed is not made again beside its remains.
            delete_before_replace=True,
            custom_timeouts=pulumi.CustomTimeouts(create=f"{slice_config.wait_s - IN_FLIGHT_S}s"),
        ),
    )
    full_name = f"projects/{args.config.project}/locations/{slice_config.zone}/nodes/{node_id}"
    _watch_direct(node, full_name, functools.partial(pulumi.log.warn, resource=parent))
    return NodeWorkers(
        name,
        NodeWorkersArgs(
            project=args.config.project,
            zone=slice_config.zone,
            node_id=node.name,
            incarnation=node.network_endpoints.apply(_addresses),
        ),
        # A node that was made again has the same name, and may have the same addresses, but other workers.
        pulumi.ResourceOptions(parent=parent, replace_with=[node]),
    )


def _watch_direct(node: pulumi.CustomResource, named: str, say: Callable[[str], None]) -> None:
    """While a direct `node` is being made, say every FIRST_WORD_S what it may be waiting for.

    The gcp provider itself says nothing: when the Cloud TPU API answers 429 because a quota is used up, it asks again
    and again, with growing pauses, until the time limit of the resource is over. That looks like a TPU that is slow.

    named: the node's full name, projects/P/locations/Z/nodes/N.
    """
    if pulumi.runtime.is_dry_run():
        return
    # In the program's own loop, which goes on until the engine has made everything.
    task = asyncio.ensure_future(_speak_while_made(node, named, say))
    task.add_done_callback(lambda done: done.cancelled() or done.result())


async def _speak_while_made(node: pulumi.CustomResource, named: str, say: Callable[[str], None]) -> None:
    node_id = asyncio.ensure_future(node.id.future())
    waited_s = 0.0
    while not (await asyncio.wait({node_id}, timeout=FIRST_WORD_S))[0]:
        waited_s += FIRST_WORD_S
        say(still_waiting(named, waited_s))
    # Its failure is the engine's to tell.
    _ = node_id.cancelled() or node_id.exception()


def still_waiting(named: str, waited_s: float) -> str:
    """The message after so long a wait, with the two commands that show the cause."""
    _, project, _, zone, _, node = named.split("/")
    return (
        f"{named} is not ready after {waited_s / 60:.0f} min. If "
        f"`gcloud compute tpus tpu-vm describe {node} --project={project} --zone={zone}` finds it, it is being made. "
        "If not, the request is refused and asked again in silence, as a rule because the quota is used up (HTTP 429): "
        f"compare https://console.cloud.google.com/iam-admin/quotas?project={project}, Ctrl-C, and free some, ask for "
        "more, or set provisioning: queued, which says so at once"
    )


def _node_id(args: TpuSliceArgs) -> str:
    # The nodes of a multislice have their numbers, up to -255, behind it, and the instances of a group theirs.
    longest = naming.LONGEST - (4 if args.slice_config.count > 1 else 0)
    longest -= LONGEST_SUFFIX if args.slice_config.on_compute else 0
    return naming.resource_name(args.config.stack, args.slice_config.name, longest=longest)


def _addresses(endpoints: Sequence[tpu.outputs.V2VmNetworkEndpoint] | None) -> str:
    return " ".join(endpoint.ip_address or "" for endpoint in endpoints or ())


def _source(disk: DataDisk, parent: TpuSlice) -> pulumi.Input[str]:
    """The full name of an existing disk, or of the one that is made with the slice."""
    return disk.source if disk.source is not None else parent.disks[disk.name].id


def _disk(config: Config, slice_config: SliceConfig, disk: DataDisk, parent: TpuSlice) -> compute.Disk:
    return compute.Disk(
        f"{slice_config.name}-{disk.name}",
        name=naming.resource_name(config.stack, slice_config.name, disk.name),
        project=config.project,
        zone=slice_config.zone,
        type=disk.disk_type,
        size=disk.size_gib,
        labels=_labels(config, slice_config),
        opts=pulumi.ResourceOptions(parent=parent, protect=config.protect),
    )


def _metadata(args: TpuSliceArgs) -> dict[str, pulumi.Input[str]]:
    metadata: dict[str, pulumi.Input[str]] = dict(LOG_IN_METADATA)
    if args.slice_config.on_compute:
        hosts = args.slice_config.accelerator.hosts
        metadata["startup-script"] = pulumi.Output.from_input(args.share).apply(
            lambda share: startup.compute_host_script(share, hosts)
        )
    elif args.share is not None:
        share = pulumi.Output.from_input(args.share)
        metadata["startup-script"] = share.apply(startup.tpu_host_script)
    return metadata


def _labels(config: Config, slice_config: SliceConfig) -> dict[str, str]:
    return {**slice_config.labels, **naming.labels(config.stack, slice_name=slice_config.name)}


def _description(args: TpuSliceArgs) -> str:
    return f"Slice {args.slice_config.name} of tpu-stack {args.config.stack}"


def entry(
    slice_config: SliceConfig,
    origin: str,
    nodes: Sequence[Mapping[str, Any]],
    zone: str | None = None,
    moments: Mapping[str, Any] = MappingProxyType({}),
) -> inventory.Slice:
    """The slice as the inventory has it.

    zone: where it is, of one that may be in several. moments: those of `inventory.MOMENTS` that are known.
    nodes: each with its `workers` in worker order, as `infra.node_workers` describes them; none while it is queued.
    """
    return inventory.Slice(
        name=slice_config.name,
        accelerator_type=slice_config.accelerator.type_name,
        generation=slice_config.accelerator.generation.name,
        topology=slice_config.accelerator.topology,
        zone=zone or slice_config.zone,
        capacity=slice_config.capacity,
        origin=origin,
        count=slice_config.count,
        devices_per_host=slice_config.accelerator.devices_per_host,
        hosts=inventory_hosts(nodes),
        **moments,
        zones=slice_config.zones if slice_config.more_zones else (),
    )
