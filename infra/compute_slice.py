"""A slice of TPUs that Compute Engine makes, as a Pulumi resource: zonal groups of instances, or single instances.

A dynamic provider of our own because what has to wait, be lost and be made again is the same as for a queued resource
(`infra.queued_resource`): the provider's part is shared with it, and `infra.slice_apis.lifecycles` chooses what serves
it. The instance templates and placement policies, which are free of charge and never wait, are pulumi-gcp's
(`infra.slices`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, DiffResult, ReadResult, Resource, UpdateResult

from contracts.aliases import Json
from infra.queued_resource import OUTPUTS, QueuedResourceProvider, SliceArgs, changes_between, input_props
from infra.slice_apis import plugin

REPLACING = (
    "project", "zone", "slice_id", "owner", "accelerator_type", "generation", "topology", "machine_type", "hosts",
    "count", "capacity", "reservation_name", "reservation_bound", "run_duration_s", "image", "boot_disk_gib",
    "boot_disk_type", "boot_disk_kms_key", "data_disks", "network", "subnetwork", "external_addresses",
    "service_account_email",
)  # fmt: skip
IN_PLACE = frozenset(
    {"labels", "metadata", "tags", "description", "templates", "policies", "wait_s", "lease_url"}
    | {"zones", "subnetworks", "strategy", "zone_wait_s", "store_url"}
)
"""Instances take labels, metadata and tags while they run; a new template is for those that are made later."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeSliceArgs(SliceArgs):
    """The inputs of a slice on Compute Engine.

    slice_id: the name of the instance of a slice of one host, or of the group of a larger one; with a `count`, of
    slice_id-0, slice_id-1, ….
    accelerator_type, such as v6e-16; generation and topology as the catalogue has them; hosts: instances of each of
    the `count` slices.
    reservation_name: projects/P/locations/Z/reservations/R. reservation_bound: of a reserved one, whether it ends with
    its reservation.
    templates, policies: by region, URLs of the instance template and of the placement policy; none of one host.
    What the templates have (image, disks, network, labels, …) is here too, so that a change of it shows.
    """

    slice_id: pulumi.Input[str]
    accelerator_type: pulumi.Input[str]
    generation: pulumi.Input[str]
    topology: pulumi.Input[str]
    machine_type: pulumi.Input[str]
    hosts: pulumi.Input[int]
    image: pulumi.Input[str]
    boot_disk_gib: pulumi.Input[int]
    boot_disk_type: pulumi.Input[str]
    api: str = "compute"
    count: pulumi.Input[int] = 1
    reservation_bound: pulumi.Input[bool] = False
    templates: Mapping[str, pulumi.Input[str]] = dataclasses.field(default_factory=dict)
    policies: Mapping[str, pulumi.Input[str]] | None = None


class ComputeSliceProvider(QueuedResourceProvider):
    """The provider that the engine calls."""

    def diff(self, _id: str, _olds: Json, _news: Json) -> DiffResult:
        return changes_between(_olds, _news, replacing=REPLACING, in_place=IN_PLACE)


class ComputeSlice(Resource, module="tpu_stack", name="ComputeSlice"):
    """state: WAITING, ACTIVE, or how it was lost. nodes: by number, as of a queued resource.

    ends_at: when Google deletes it by itself (RFC 3339); "" where it never does. zone: where it is, or waits.
    """

    zone: pulumi.Output[str]
    state: pulumi.Output[str]
    nodes: pulumi.Output[list[dict[str, Any]]]
    create_time: pulumi.Output[str]
    active_at: pulumi.Output[str]
    ends_at: pulumi.Output[str]

    def __init__(self, name: str, args: ComputeSliceArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__(ComputeSliceProvider(), name, input_props(args) | dict.fromkeys(OUTPUTS), opts)


class SliceRemainsProvider(QueuedResourceProvider):
    """Makes nothing, and deletes what there is of a slice when Pulumi's state no longer has it."""

    def diff(self, _id: str, _olds: Json, _news: Json) -> DiffResult:
        names = {*_olds, *_news} - {"__provider"}
        return DiffResult(changes=any(_olds.get(name) != _news.get(name) for name in names))

    def create(self, props: Json) -> CreateResult:
        return CreateResult(str(props.get("slice_id") or props["queued_resource_id"]), props)

    def read(self, id_: str, props: Json) -> ReadResult:
        return ReadResult(id_, props)

    def update(self, _id: str, _olds: Json, _news: Json) -> UpdateResult:
        return UpdateResult(_news)

    def delete(self, _id: str, _props: Json) -> None:
        """Where a zone cannot be asked, this is said at once: hardly ever is there anything."""
        with plugin.plain_errors():
            self._lifecycle(_props).require_reachable(_props)
        super().delete(_id, _props)


class SliceRemains(Resource, module="tpu_stack", name="SliceRemains"):
    """What a slice of either API may leave that is in no state: an interrupted `pulumi up` has asked for it, or the
    keeper has made it again after a refresh had dropped it.

    The slice depends on it, so it is deleted after the slice, and also where the state has no slice; and before what
    a slice is made from, which cannot be deleted while something uses it.
    """

    def __init__(self, name: str, args: SliceArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__(SliceRemainsProvider(), name, input_props(args), opts)
