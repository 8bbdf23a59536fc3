"""Injects faults into the simulated cloud, and changes it without a request of its API."""

import dataclasses
import fnmatch
from typing import Literal

from contracts.aliases import Json
from rehearsal.simulated_cloud.capacity import ChipPool
from rehearsal.simulated_cloud.cloud import Entry
from rehearsal.simulated_cloud.compute_lifecycle import ComputeLifecycle
from rehearsal.simulated_cloud.compute_records import Group, Instance
from rehearsal.simulated_cloud.tpu_lifecycle import TpuLifecycle
from rehearsal.simulated_cloud.tpu_records import Node, QueuedResource
from rehearsal.simulator.api_error import ApiError

FaultKind = Literal["too-many-requests", "unavailable", "cut-before", "cut-after", "slow"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """`methods` is a pattern of method names less "tpu.projects.locations.": "nodes.create", "queuedResources.*",
    "compute.instances.insert", "*".

    cut-before: the connection ends and nothing was done. cut-after: it was done and the answer is lost. slow: the
    answer comes after `seconds` of real time, whatever the cloud's clock does.
    """

    kind: FaultKind
    methods: str = "*"
    seconds: float = 0.0

    def error(self) -> ApiError | None:
        """The error that refuses the request, or None."""
        if self.kind == "too-many-requests":
            return ApiError(
                "RESOURCE_EXHAUSTED",
                "Quota exceeded for quota metric 'Requests' and limit 'Requests per minute' of service"
                " 'tpu.googleapis.com'.",
            )
        if self.kind == "unavailable":
            return ApiError("UNAVAILABLE", "The service is currently unavailable.")
        return None


class Control:
    """Names are full ones (projects/…/locations/…/nodes/…), or last parts that are nobody else's.

    A thing that is not there, or whose state does not allow it, raises ApiError; a value without sense ValueError.
    """

    def __init__(self, tpu: TpuLifecycle, compute: ComputeLifecycle) -> None:
        self._cloud, self._tpu, self._compute = tpu.cloud, tpu, compute
        self._faults: list[Fault] = []

    # --- capacity and quota -------------------------------------------------------------------------------------

    def set_capacity(self, pool: str, chips: int) -> None:
        """Chips of ZONE:PREFIX:TIER from now on. Fewer than are held take nothing from anybody: `preempt` does."""
        with self._cloud.settled():
            self._cloud.capacity[ChipPool.parse(pool)] = chips
            self._cloud.look_for_capacity()

    def set_quota(self, pool: str, chips: int) -> None:
        """Chips of ZONE:PREFIX:TIER that a project may ask for from now on."""
        with self._cloud.settled():
            self._cloud.quota[ChipPool.parse(pool)] = chips

    # --- what happens to what it holds ------------------------------------------------------------------------------

    def preempt(self, name: str, leave_nodes: bool = False) -> None:
        """A spot node or instance is taken back, or all of a spot queued resource or group.

        Nodes are PREEMPTED, and their queued resource is suspended; `leave_nodes`: when it is SUSPENDED, they are
        still there. Others than spot raise ValueError.
        """
        with self._cloud.settled():
            thing = self._thing(name)
            if thing.pool.tier != "spot":
                raise ValueError(
                    f"{thing.name} is {thing.pool.tier}: only spot is preempted; terminate it instead"
                )
            if isinstance(thing, Instance | Group):
                self._compute.lose(thing)
            else:
                self._tpu.lose(thing, "PREEMPTED", leave_nodes=leave_nodes)

    def terminate(self, name: str) -> None:
        """Like `preempt` for any tier; nodes are TERMINATED, as at the end of a life cycle."""
        with self._cloud.settled():
            thing = self._thing(name)
            if isinstance(thing, Instance | Group):
                self._compute.lose(thing)
            else:
                self._tpu.lose(thing, "TERMINATED")

    def maintain(self, name: str, seconds: float | None = None) -> None:
        """Nodes are REPAIRING for a while and then READY, a group REACTIVATING and then ACTIVE."""
        with self._cloud.settled():
            thing = self._thing(name)
            seconds = self._cloud.delays.repair_s if seconds is None else seconds
            if isinstance(thing, Instance):
                raise ValueError(f"{thing.name} is no group")
            if isinstance(thing, Group):
                self._compute.repair(thing, seconds)
            else:
                self._tpu.repair(thing, seconds)

    def fail(self, name: str, message: str = "the request could not be completed") -> None:
        """A queued resource that is not ACTIVE yet is FAILED, or the topology of a group."""
        with self._cloud.settled():
            thing = self._thing(name)
            if isinstance(thing, Node | Instance):
                raise ValueError(f"{thing.name}: only a queued resource or a group fails")
            if isinstance(thing, Group):
                self._compute.fail(thing)
            else:
                self._tpu.fail_queued_resource(thing, ApiError("INTERNAL", message))

    def vanish(self, name: str) -> None:
        """Gone at once, as if someone else had deleted it; with a queued resource or a group, what belongs to it."""
        with self._cloud.settled():
            thing = self._thing(name)
            if isinstance(thing, Instance | Group):
                self._compute.vanish(thing)
            else:
                self._tpu.vanish(thing)

    # --- errors ---------------------------------------------------------------------------------------------------

    def inject(self, kind: FaultKind, methods: str = "*", times: int = 1, seconds: float = 0.0) -> None:
        """The next requests of these methods go wrong (see Fault)."""
        with self._cloud.lock:
            self._faults += [Fault(kind=kind, methods=methods, seconds=seconds)] * times

    def cut_off(self, zone: str) -> None:
        """A zone does not answer any more, and lists of all zones say so."""
        with self._cloud.lock:
            self._cloud.unreachable.add(zone)

    def clear_faults(self) -> None:
        """Remove all faults."""
        with self._cloud.lock:
            self._faults.clear()
            self._cloud.unreachable.clear()

    def take_fault(self, method: str) -> Fault | None:
        """The first injected fault that hits this method; it has happened then."""
        with self._cloud.lock:
            for index, fault in enumerate(self._faults):
                if fnmatch.fnmatchcase(method, fault.methods):
                    return self._faults.pop(index)
        return None

    # --- time -----------------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """The cloud's clock jumps forward, and what comes due in between happens, each at its own moment."""
        with self._cloud.lock:
            self._cloud.clock.advance(seconds)
            self._cloud.settle()

    # --- look -----------------------------------------------------------------------------------------------------

    def alive(self) -> Json:
        """The time, everything that is there, and the injected faults that are still to happen. Of Compute Engine the
        states, by name."""
        with self._cloud.settled():
            return {
                "moment": self._cloud.moment,
                "nodes": [node.render() for node in self._cloud.all(Node)],
                "queuedResources": [qr.render() for qr in self._cloud.all(QueuedResource)],
                "groups": {group.name: group.state for group in self._cloud.all(Group)},
                "instances": {instance.name: instance.status for instance in self._cloud.all(Instance)},
                "faults": [dataclasses.asdict(fault) for fault in self._faults],
            }

    def slices(self) -> dict[str, str]:
        """The state of each node and group, and of each instance that is of none, by name."""
        with self._cloud.settled():
            nodes = {node.name: node.state for node in self._cloud.all(Node)}
            groups = {group.name: group.state for group in self._cloud.all(Group)}
            instances = self._cloud.all(Instance)
            return nodes | groups | {one.name: one.status for one in instances if one.group is None}

    def journal(self) -> list[Entry]:
        """Every state that something has come into, and "gone", in order."""
        with self._cloud.settled():
            return list(self._cloud.journal)

    def _thing(self, name: str) -> Node | QueuedResource | Instance | Group:
        """The thing of that name. Raises ApiError where there is none, ValueError where there are several."""
        kinds = (Node, QueuedResource, Instance, Group)
        matches = [full for full in self._cloud.things if name in (full, full.rpartition("/")[2])]
        if len(matches) > 1:
            raise ValueError(f"name={name!r}: there are {', '.join(matches)}; give the full name")
        thing = self._cloud.things[matches[0]] if matches else None
        if not isinstance(thing, kinds):
            raise ApiError("NOT_FOUND", f"name={name!r}: the cloud holds no such thing")
        return thing
