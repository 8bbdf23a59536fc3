"""What a slice on Compute Engine is made from: an instance template and, of several hosts, a placement policy a region.

Both are free of charge, immutable and made at once, so they are pulumi-gcp's resources; what waits and is lost is
`infra.compute_slice`. The name of a template ends in a digest of what is in it: a changed one is made before the old
one is deleted, and the slice is told in between.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pulumi
from pulumi_gcp import compute

from infra import naming
from infra.compute_slice import ComputeSliceArgs
from infra.queued_resource import input_props
from infra.slice_apis.slice_api import MODES, SCOPES

NOT_IN_TEMPLATES = frozenset(
    {
        "api",
        "zone",
        "zones",
        "slice_id",
        "hosts",
        "count",
        "topology",
        "templates",
        "policies",
        "valid_until_s",
    }
    | {"wait_s", "strategy", "zone_wait_s", "lease_url", "store_url", "description"}
)
MODELS = {"on-demand": "STANDARD", "spot": "SPOT", "flex-start": "FLEX_START"}
RESERVATION_KEY = "compute.googleapis.com/reservation-name"
DIGEST = 8


def templates(
    stack: str,
    name: str,
    args: ComputeSliceArgs,
    subnetworks: Mapping[str, pulumi.Input[str]],
    opts: pulumi.ResourceOptions,
) -> dict[str, compute.RegionInstanceTemplate]:
    """Declare the templates of a slice's instances; return them by region.

    name: the slice's. subnetworks: by region, of every region in which it may be.
    """
    contents = {key: value for key, value in input_props(args).items() if key not in NOT_IN_TEMPLATES}
    named = pulumi.Output.from_input(contents).apply(lambda contents: _template_name(stack, name, contents))
    return {
        region: compute.RegionInstanceTemplate(
            f"{name}-{region}",
            name=named,
            project=args.project,
            region=region,
            description=args.description,
            machine_type=args.machine_type,
            disks=_disks(args),
            network_interfaces=[
                compute.RegionInstanceTemplateNetworkInterfaceArgs(
                    subnetwork=subnetwork,
                    nic_type="GVNIC",
                    access_configs=[compute.RegionInstanceTemplateNetworkInterfaceAccessConfigArgs()]
                    if args.external_addresses
                    else None,
                )
            ],
            service_account=compute.RegionInstanceTemplateServiceAccountArgs(
                email=args.service_account_email, scopes=list(SCOPES)
            ),
            metadata=args.metadata,
            # Without the owner's: what interrupted ones have left behind is deleted by its owner while it still
            # uses a template, so templates are made before the owner is known, and deleted after all else.
            labels=args.labels,
            tags=list(args.tags),
            scheduling=_scheduling(args),
            reservation_affinity=_reservation(args),
            opts=opts,
        )
        for region, subnetwork in subnetworks.items()
    }


def policies(
    stack: str, name: str, args: ComputeSliceArgs, regions: Sequence[str], opts: pulumi.ResourceOptions
) -> dict[str, compute.ResourcePolicy]:
    """Declare the policies that wire the hosts of a slice together; return them by region."""
    return {
        region: compute.ResourcePolicy(
            f"{name}-{region}",
            # The topology is in the name, as another policy is made before this one is deleted.
            name=naming.resource_name(stack, name, str(args.topology)),
            project=args.project,
            region=region,
            description=args.description,
            workload_policy=compute.ResourcePolicyWorkloadPolicyArgs(
                type="HIGH_THROUGHPUT", accelerator_topology=args.topology
            ),
            opts=opts,
        )
        for region in regions
    }


def _template_name(stack: str, name: str, contents: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:DIGEST]
    return f"{naming.resource_name(stack, name, longest=naming.LONGEST - DIGEST - 1)}-{digest}"


def _disks(args: ComputeSliceArgs) -> list[compute.RegionInstanceTemplateDiskArgs]:
    boot_disk = compute.RegionInstanceTemplateDiskArgs(
        boot=True,
        auto_delete=True,
        source_image=args.image,
        disk_type=args.boot_disk_type,
        disk_size_gb=args.boot_disk_gib,
        disk_encryption_key=compute.RegionInstanceTemplateDiskDiskEncryptionKeyArgs(
            kms_key_self_link=args.boot_disk_kms_key
        )
        if args.boot_disk_kms_key
        else None,
    )
    data_disks = [
        compute.RegionInstanceTemplateDiskArgs(
            boot=False,
            auto_delete=False,
            # A template has the names of disks: instances find them in their own zone.
            source=pulumi.Output.from_input(disk.source_disk).apply(lambda source: source.rpartition("/")[2]),
            mode=MODES[disk.mode],
        )
        for disk in args.data_disks
    ]
    return [boot_disk, *data_disks]


def _scheduling(args: ComputeSliceArgs) -> compute.RegionInstanceTemplateSchedulingArgs:
    """TPUs cannot be migrated. What ends by itself, or is preempted, is deleted: stopped, its disks would be billed."""
    model = "RESERVATION_BOUND" if args.reservation_bound else MODELS.get(str(args.capacity), "STANDARD")
    is_spot = model == "SPOT"
    has_end = model != "STANDARD" or args.run_duration_s is not None
    return compute.RegionInstanceTemplateSchedulingArgs(
        provisioning_model=model,
        preemptible=is_spot,
        automatic_restart=model in ("STANDARD", "RESERVATION_BOUND"),
        on_host_maintenance="TERMINATE",
        instance_termination_action="DELETE" if has_end else None,
        max_run_duration=compute.RegionInstanceTemplateSchedulingMaxRunDurationArgs(
            seconds=args.run_duration_s
        )
        if args.run_duration_s is not None
        else None,
    )


def _reservation(args: ComputeSliceArgs) -> compute.RegionInstanceTemplateReservationAffinityArgs | None:
    """flex-start and spot take none: what Google reserved for somebody is not theirs to use."""
    if args.reservation_name is None:
        if args.capacity == "on-demand":
            return None
        return compute.RegionInstanceTemplateReservationAffinityArgs(type="NO_RESERVATION")
    _, project, *_, name = str(args.reservation_name).split("/")
    return compute.RegionInstanceTemplateReservationAffinityArgs(
        type="SPECIFIC_RESERVATION",
        specific_reservation=compute.RegionInstanceTemplateReservationAffinitySpecificReservationArgs(
            key=RESERVATION_KEY,
            values=[name if project == args.project else f"projects/{project}/reservations/{name}"],
        ),
    )
