"""What all APIs of the simulated cloud share: its clock, what it holds, operations, chips, and a journal of it all.

One lock guards it: whoever reads or changes it holds `lock` and has called `settle`. Nothing runs by itself: each
change records what is requested and plans the rest for later, and `settle` carries out what has come due since.
"""

import collections
import contextlib
import dataclasses
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from contracts.aliases import Json
from rehearsal.simulated_cloud.capacity import ChipPool, first_over
from rehearsal.simulated_cloud.hardware import Hardware
from rehearsal.simulator.api_error import ApiError, missing

Action = Callable[[], None]


class Clock:
    """Unix seconds: real time, or, where it is frozen, only what it is advanced by."""

    def __init__(self, frozen_at: float | None = None) -> None:
        self._frozen_at = frozen_at
        self._ahead_s = 0.0

    def now(self) -> float:
        """The time in unix seconds."""
        return (time.time() if self._frozen_at is None else self._frozen_at) + self._ahead_s

    def advance(self, seconds: float) -> None:
        """Jump forward, frozen or not."""
        self._ahead_s += seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delays:
    """The delays of the simulated cloud, in seconds of its clock. The defaults suit a person who watches."""

    operation_s: float = 1.0  # the operation of a request that changes little
    accept_s: float = 1.0  # a queued resource from ACCEPTED to WAITING_FOR_RESOURCES
    place_s: float = 1.0  # until a request without a queue has its chips, or hears that there are none
    create_s: float = 5.0  # from chips to READY or RUNNING
    delete_s: float = 2.0
    suspend_s: float = 2.0  # a queued resource from SUSPENDING to SUSPENDED, an instance to TERMINATED
    repair_s: float = 10.0  # maintenance

    def scaled(self, factor: float) -> "Delays":
        """The same delays, multiplied by a factor."""
        return Delays(**{name: seconds * factor for name, seconds in dataclasses.asdict(self).items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A line of the journal: something came into a state, or was gone."""

    moment: float
    name: str
    state: str


@dataclasses.dataclass(kw_only=True)
class Operation:
    """A record of the cloud, changed as time goes on. outcome: its response or its error, once it has ended."""

    name: str
    target: str
    verb: str
    number: int
    created: float
    ended: float | None = None
    outcome: Json | ApiError = dataclasses.field(default_factory=dict)


class Thing(Protocol):
    """Something that the cloud holds. name: in full, projects/… operation: the one that it is busy with.

    instances: the names of its machines.
    """

    name: str
    operation: Operation | None

    @property
    def instances(self) -> Sequence[str]: ...


class Cloud:
    """The state of the simulated cloud. `moment`: the present, in unix seconds."""

    def __init__(
        self,
        *,
        clock: Clock,
        delays: Delays,
        capacity: dict[ChipPool, int],
        quota: dict[ChipPool, int],
        hardware: Hardware,
    ) -> None:
        self.lock = threading.RLock()
        self.clock = clock
        self.moment = clock.now()
        self.delays = delays
        self.capacity = capacity
        self.quota = quota
        self.hardware = hardware
        self.things: dict[str, Thing] = {}
        self.operations: dict[str, Operation] = {}
        self.journal: list[Entry] = []
        self.unreachable: set[str] = set()  # zones that do not answer
        self.on_more_capacity: list[Action] = []
        """What the APIs do when there may be chips for what waits."""
        self._chips: dict[str, collections.Counter[ChipPool]] = {}
        self._events: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count(1)

    # --- time -------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Carry out what has come due, in order, each at its own moment; then the present moment is the clock's."""
        now = self.clock.now()
        while self._events and self._events[0][0] <= now:
            due, _, action = heapq.heappop(self._events)
            self.moment = max(self.moment, due)
            action()
        self.moment = max(self.moment, now)

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """The cloud to oneself, with all carried out that has come due."""
        with self.lock:
            self.settle()
            yield

    def after(self, seconds: float, action: Action) -> None:
        """Carry out `action` that long after the present moment."""
        heapq.heappush(self._events, (self.moment + seconds, self.number(), action))

    # --- what it holds ----------------------------------------------------------------------------------------

    def find[T](self, kind: type[T], name: str) -> T:
        """Raises ApiError NOT_FOUND."""
        thing = self.things.get(name)
        if not isinstance(thing, kind):
            raise missing(name)
        return thing

    def all[T](self, kind: type[T]) -> list[T]:
        """The things of a kind, the oldest first."""
        return [thing for thing in self.things.values() if isinstance(thing, kind)]

    def holds(self, thing: Thing) -> bool:
        """Whether it is still there, and no other one of its name."""
        return self.things.get(thing.name) is thing

    def number(self) -> int:
        """A number that was never used before."""
        return next(self._numbers)

    def add(self, thing: Thing, state: str) -> None:
        """Hold a thing from now on."""
        self.things[thing.name] = thing
        self.record(thing, state)

    def drop(self, thing: Thing) -> None:
        """A thing is gone, if it is not yet. What it was busy with has failed."""
        if self.holds(thing):
            del self.things[thing.name]
            self.give_back(thing)
            self.record(thing, "gone")
            self.end(thing.operation, ApiError("CANCELLED", f"'{thing.name}' was deleted meanwhile"))

    def record(self, thing: Thing, state: str) -> None:
        """A line for the journal, and a message to what stands behind a thing; what waits may get its chips."""
        self.journal.append(Entry(moment=self.moment, name=thing.name, state=state))
        self.hardware.changed(thing.instances, state)
        self.look_for_capacity()

    # --- operations -------------------------------------------------------------------------------------------

    def begin(self, target: str, verb: str) -> Operation:
        """A new operation on what has that name, in its project and zone."""
        number = self.number()
        name = f"{'/'.join(target.split('/')[:4])}/operations/operation-{number:06d}"
        operation = Operation(name=name, target=target, verb=verb, number=number, created=self.moment)
        self.operations[name] = operation
        return operation

    def end(self, operation: Operation | None, outcome: Json | ApiError) -> None:
        """End an operation, if there is one and it has not ended: the first end counts."""
        if operation is not None and operation.ended is None:
            operation.ended, operation.outcome = self.moment, outcome

    def operation(self, name: str) -> Operation:
        """Raises ApiError NOT_FOUND."""
        if name not in self.operations:
            raise missing(name)
        return self.operations[name]

    # --- chips ------------------------------------------------------------------------------------------------

    def has_room(self, chips: collections.Counter[ChipPool]) -> bool:
        """Whether there are so many chips now."""
        held = sum(self._chips.values(), collections.Counter[ChipPool]())
        return first_over(self.capacity, chips, held) is None

    def take(self, thing: Thing, chips: collections.Counter[ChipPool]) -> None:
        """Give a thing its chips."""
        self._chips[thing.name] = chips

    def give_back(self, thing: Thing) -> None:
        """Take a thing's chips, if it has any."""
        self._chips.pop(thing.name, None)

    def look_for_capacity(self) -> None:
        """Plan another look at the waiting requests, at this moment but after the current change."""
        self.after(0, self._grant_capacity)

    def _grant_capacity(self) -> None:
        for act in self.on_more_capacity:
            act()
