"""What `infra.slice_apis.lifecycle` needs of an API that makes slices, and how a request for one stands.

The Cloud TPU API (`infra.cloud_tpu.queued_resources`) and Compute Engine (`infra.compute.groups`) are such APIs.
"""

from __future__ import annotations

import abc
import dataclasses
import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from contracts.aliases import Json
from infra import naming

if TYPE_CHECKING:
    from infra.slice_apis.google_api import Listing
    from infra.slice_apis.retry import Backoff

Props = Mapping[str, Any]
LookKind = Literal["waiting", "active", "lost"]

ACTIVE = "ACTIVE"
MISSING = "MISSING"  # ours: ACTIVE it says, but a node of it is not there
INCOMPLETE = "INCOMPLETE"  # ours: Google calls a group complete that has fewer machines than it was asked for
UNREAD = "UNREAD"  # ours: it is there, but its nodes could not be read or changed
# A state that Google adds tomorrow is none of these and counts as waiting: nothing is deleted for a word we don't know.
LOST = frozenset(
    {"SUSPENDING", "SUSPENDED", "FAILED", "DELETING", MISSING, "PREEMPTED", "TERMINATED"}
    | {"STOPPED", INCOMPLETE}
)
TAKEN_BACK = frozenset({"SUSPENDING", "SUSPENDED", "PREEMPTED", "TERMINATED"})
"""Of LOST those of a request that was served."""

SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
"""Of a host's account, which may do what its roles say."""
MODES = {"read-write": "READ_WRITE", "read-only": "READ_ONLY"}
"""Of disks, as both APIs write them."""


def state_kind(state: object) -> LookKind:
    """The kind of an output `state` in Pulumi's state."""
    return "active" if state == ACTIVE else "lost" if state in LOST else "waiting"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """The state of a request when it was read. `state`: its own; if it is ACTIVE, that of its worst node.

    resource: as the API's `find` returns it, with its createTime. nodes: those that are there, by id.
    may_be_running: active, or with a node or machine that is missing while others run: someone may be working there.
    """

    kind: LookKind
    state: str
    reason: str
    resource: Json
    nodes: Mapping[str, Json]
    may_be_running: bool = False

    @property
    def active_at(self) -> str:
        """When the first of its nodes was created, which Google does when there is capacity, RFC 3339; "": none is
        there."""
        return earliest(node.get("createTime") for node in self.nodes.values())


def earliest(moments: Iterable[str | None]) -> str:
    """Return the first of those that are known, RFC 3339; "": none is."""
    return min(filter(None, moments), key=datetime.datetime.fromisoformat, default="")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disk:
    """A disk that exists. mode: "read-write" or "read-only"."""

    source_disk: str
    mode: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec(abc.ABC):
    """A slice that is desired in one zone, `zone`: the properties of `infra.queued_resource.SliceArgs`, all known.

    labels: with the owner's. zones: where it may be, if that is more than one zone; `zone` is then where it is, as far
    as that is known, and subnetworks has the `subnetwork` of each.
    """

    project: str
    zone: str
    owner: str
    capacity: str
    accelerator_type: str
    topology: str
    valid_until_s: int
    wait_s: int
    subnetwork: str
    metadata: Mapping[str, str]
    labels: Mapping[str, str]
    tags: tuple[str, ...]
    description: str
    zones: tuple[str, ...]
    strategy: str
    zone_wait_s: int
    subnetworks: Mapping[str, str]
    store_url: str

    @classmethod
    def from_props(cls, props: Props) -> Self:
        """Read properties that are all known. An absent one is empty, zero or false."""
        values = {
            field.name: FORMS[str(field.type)](props.get(field.name)) for field in dataclasses.fields(cls)
        }
        return cls(**values | {"labels": {**values["labels"], naming.OWNER_LABEL: values["owner"]}})

    @property
    @abc.abstractmethod
    def own_id(self) -> str:
        """The name of the slice in every zone."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Its full name, with project and zone."""

    @property
    @abc.abstractmethod
    def parts(self) -> int:
        """How many slices train together."""

    @property
    @abc.abstractmethod
    def how_to_delete(self) -> str:
        """The command by which a person deletes it."""

    @property
    @abc.abstractmethod
    def about_taken_name(self) -> str:
        """Who else may have the name, where Google shows nothing of it."""

    @property
    def hardware_name(self) -> str:
        """The hardware of one part in messages."""
        return self.accelerator_type

    @property
    def kind(self) -> str:
        """The hardware in messages: 2 × v6e-16."""
        return f"{self.parts} × {self.hardware_name}" if self.parts > 1 else self.hardware_name

    @property
    def hardware(self) -> str:
        """The hardware and its place in messages: 2 × v6e-16 (spot) in us-east5-a."""
        return f"{self.kind} ({self.capacity}) in {self.zone}"

    @property
    def per_zone(self) -> tuple[Self, ...]:
        """This spec for each of its zones, in their order; only itself if it names one zone."""
        return tuple(
            dataclasses.replace(self, zone=zone, subnetwork=self.subnetworks.get(zone, self.subnetwork))
            for zone in self.zones or (self.zone,)
        )

    def in_zone(self, zone: str) -> Self:
        """The same slice in a zone that need not be one of its zones."""
        return dataclasses.replace(self, zone=zone)


FORMS: dict[str, Callable[[Any], Any]] = {
    "str": lambda value: str(value or ""),
    "int": lambda value: int(value or 0),
    "bool": bool,
    "Mapping[str, str]": lambda value: {str(key): str(item) for key, item in (value or {}).items()},
    "tuple[str, ...]": lambda value: tuple(str(item) for item in value or ()),
    "tuple[Disk, ...]": lambda value: tuple(
        Disk(source_disk=str(disk["source_disk"]), mode=str(disk.get("mode") or "read-write"))
        for disk in value or ()
    ),
}
"""By the type of a field: its form, of a value as Pulumi hands it over."""


def changed_pairs(
    present: Mapping[str, str], ours: Mapping[str, str], before: Sequence[Mapping[str, str]]
) -> dict[str, str] | None:
    """Labels or metadata with ours in them, and without those that were ours; None: nothing changes."""
    dropped = {key for previous in before for key in previous} - set(ours)
    merged = {key: value for key, value in present.items() if key not in dropped} | dict(ours)
    return merged if merged != dict(present) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Removable:
    """Something that can be deleted. find: returns it while it is there and the owner's. get_state: DELETING while it
    is being deleted."""

    name: str
    find: Callable[[], Json | None]
    get_state: Callable[[Json], str]
    delete: Callable[[], None]


class SliceApi[S: Spec](Protocol):
    """One of Google's APIs, as far as the life of a slice needs it. Methods that ask Google raise CloudTpuError."""

    @property
    def backoff(self) -> Backoff: ...

    def now(self) -> datetime.datetime:
        """The time by Google's clock."""
        ...

    def spec(self, props: Props) -> S: ...

    def find(self, spec: S, *, patience_s: float = ...) -> Json | None:
        """The request of that name, whoever's it is; None: there is none."""
        ...

    def listing(self, project: str) -> Listing:
        """Everything in all zones."""
        ...

    def in_listing(self, listing: Listing, spec: S) -> Mapping[str, Json]:
        """The owner's requests of that name in a listing, by zone."""
        ...

    def is_owned(self, resource: Json, owner: str) -> bool: ...

    def is_being_deleted(self, resource: Json) -> bool: ...

    def is_partial(self, spec: S, resource: Json) -> bool:
        """Whether something of the request is missing that `ask` adds: its creation was interrupted."""
        ...

    def is_queued(self, spec: S) -> bool:
        """Whether Google keeps a request for which it has no capacity now. If not, it is refused, and asked again."""
        ...

    def glance(self, spec: S, resource: Json) -> Look:
        """How a request stands, without asking Google."""
        ...

    def look(self, spec: S, resource: Json) -> Look:
        """How a request stands, with its nodes."""
        ...

    def differences(self, spec: S, look: Look) -> tuple[str, ...]:
        """The properties in which a request differs from the spec, without those that can be changed in place."""
        ...

    def in_the_way(self, spec: S) -> Iterable[Removable]:
        """Dead remains that have to go before the slice is requested. Raises CloudTpuError for what is not ours."""
        ...

    def ask(self, spec: S) -> str:
        """Request the slice, or what is missing of it. Returns the operation's name."""
        ...

    def operation(self, name: str) -> Json | None: ...

    def removable(self, spec: S) -> Removable: ...

    def remains(self, spec: S) -> Iterable[Removable]:
        """What the deletion of a request may have left."""
        ...

    def leftovers(self, project: str, owner: str, unreachable: set[str]) -> Iterable[Removable]:
        """All of an owner's. Zones that cannot be asked are added to `unreachable`."""
        ...

    def adjusted(self, spec: S, look: Look, before: Sequence[Props]) -> Look:
        """Change in place what differs, and return the nodes as they are then. before: what was ours, see `patch`."""
        ...

    def workers(self, spec: S, look: Look, *, limit_s: float) -> list[Json]:
        """The nodes with their workers, as outputs have them; waits for what workers publish, for limit_s."""
        ...

    def more_outputs(self, spec: S, look: Look) -> Json:
        """Return ends_at: when Google takes the slice back by itself, RFC 3339; "": never, or not known."""
        ...
