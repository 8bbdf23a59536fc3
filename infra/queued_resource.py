"""A Cloud TPU queued resource as a Pulumi resource: a request for slices that waits until there is capacity.

A dynamic provider of our own because pulumi-gcp's V2QueuedResource knows neither spot nor reservations, does not wait,
and cannot delete an active one. It is pickled by reference, so the state holds a name and not code; what it does is
`infra.slice_apis.lifecycle`.

Lost slices: `pulumi refresh` finds one SUSPENDED, FAILED or PREEMPTED and writes that into `state`, and the next `up`
replaces it, remains first. Only one that is not there any more leaves Pulumi's state by a refresh.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import pulumi
from pulumi.dynamic import CreateResult, DiffResult, ReadResult, Resource, UpdateResult
from pulumi.runtime.rpc import contains_unknowns

from contracts.aliases import Json
from infra.documents import DocumentsError, MissingError, lease
from infra.slice_apis import lifecycles, plugin
from infra.slice_apis.lifecycle import Lifecycle
from infra.slice_apis.plugin import Provider
from infra.slice_apis.retry import CloudTpuError
from infra.slice_apis.slice_api import state_kind

OUTPUTS = ("state", "nodes", "create_time", "active_at", "ends_at")

# What nodes.patch takes, and what no request is needed for.
IN_PLACE = frozenset(
    {"labels", "metadata", "tags", "description", "external_addresses", "wait_s", "lease_url"}
    | {"zones", "subnetworks", "strategy", "zone_wait_s", "store_url"}
)
REPLACING = (
    "project", "zone", "queued_resource_id", "owner", "accelerator_type", "accelerator_generation", "topology",
    "runtime_version", "capacity", "reservation_name", "node_count", "guaranteed_s", "run_duration_s",
    "network", "subnetwork", "service_account_email", "data_disks", "boot_disk_kms_key",
)  # fmt: skip
TIMING = "valid_until_s"  # has done its part once the request was served


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataDiskArgs:
    """A disk that exists, by its full name; read-write for a single node only."""

    source_disk: pulumi.Input[str]
    mode: Literal["read-write", "read-only"] = "read-write"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceArgs:
    """The inputs of a slice that are the same whichever API makes it.

    owner: the stack's, from `infra.stack_identity`; what does not carry it is never touched.
    capacity: on-demand, spot, flex-start or reserved. run_duration_s: after how long Google takes it back; flex-start
    needs it. valid_until_s, wait_s: see `infra.config.SliceConfig`. wait_s is no deadline of the request.
    labels: without the owner's.
    lease_url: of the slice's lease (`infra.documents.lease.document_url`), where there is a place for it.
    zones, strategy, zone_wait_s: where it may be, `zone` the first of them, and how it gets to one, as
    `infra.slice_apis.zone_search` has it; subnetworks: by zone, in place of `subnetwork`.
    store_url: a folder of documents in which stock-outs and deletions are remembered (`infra.documents`).
    """

    project: pulumi.Input[str]
    zone: pulumi.Input[str]
    owner: pulumi.Input[str]
    capacity: pulumi.Input[str]
    wait_s: pulumi.Input[int]
    reservation_name: pulumi.Input[str] | None = None
    run_duration_s: pulumi.Input[int] | None = None
    valid_until_s: pulumi.Input[int] | None = None
    network: pulumi.Input[str] | None = None
    subnetwork: pulumi.Input[str] | None = None
    external_addresses: pulumi.Input[bool] = False
    service_account_email: pulumi.Input[str] | None = None
    metadata: Mapping[str, pulumi.Input[str]] = dataclasses.field(default_factory=dict)
    labels: Mapping[str, pulumi.Input[str]] = dataclasses.field(default_factory=dict)
    tags: Sequence[pulumi.Input[str]] = ()
    data_disks: Sequence[DataDiskArgs] = ()
    boot_disk_kms_key: pulumi.Input[str] | None = None
    description: pulumi.Input[str] | None = None
    lease_url: pulumi.Input[str] | None = None
    zones: Sequence[str] | None = None
    strategy: str | None = None
    zone_wait_s: pulumi.Input[int] | None = None
    subnetworks: Mapping[str, pulumi.Input[str]] | None = None
    store_url: pulumi.Input[str] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueuedResourceArgs(SliceArgs):
    """The inputs of a queued resource.

    accelerator_type, such as v6e-16; or accelerator_generation as the API writes it (V5LITE_POD) and topology.
    node_count: more than 1 is multislice, its nodes ID-0, ID-1, …
    """

    queued_resource_id: pulumi.Input[str]
    runtime_version: pulumi.Input[str]
    accelerator_type: pulumi.Input[str] | None = None
    accelerator_generation: pulumi.Input[str] | None = None
    topology: pulumi.Input[str] | None = None
    node_count: pulumi.Input[int] = 1
    guaranteed_s: pulumi.Input[int] | None = None


class QueuedResourceProvider(Provider):
    """The provider that the engine calls. The plugin's process makes it from its name, and configures it once."""

    def diff(self, _id: str, _olds: Json, _news: Json) -> DiffResult:
        return changes_between(_olds, _news)

    def create(self, props: Json) -> CreateResult:
        with self._exclusive(props, removed=False) as lifecycle:
            outputs = lifecycle.settled(lifecycle.create(props))
            zone = "-" if props.get("zones") else props["zone"]
            return CreateResult(lifecycle.name({**props, "zone": zone}), outputs)

    def read(self, id_: str, props: Json) -> ReadResult:
        with plugin.plain_errors():
            outputs = self._lifecycle(props).read(props)
            return ReadResult("", {}) if outputs is None else ReadResult(id_, outputs)

    def update(self, _id: str, _olds: Json, _news: Json) -> UpdateResult:
        # One whose stack has no bucket any more may still be in the hands of somebody who has found its lease there.
        now, before = _news.get("lease_url"), _olds.get("lease_url")
        with self._exclusive({**_news, "lease_url": now or before}, removed=not now) as lifecycle:
            return UpdateResult(lifecycle.settled(lifecycle.update(_olds, _news)))

    def delete(self, _id: str, _props: Json) -> None:
        """Delete the slice; without its lease if that is not available, as a slice costs money, and then once more."""
        say = self.require_session().backoff.say
        try:
            with self._exclusive(_props, removed=True) as lifecycle:
                lifecycle.delete(_props)
            return
        except _NoLeaseError as error:
            say(
                f"warning: {error}\nThe slice is deleted without its lease, and again once the lease is available"
            )
        with plugin.plain_errors():
            self._lifecycle(_props).delete(_props)
        try:
            with self._exclusive(_props, removed=True, outage_s=lease.OUTAGE_LIMIT_S) as lifecycle:
                lifecycle.delete(_props)
        except _NoLeaseError as error:
            if not error.is_missing:
                raise
            say("There is no bucket with a lease, and nobody makes a slice again without one")

    def _lifecycle(self, props: Json, also: Callable[[], bool] = lambda: True) -> Lifecycle[Any]:
        session = self.require_session()
        return lifecycles.lifecycle_for(props, session.clients, session.backoff_while(also))

    @contextlib.contextmanager
    def _exclusive(self, props: Json, *, removed: bool, outage_s: float = 0.0) -> Iterator[Lifecycle[Any]]:
        """Hold the lease of a slice. removed: mark the slice as removed, so that nobody makes it again.

        Raises CloudTpuError, and _NoLeaseError where the documents do not answer: nobody knows what others do then.
        """
        session = self.require_session()
        with plugin.plain_errors():
            try:
                with contextlib.ExitStack() as over:
                    lifecycle = self._lifecycle(props)
                    if url := props.get("lease_url"):
                        mine = lease.from_url(str(url), lease.myself("`pulumi`"))
                        patience = {"patience_s": lease.PATIENCE_S, "outage_s": outage_s}
                        over.enter_context(lease.held(mine, **patience, waiting=session.backoff.say))
                        mine.mark(removed=removed)
                        lifecycle = self._lifecycle(props, mine.require)
                        if removed:
                            over.enter_context(_unmarked_if_it_fails(mine))
                    yield lifecycle
            except DocumentsError as error:
                raise _NoLeaseError(error) from None
            except lease.LeaseHeldError as error:
                raise CloudTpuError(
                    f"{error}, for more than an hour; see `fab keeper status`, then try again"
                ) from None
            except lease.LeaseLostError as error:
                raise CloudTpuError(f"{error}; try again") from None


@contextlib.contextmanager
def _unmarked_if_it_fails(mine: lease.Lease) -> Iterator[None]:
    """A slice whose deletion has failed is still in Pulumi's state, and the next `pulumi up` may find it unchanged."""
    try:
        yield
    except CloudTpuError:
        with contextlib.suppress(DocumentsError, lease.LeaseLostError):
            mine.mark(removed=False)
        raise


class _NoLeaseError(CloudTpuError):
    """The documents with the lease do not answer."""

    __module__ = "builtins"

    def __init__(self, error: DocumentsError) -> None:
        super().__init__(f"others cannot be kept from the slice: {error}")
        self.is_missing = isinstance(error, MissingError)


class QueuedResource(Resource, module="tpu_stack", name="QueuedResource"):
    """state: the queued resource's, or of an ACTIVE one with lost nodes theirs, or MISSING.

    nodes: by number, [{id, name, state, workers: [{index, name, internal_address, external_address, host_keys}]}], as
    `infra.slice_apis.workers` has them; empty unless state is ACTIVE. Name and keys are empty until a worker has
    published them, external_address where it has none.
    zone: where it is, or waits. others: zones that hold something of it beside that, until the next `up`.
    """

    zone: pulumi.Output[str]
    state: pulumi.Output[str]
    nodes: pulumi.Output[list[dict[str, Any]]]
    create_time: pulumi.Output[str]
    active_at: pulumi.Output[str]
    ends_at: pulumi.Output[str]

    def __init__(
        self, name: str, args: QueuedResourceArgs, opts: pulumi.ResourceOptions | None = None
    ) -> None:
        super().__init__(QueuedResourceProvider(), name, _initial_props(args), opts)


def _initial_props(args: QueuedResourceArgs) -> Json:
    """The inputs, and every output as None, since Pulumi needs their names."""
    return input_props(args) | dict.fromkeys(OUTPUTS)


def input_props(args: SliceArgs) -> Json:
    """The inputs that are set, by name. Once all values are known, a lifecycle takes them."""
    inputs = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    inputs["data_disks"] = [
        {"source_disk": disk.source_disk, "mode": disk.mode} for disk in args.data_disks
    ] or None
    inputs["tags"] = list(args.tags)
    return {name: value for name, value in inputs.items() if value is not None}


def changes_between(
    before: Json,
    now: Json,
    *,
    replacing: Sequence[str] = REPLACING,
    in_place: Collection[str] = IN_PLACE,
) -> DiffResult:
    """The changes from Pulumi's state to the configuration: none, a change in place, or a replacement. Pure.

    before: the outputs of the last create, update or read. replacing, in_place: which inputs do what.

    One that is not ACTIVE yet always has a change, in place: the update waits on. One that is lost (a refresh has seen
    it SUSPENDED, FAILED, PREEMPTED …) is replaced for its state: the remains are deleted, the same is made again.
    One that is in a zone where it may still be stays there.
    """
    kind = state_kind(before.get("state"))
    current_zone = before.get("zone")
    before = before | _at(before, current_zone)
    now = now | _at(now, current_zone if current_zone in (now.get("zones") or ()) else now.get("zone"))
    changed = {
        name
        for name in (*replacing, *in_place, TIMING)
        if contains_unknowns(now.get(name)) or _plain(before.get(name)) != _plain(now.get(name))
    }
    replaces = [name for name in replacing if name in changed]
    if TIMING in changed and kind != "active":
        replaces.append(TIMING)
    if kind == "lost":
        replaces.append("state")
    return DiffResult(
        changes=bool(changed) or kind != "active" or bool(before.get("others")),
        replaces=replaces,
        delete_before_replace=True,
    )


def _at(props: Json, zone: Any) -> Json:
    """The properties that differ by zone, for this zone."""
    subnetworks = props.get("subnetworks") or {}
    return {"zone": zone, "subnetwork": subnetworks[zone] if zone in subnetworks else props.get("subnetwork")}


def _plain(value: Any) -> Any:
    """A value for comparison: absent, empty, zero and false are equal, as are 1 and 1.0, and tags in any order."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None} or None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value] or None
    return value or None
