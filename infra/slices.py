"""One slice: its disks, the queued resource or the node that it is, and what the inventory says of it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pulumi
from pulumi_gcp import compute, tpu

from contracts import inventory
from infra import catalogue, naming, startup
from infra.cloud_tpu.request import MODES, SCOPES
from infra.cloud_tpu.workers import hosts_of
from infra.config import Config, DataDisk, SliceConfig
from infra.iam import LOG_IN_METADATA
from infra.node_workers import NodeWorkers, NodeWorkersArgs
from infra.queued_resource import DataDiskArgs, QueuedResource, QueuedResourceArgs, inputs_of

IN_FLIGHT_S = 30
"""When its time is over, the gcp provider gives a request in flight so much longer, and one that is refused because a
quota is used up (HTTP 429), and asked again and again, is in flight all the time."""

FIRST_WORD_S = 120.0
"""A node of one host is there in about a minute; a large slice in a few."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuSliceArgs:
    """asked: the slice's own part of `config`. owner: the id that tells this stack's queued resources from others'.

    network, subnetworks (by region): full names. tag: what the firewall knows the hosts by. share: what they mount;
    None: nothing.
    lease_url: of the slice's lease. store_url: where stock-outs are remembered. None: the stack has no bucket.
    """

    config: Config
    asked: SliceConfig
    owner: pulumi.Input[str]
    network: pulumi.Input[str]
    subnetworks: Mapping[str, pulumi.Input[str]]
    tag: str
    service_account: pulumi.Input[str]
    share: pulumi.Input[startup.TpuHost] | None
    lease_url: str | None = None
    store_url: str | None = None


class TpuSlice(pulumi.ComponentResource):
    """`entry` is what the inventory says of it, `vacant` the same without hosts, which is known before it is made.

    It is made in two steps: first its `disks`, then, by `ask`, all else. inputs: of the queued resource; None where it
    is a node.
    """

    entry: pulumi.Output[inventory.Slice]
    vacant: inventory.Slice
    inputs: pulumi.Output[dict[str, Any]] | None = None

    def __init__(
        self, config: Config, asked: SliceConfig, opts: pulumi.ResourceOptions | None = None
    ) -> None:
        super().__init__("tpu-stack:slices:TpuSlice", asked.name, {}, opts)
        self.disks = {
            disk.name: _disk(config, asked, disk, self) for disk in asked.data_disks if disk.source is None
        }

    def ask(self, args: TpuSliceArgs, after: Sequence[pulumi.Resource]) -> None:
        """Make the queued resource or the node. after: what is made before it."""
        name = args.asked.name
        kind = "queued-resource" if args.asked.provisioning == "queued" else "node"
        self.vacant = entry(args.asked, f"{kind} {_node_id(args)}", [])
        if args.asked.provisioning == "queued":
            asked = _asked_for(args, self)
            queued = QueuedResource(name, asked, pulumi.ResourceOptions(parent=self, depends_on=after))
            self.inputs = pulumi.Output.from_input(inputs_of(asked))
            found = pulumi.Output.all(nodes=queued.nodes, created=queued.create_time, zone=queued.zone)
        else:
            made = _direct(args, self, after)
            found = pulumi.Output.all(nodes=[{"workers": made.workers}], created="")
        self.entry = found.apply(
            lambda it: entry(
                args.asked, self.vacant.origin, it["nodes"], it.get("created") or "", it.get("zone")
            )
        )
        self.register_outputs({})


def _asked_for(args: TpuSliceArgs, parent: TpuSlice) -> QueuedResourceArgs:
    asked = args.asked
    by_name = asked.accelerator.has_default_topology
    several = bool(asked.more_zones)
    subnetworks = {zone: args.subnetworks[catalogue.region_of(zone)] for zone in asked.zones}
    return QueuedResourceArgs(
        project=args.config.project,
        zone=asked.zone,
        queued_resource_id=_node_id(args),
        owner=args.owner,
        accelerator_type=asked.accelerator.type_name if by_name else None,
        accelerator_generation=None if by_name else asked.accelerator.generation.name.upper(),
        topology=None if by_name else asked.accelerator.topology,
        runtime_version=asked.runtime_version,
        capacity=asked.capacity,
        reservation_name=asked.reservation,
        node_count=asked.count,
        guaranteed_s=asked.guaranteed_s,
        valid_until_s=asked.valid_until_s,
        wait_s=asked.wait_s,
        network=args.network,
        subnetwork=None if several else subnetworks[asked.zone],
        external_addresses=args.config.network.external_addresses,
        service_account_email=args.service_account,
        metadata=_metadata(args),
        labels=_labels(args.config, asked),
        tags=[args.tag],
        data_disks=[
            DataDiskArgs(source_disk=_source(disk, parent), mode=disk.mode) for disk in asked.data_disks
        ],
        boot_disk_kms_key=asked.boot_disk_kms_key,
        description=_description(args),
        lease_url=args.lease_url,
        store_url=args.store_url,
        zones=list(asked.zones) if several else None,
        strategy=asked.strategy if several else None,
        zone_wait_s=asked.zone_wait_s if several else None,
        subnetworks=subnetworks if several else None,
    )


def _direct(args: TpuSliceArgs, parent: TpuSlice, after: Sequence[pulumi.Resource]) -> NodeWorkers:
    asked, name = args.asked, args.asked.name
    node_id = _node_id(args)
    by_name = asked.accelerator.has_default_topology
    node = tpu.V2Vm(
        name,
        name=node_id,
        project=args.config.project,
        zone=asked.zone,
        accelerator_type=asked.accelerator.type_name if by_name else None,
        accelerator_config=None
        if by_name
        else tpu.V2VmAcceleratorConfigArgs(
            type=asked.accelerator.generation.name.upper(), topology=asked.accelerator.topology
        ),
        runtime_version=asked.runtime_version,
        description=_description(args),
        # Google shows nothing of an on-demand node; a block that is sent empty would replace it at every `up`.
        scheduling_config=tpu.V2VmSchedulingConfigArgs(spot=True) if asked.capacity == "spot" else None,
        network_config=tpu.V2VmNetworkConfigArgs(
            network=args.network,
            subnetwork=args.subnetworks[asked.region],
            enable_external_ips=args.config.network.external_addresses,
        ),
        service_account=tpu.V2VmServiceAccountArgs(email=args.service_account, scopes=list(SCOPES)),
        metadata=_metadata(args),
        labels=pulumi.Output.from_input(args.owner).apply(
            lambda owner: {**_labels(args.config, asked), naming.OWNER_LABEL: owner}
        ),
        tags=[args.tag],
        data_disks=[
            tpu.V2VmDataDiskArgs(source_disk=_source(disk, parent), mode=MODES[disk.mode])
            for disk in asked.data_disks
        ],
        opts=pulumi.ResourceOptions(
            parent=parent,
            depends_on=after,
            # The name is fixed, so that a create that failed is not made again beside its remains.
            delete_before_replace=True,
            custom_timeouts=pulumi.CustomTimeouts(create=f"{asked.wait_s - IN_FLIGHT_S}s"),
        ),
    )
    full_name = f"projects/{args.config.project}/locations/{asked.zone}/nodes/{node_id}"
    _watch_direct(node, full_name, functools.partial(pulumi.log.warn, resource=parent))
    return NodeWorkers(
        name,
        NodeWorkersArgs(
            project=args.config.project,
            zone=asked.zone,
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
    made = asyncio.ensure_future(node.id.future())
    waited_s = 0.0
    while not (await asyncio.wait({made}, timeout=FIRST_WORD_S))[0]:
        waited_s += FIRST_WORD_S
        say(still_waiting(named, waited_s))
    # Its failure is the engine's to tell.
    _ = made.cancelled() or made.exception()


def still_waiting(named: str, waited_s: float) -> str:
    """What a person should know after so long, with the two commands that tell the cases apart."""
    _, project, _, zone, _, node = named.split("/")
    return (
        f"{named} is not ready after {waited_s / 60:.0f} min. If "
        f"`gcloud compute tpus tpu-vm describe {node} --project={project} --zone={zone}` finds it, it is being made. "
        "If not, the request is refused and asked again in silence, as a rule because the quota is used up (HTTP 429): "
        f"compare https://console.cloud.google.com/iam-admin/quotas?project={project}, Ctrl-C, and free some, ask for "
        "more, or set provisioning: queued, which says so at once"
    )


def _node_id(args: TpuSliceArgs) -> str:
    # The nodes of a multislice have their numbers, up to -255, behind it.
    longest = naming.LONGEST - (4 if args.asked.count > 1 else 0)
    return naming.resource_name(args.config.stack, args.asked.name, longest=longest)


def _addresses(endpoints: Sequence[tpu.outputs.V2VmNetworkEndpoint] | None) -> str:
    return " ".join(each.ip_address or "" for each in endpoints or ())


def _source(disk: DataDisk, of: TpuSlice) -> pulumi.Input[str]:
    """The full name of a disk that is there, or of one that is made."""
    return disk.source if disk.source is not None else of.disks[disk.name].id


def _disk(config: Config, asked: SliceConfig, disk: DataDisk, parent: TpuSlice) -> compute.Disk:
    return compute.Disk(
        f"{asked.name}-{disk.name}",
        name=naming.resource_name(config.stack, asked.name, disk.name),
        project=config.project,
        zone=asked.zone,
        type=disk.disk_type,
        size=disk.size_gib,
        labels=_labels(config, asked),
        opts=pulumi.ResourceOptions(parent=parent, protect=config.protect),
    )


def _metadata(args: TpuSliceArgs) -> dict[str, pulumi.Input[str]]:
    metadata: dict[str, pulumi.Input[str]] = dict(LOG_IN_METADATA)
    if args.share is not None:
        share = pulumi.Output.from_input(args.share)
        metadata["startup-script"] = share.apply(startup.tpu_host_script)
    return metadata


def _labels(config: Config, asked: SliceConfig) -> dict[str, str]:
    return {**asked.labels, **naming.labels(config.stack, slice_name=asked.name)}


def _description(args: TpuSliceArgs) -> str:
    return f"Slice {args.asked.name} of tpu-stack {args.config.stack}"


def entry(
    asked: SliceConfig,
    origin: str,
    nodes: Sequence[Mapping[str, Any]],
    created: str = "",
    zone: str | None = None,
) -> inventory.Slice:
    """The slice as the inventory has it.

    zone: where it is, of one that may be in several.
    nodes: each with its `workers` in worker order, as `infra.node_workers` describes them; none while it is queued.
    """
    return inventory.Slice(
        name=asked.name,
        accelerator_type=asked.accelerator.type_name,
        generation=asked.accelerator.generation.name,
        topology=asked.accelerator.topology,
        zone=zone or asked.zone,
        capacity=asked.capacity,
        origin=origin,
        count=asked.count,
        devices_per_host=asked.accelerator.devices_per_host,
        hosts=hosts_of(nodes),
        created=created,
        zones=asked.zones if asked.more_zones else (),
    )
