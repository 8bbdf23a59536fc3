"""A model of all that a reconciler deals with: Google's slices, hosts, runs with fencing tokens, a bucket, a clock.

The reconciler, the policy, the store and the lease are the real ones. What happens in the middle of an action happens
in `World.pause`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from contracts.errors import RequestError, Unreachable
from infra.documents import ABSENT, ChangedError, Documents, DocumentsError
from infra.documents import lease as leases
from infra.documents.lease import Lease
from launch import policy
from launch.control.control_documents import Run
from launch.control.store import Content, Store
from launch.policy import Cause, RunObserved, Signs, SliceObserved, Standing
from launch.reconcile import (
    NotStartedError,
    Reconciler,
    RequestRefusedError,
    SliceLostError,
)
from tests.infra.cloud_tpu.lab import PowerCut

START_S = 1_800_000_000.0


@dataclasses.dataclass
class Memory:
    """Documents in memory. away: does not answer. answers_lost: so many writes get through and say that they did
    not."""

    clock: Clock
    ahead_s: float = 0.0
    data: dict[str, tuple[bytes, int]] = dataclasses.field(default_factory=dict)
    count: int = 0
    away: bool = False
    answers_lost: int = 0
    requests: int = 0

    def read(self, name: str) -> tuple[bytes | None, int]:
        self._ask()
        return self.data.get(name, (None, ABSENT))

    def write(self, name: str, data: bytes, version: int) -> int:
        self._ask()
        if self.data.get(name, (None, ABSENT))[1] != version:
            raise ChangedError(f"{name}: somebody else has changed it meanwhile")
        self.count += 1
        self.data[name] = (data, self.count)
        self._answer(name)
        return self.count

    def delete(self, name: str, version: int) -> None:
        self._ask()
        if name in self.data:
            if self.data[name][1] != version:
                raise ChangedError(f"{name}: somebody else has changed it meanwhile")
            del self.data[name]

    def names(self, prefix: str) -> list[str]:
        self._ask()
        return [name for name in self.data if name.startswith(prefix)]

    def versions(self) -> dict[str, int]:
        self._ask()
        return {name: version for name, (_, version) in self.data.items()}

    def ages_s(self, folders: Sequence[str], names: Sequence[str]) -> dict[str, float]:
        raise NotImplementedError

    def _ask(self) -> None:
        self.requests += 1
        if self.away:
            raise DocumentsError("the bucket does not answer")

    def _answer(self, name: str) -> None:
        if self.answers_lost > 0 and not name.startswith("leases/"):
            self.answers_lost -= 1
            raise ChangedError(f"{name}: the answer was lost, and then somebody else wrote")


@dataclasses.dataclass
class Clock:
    now_s: float = START_S

    def now(self) -> float:
        return self.now_s


@dataclasses.dataclass
class Cloud:
    """Slices at Google. made_by: "pulumi", or "keeper" until a run has begun on it."""

    states: dict[str, str] = dataclasses.field(default_factory=dict)
    created: dict[str, str] = dataclasses.field(default_factory=dict)
    made_by: dict[str, str] = dataclasses.field(default_factory=dict)
    capacity: bool = True
    unreachable: bool = False
    refuses: str = ""
    count: int = 0

    def create(self, name: str, by: str) -> None:
        self.count += 1
        self.states[name] = "ACTIVE" if self.capacity else "WAITING"
        self.created[name], self.made_by[name] = f"c{self.count}", by

    def delete(self, name: str) -> None:
        self.states.pop(name, None)
        self.made_by.pop(name, None)


@dataclasses.dataclass
class Process:
    """A run on its hosts. on: the slice and when that was created. token: of its attempt."""

    step: int = 0
    saved: int = -1
    attempt: int = -1
    token: int = 0
    on: tuple[str, str] | None = None
    state: str = "none"
    cause: Cause = "lost"
    cost_usd: float | None = None


class World:
    """frozen: leases of reconcilers that stand still. silent: slices whose hosts do not answer."""

    def __init__(self, pause: Callable[[str], None]) -> None:
        self.pause = pause
        self.clock = Clock()
        self.memory = Memory(self.clock)
        self.cloud = Cloud()
        self.declared: set[str] = set()
        self.processes: dict[str, Process] = {}
        self.silent_slices: set[str] = set()
        self.unpreparable: set[str] = set()
        self.in_use: set[str] = set()
        self.registry_away = False
        self.held: list[Lease] = []
        self.lines: list[str] = []
        self.told: list[tuple[str, str]] = []
        self.removed: set[str] = set()

    # --- what the model knows ---------------------------------------------------------------------------------------

    def is_there(self, on: tuple[str, str] | None) -> bool:
        return (
            on is not None and self.cloud.states.get(on[0]) == "ACTIVE" and self.cloud.created[on[0]] == on[1]
        )

    def is_living(self, run_id: str) -> bool:
        process = self.processes.get(run_id)
        return process is not None and process.state == "running" and self.is_there(process.on)

    # --- what a reconciler observes ---------------------------------------------------------------------------------

    def slices(self, content: Content) -> Mapping[str, SliceObserved]:
        found: dict[str, SliceObserved] = {}
        for name in self.declared:
            if self.cloud.unreachable:
                found[name] = SliceObserved(standing="unknown")
                continue
            state = self.cloud.states.get(name)
            standing: Standing = (
                "absent"
                if state is None
                else "active"
                if state == "ACTIVE"
                else "waiting"
                if state == "WAITING"
                else "lost"
            )
            found[name] = SliceObserved(
                standing=standing, created=self.cloud.created.get(name, "") if state else ""
            )
        return found

    def signs(self, runs: Sequence[Run]) -> Mapping[str, Signs]:
        found = {}
        for run in runs:
            process = self.processes.get(run.run_id)
            if process is not None and process.attempt >= 0:
                age_s = 5.0 if self.is_living(run.run_id) else 1000.0
                found[run.run_id] = Signs(
                    beat_age_s=age_s, has_result=process.state not in ("running", "none")
                )
        return found

    def examine(self, run: Run, content: Content, *, has_hosts: bool) -> RunObserved | None:
        self.pause("examine")
        process = self.processes.get(run.run_id)
        if process is None or process.attempt < 0:
            return None
        silent = 2 if has_hosts and run.slice in self.silent_slices else 0
        is_living = self.is_living(run.run_id)
        living: policy.Presence = "unknown" if silent else "present" if is_living else "absent"
        state: Any = "running" if is_living else process.state if process.state != "running" else "lost"
        cause: Cause = process.cause if state != "lost" else "lost"
        return RunObserved(
            living=living, state=state, cause=cause, attempt=process.attempt, silent=silent, checkpoint=process.saved,
            error="out of memory" if cause == "failed" else "", cost_usd=process.cost_usd,
        )  # fmt: skip

    def silent(self, name: str, content: Content) -> int:
        return 2 if name in self.silent_slices else 0

    # --- what a reconciler does -------------------------------------------------------------------------------------

    def request(self, name: str, content: Content, lease: Lease, *, wait_s: float) -> bool:
        lease.require()
        self.pause("request")
        lease.require()
        if self.cloud.unreachable or self.cloud.refuses == "busy":
            raise RequestRefusedError("it does not answer")
        if self.cloud.refuses == "forbidden":
            raise RequestRefusedError("the caller does not have permission", is_final=True)
        if self.cloud.states.get(name) not in ("ACTIVE", "WAITING"):
            self.cloud.create(name, "keeper")
        self.pause("requested")
        return self.cloud.states.get(name) == "ACTIVE"

    def release(self, name: str, content: Content, lease: Lease) -> None:
        lease.require()
        self.pause("release")
        if self.cloud.unreachable:
            raise Unreachable("the API does not answer")
        assert not any(
            self.is_living(run_id) and p.on and p.on[0] == name for run_id, p in self.processes.items()
        ), "a slice on which a run lives was given back"
        self.cloud.delete(name)

    def prepare(
        self, name: str, run: Run, content: Content, lease: Lease, require_there: Callable[[], None]
    ) -> None:
        self.pause("prepare")
        require_there()
        if name in self.silent_slices or name in self.unpreparable:
            raise RequestError("hosts do not answer")

    def start(self, run: Run, require: Callable[[], object]) -> int:
        assert run.slice is not None and run.attempt is not None
        process = self.processes.setdefault(run.run_id, Process())
        token = process.token
        self.pause("stage")
        if self.registry_away:
            raise NotStartedError("the registry was away", is_outage=True)
        if run.slice in self.in_use:
            raise NotStartedError("somebody else is at work there", is_in_use=True)
        if run.slice in self.silent_slices or self.cloud.states.get(run.slice) != "ACTIVE":
            raise NotStartedError("hosts do not answer")
        require()
        self.pause("begin")
        if process.token != token:  # taken by a conditional write
            raise NotStartedError("another attempt has begun", is_in_use=True)
        process.token += 1
        assert not self.is_living(run.run_id), "a run that lives was started a second time"
        assert run.run_id not in self.removed, "a run was started whose directory was removed"
        others = [
            each
            for each, p in self.processes.items()
            if each != run.run_id and self.is_living(each) and p.on and p.on[0] == run.slice
        ]
        if others:
            raise NotStartedError("somebody else is at work there", is_in_use=True)
        process.attempt = process.attempt + 1
        process.on = (run.slice, self.cloud.created.get(run.slice, ""))
        process.state, process.step = "running", max(0, process.saved)
        if self.cloud.states.get(run.slice) == "ACTIVE":
            self.cloud.made_by[run.slice] = "pulumi"
        self.pause("begun")
        return process.attempt

    def stop(self, run: Run) -> None:
        process = self.processes[run.run_id]
        if run.slice not in self.silent_slices and self.is_living(run.run_id):
            process.state, process.cause, process.saved = "stopped", "stopped", process.step

    def remove(self, run: Run) -> None:
        self.pause("remove")
        if self.memory.away:
            raise DocumentsError("the bucket does not answer")
        assert not self.is_living(run.run_id), "the directory of a run that lives was removed"
        self.removed.add(run.run_id)
        self.pause("removed")

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[Lease]:
        mine = Lease(self.documents(), name, "a reconciler", now=self.clock.now, sleep=self.sleep)
        mine.take()
        self.held.append(mine)
        try:
            yield mine
        except PowerCut:
            raise
        except BaseException:
            mine.release()
            raise
        else:
            mine.release()
        finally:
            self.held.remove(mine)

    def sleep(self, seconds: float, frozen: Lease | None = None) -> None:
        """Let time go on; whoever holds a lease renews it, unless he is frozen."""
        while seconds > 0:
            step_s = min(seconds, leases.RENEW_S) if self.held else seconds
            self.clock.now_s += step_s
            seconds -= step_s
            for mine in self.held:
                if mine is not frozen:
                    with contextlib.suppress(DocumentsError, leases.LeaseLostError):
                        mine.renew()

    # --- who tells people -------------------------------------------------------------------------------------------

    def notice(self, run: Run, kind: str, text: str) -> Mapping[str, Any] | None:
        self.pause("decided")
        return {"kind": kind, "text": text} if kind else None

    def deliver(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self.told += [(run.run_id, str(each["kind"])) for each in run.notices]

    def record(self, run: Run) -> None:
        """Nobody reads them here."""

    # --- what is made of it -----------------------------------------------------------------------------------------

    def documents(self) -> Documents:
        found = Documents("/nowhere", place=self.memory)
        found.now_s = lambda: self.clock.now_s + self.memory.ahead_s  # type: ignore[method-assign]
        return found

    def store(self) -> Store:
        return Store(self.documents())

    def reconciler(self) -> Reconciler:
        return Reconciler(self.store(), self, self, self.lines.append, at_once=1)

    def one_pass(self) -> None:
        """Raises nothing that a timer would not survive."""
        with contextlib.suppress(DocumentsError):
            reconciler = self.reconciler()
            reconciler.run_pass(lambda _: None, reconciler.store.read())


__all__ = ["PowerCut", "SliceLostError", "World"]
