"""Any sequence of what a keeper, a second one, Pulumi, a user and the cloud do, also in the middle of each other.

The keeper's passes and Pulumi's provider are the real ones, against the simulator over HTTP and documents in a folder;
hosts and runs are modelled. Sleeping moves the clock, and what happens in the middle happens in a sleep.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from contracts.errors import RequestError
from contracts.inventory import to_json
from infra import lease
from infra.cloud_tpu import request
from infra.cloud_tpu.client import Client
from infra.cloud_tpu.retry import CloudTpuError
from infra.documents import Documents, DocumentsError, MissingError
from infra.stack_identity import StackIdentityProvider
from keeper import passes, store
from keeper.hosts import Examined
from keeper.rules import Facts, Sign
from keeper.store import Stack, Wanted
from rehearsal.tpu_api import ApiError, Clock, TpuApi
from tests.infra.cloud_tpu.lab import OWNER, POOL, ZONE, Cloud, wanted_props
from tests.infra.cloud_tpu.lab import Stack as Pulumi
from tests.launch.slices import make_inventory, make_slice

ZONES = (ZONE, "us-west4-a")
POOLS = (POOL, POOL.replace(ZONE, ZONES[1]))
RUN_ID = "flax_mlm-20261123-100000-abcd"
STEPS, EVERY = 100, 10
INVENTORY = make_inventory(
    make_slice((), name="main", zone=ZONE, origin="queued-resource main"),
    project="grant",
    has_keeper=True,
)
EVENTS = (
    *("preempt", "preempt-leave", "terminate", "vanish", "stock-out", "stock-out-here", "restock"),
    *("documents-away", "google-busy", "answer-lost"),
)
IN_THE_MIDDLE = st.one_of(
    st.sampled_from(["keeper", "keeper-dies", "up", "destroy", "suspended"]),
    st.sampled_from([*EVENTS, "progress", "crash"]),
)


class PowerCut(BaseException):
    """The program ends: no `except` and no clean-up of ours runs any more."""


@dataclasses.dataclass
class World:
    """A run and its hosts. on: the instance names of the hosts that it was started on."""

    machine: Machine
    step: int = 0
    saved: tuple[int, ...] = ()
    on: tuple[str, ...] = ()
    outcome: str | None = None
    attempt: int = 0
    described: dict[str, Any] = dataclasses.field(default_factory=lambda: {"code": {"bundle": "same"}})

    def instances(self) -> tuple[str, ...]:
        nodes = self.machine.api.cloud.nodes.values()
        return tuple(name for node in nodes if node.state == "READY" for name in node.instances)

    @property
    def runs(self) -> bool:
        return self.outcome is None and bool(self.on) and set(self.on) <= set(self.instances())

    # --- what the keeper sees and does ------------------------------------------------------------------------------

    def signs(self, wanted: Sequence[Wanted]) -> dict[str, Sign]:
        age_s = 0.0 if self.runs else 1000.0
        return {each.run_id: Sign(beat_age_s=age_s, has_result=self.outcome is not None) for each in wanted}

    def without_hosts(self, wanted: Wanted) -> Any:
        return Examined(run=self, facts=self.facts())  # type: ignore[arg-type]

    def facts(self) -> Facts:
        state: Any = self.outcome or ("running" if self.runs else "lost")
        return Facts(state=state, saved=self.saved, error="out of memory" if state == "failed" else "")

    def target(self, wanted: Wanted, stack: Stack) -> tuple[str, ...]:
        hosts = stack.inventory.slices[0].hosts
        if not hosts:
            raise RequestError("the slice has no hosts yet")
        return tuple(host.name for host in hosts)

    def silent(self, target: Sequence[str]) -> list[str]:
        return sorted({*target} - {*self.instances()})

    def prepare(
        self, reopen: Callable[[], tuple[str, ...]], require_there: Callable[[], None]
    ) -> tuple[str, ...]:
        self.machine.sleep(5.0)
        if self.silent(reopen()):
            require_there()
        if self.silent(reopen()):
            raise RequestError("hosts do not answer")
        self.machine.sleep(5.0)
        return reopen()

    def examine(self, wanted: Wanted, target: Any, now_s: float) -> Any:
        return self.without_hosts(wanted)

    def resume(
        self, run: World, target: tuple[str, ...], now_s: Callable[[], float], require: Callable[[], object]
    ) -> Any:
        self.machine.sleep(5.0)  # the preflight and the code
        if self.silent(target):
            raise RequestError("hosts do not answer")
        require()
        assert not self.runs, "a run that runs was started a second time"
        self.step, self.outcome, self.on = (self.saved or (0,))[-1], None, target
        self.attempt += 1
        self.machine.sleep(5.0)
        return self

    def write_acts(self, wanted: Wanted, run: Any) -> None:
        """Nobody reads them here."""

    # --- what befalls it --------------------------------------------------------------------------------------------

    def progress(self, steps: int) -> None:
        if self.runs:
            self.step = min(STEPS, self.step + steps)
            whole = self.step - self.step % EVERY
            self.saved = (*self.saved, whole) if whole > (self.saved or (0,))[-1] else self.saved
            self.outcome = "done" if self.step == STEPS else None

    def crash(self) -> None:
        if self.runs:
            self.outcome = "failed"


class Away(Documents):
    """Documents in a folder, as a bucket that may be away, with the machine's clock."""

    def __init__(self, machine: Machine, ahead_s: float = 0.0) -> None:
        super().__init__(machine.folder)
        self._machine, self._ahead_s = machine, ahead_s

    def now_s(self) -> float:
        return self._machine.clock.now() + self._ahead_s

    def read(self, name: str) -> Any:
        self._require()
        return super().read(name)

    def write(self, name: str, value: Any, *, version: int) -> int:
        self._require()
        return super().write(name, value, version=version)

    def names(self, prefix: str = "") -> list[str]:
        self._require()
        return super().names(prefix)

    def _require(self) -> None:
        if self._machine.clock.now() < self._machine.away_until_s:
            raise DocumentsError("the bucket does not answer")


class Machine(RuleBasedStateMachine):
    """destroyed: `pulumi destroy` was the last that was asked of Pulumi, and succeeded. broken_off: that one failed.

    node_count: of how many equal slices its slice is made.
    """

    node_count = 1

    @initialize(
        ahead_s=st.sampled_from([0.0, 0.0, 3600.0, -3600.0]),
        strategy=st.sampled_from(["", "", "first", "race"]),
    )
    def start(self, ahead_s: float, strategy: str = "") -> None:
        self.threads = threading.active_count()  # of the tests before
        self.exits = contextlib.ExitStack()
        self.folder = self.exits.enter_context(tempfile.TemporaryDirectory())
        self.clock = Clock(frozen_at=1_800_000_000.0)
        self.away_until_s = 0.0
        self.ahead_s = ahead_s
        self.strategy = strategy
        self.api = self.exits.enter_context(TpuApi(clock=self.clock, capacity=dict.fromkeys(POOLS, 64)))
        self.cloud = Cloud(self.api, self.clock)
        self.cloud.session.backoff = dataclasses.replace(self.cloud.session.backoff, sleep=self.sleep)
        self.control = self.api.control
        self.pulumi = Pulumi(cloud=self.cloud)
        self.world = World(self)
        self.plan: list[tuple[int, str]] = []
        self.depth = 0
        self.is_locked = False
        self.destroyed = False
        self.asked: list[tuple[int, int]] = []
        patch = pytest.MonkeyPatch()
        self.exits.callback(patch.undo)
        patch.setattr(lease, "of_url", lambda url, who: self.lease_of("main", who))
        patch.setattr(lease, "held", self.held)
        patch.setattr(lease, "Documents", lambda url: Away(self))
        self.identity = StackIdentityProvider()
        self.identity._session = self.cloud.session
        self.up()
        self.world.on = self.world.instances()
        entry = Wanted(
            run_id=RUN_ID,
            stack="dev",
            slice="main",
            runs_url="gs://b/runs",
            project="grant",
            origin="queued-resource main",
        )
        store.change_wanted(Documents(self.folder), RUN_ID, lambda _: entry)

    # --- time, and what happens in it -------------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """Let what was planned happen, and the time pass."""
        due = [event for left, event in self.plan if left <= 1]
        self.plan = [(left - 1, event) for left, event in self.plan if left > 1]
        for event in due:
            self.happen(event)
        self.control.advance(seconds)

    def happen(self, event: str) -> None:
        if event == "keeper-dies":
            raise PowerCut
        if event == "suspended":  # the machine of whoever sleeps, while another keeper goes on
            self.control.advance(120.0)
            event = "keeper"
        if event in ("keeper", "up", "destroy"):
            # Of two `pulumi` at once the second one finds the lock of the stack's state.
            if self.depth < 3 and (event == "keeper" or not self.is_locked):
                getattr(self, event)()
        elif event == "documents-away":
            self.away_until_s = self.clock.now() + 300.0
        elif event in ("stock-out", "stock-out-here", "restock"):
            for pool in POOLS[: 1 if event == "stock-out-here" else None]:
                self.control.set_capacity(pool, 64 if event == "restock" else 0)
        elif event == "google-busy":
            self.control.inject("unavailable", "queuedResources.create", times=3)
        elif event == "answer-lost":
            self.control.inject("cut-after", "queuedResources.create")
        elif event == "progress":
            self.world.progress(EVERY + 5)
        elif event == "crash":
            self.world.crash()
        else:
            for name in list(self.api.cloud.queued_resources):
                with contextlib.suppress(ApiError, ValueError):
                    match event:
                        case "preempt" | "preempt-leave":
                            self.control.preempt(name, leave_nodes=event.endswith("leave"))
                        case "terminate" | "vanish":
                            getattr(self.control, event)(name)

    def lease_of(self, name: str, who: str) -> lease.Lease:
        return lease.Lease(Away(self), name, who, now=self.clock.now, sleep=self.sleep)

    @contextlib.contextmanager
    def held(self, mine: lease.Lease, **how: Any) -> Iterator[lease.Lease]:
        """As `lease.held`, without its thread: whoever sleeps long enough does not renew it, as if stopped."""
        mine.take(
            **{name: min(value, 600.0) if name == "patience_s" else value for name, value in how.items()}
        )
        try:
            yield mine
        except PowerCut:
            raise
        except BaseException:
            mine.release()
            raise
        else:
            mine.release()

    # --- who does what ----------------------------------------------------------------------------------------------

    @rule()
    def keeper(self) -> None:
        """One pass. What it changes is checked by the invariants; what it may not do ends the test."""
        self.depth += 1
        documents = Away(self, self.ahead_s)
        means = passes.Means(
            documents=documents,
            client=lambda: self.cloud.client,
            backoff=dataclasses.replace(self.cloud.session.backoff, say=self.cloud.lines.append),
            hosts=self.world,  # type: ignore[arg-type]
            say=self.cloud.lines.append,
            hold=lambda name, **how: self.held(self.lease_of(name, "keeper"), **how),
            at_once=1,
        )
        try:
            passes.run_pass(means)
        except DocumentsError:
            pass
        except PowerCut:
            if self.depth > 1:
                raise
        finally:
            self.depth -= 1

    @rule(plan=st.lists(st.tuples(st.integers(1, 6), IN_THE_MIDDLE), min_size=1, max_size=3))
    def keeper_while_something_happens(self, plan: list[tuple[int, str]]) -> None:
        self.happen("restock")
        self.up()
        self.happen("preempt")
        self.plan = plan
        self.keeper()
        self.plan = []

    @rule(plan=st.lists(st.tuples(st.integers(1, 6), IN_THE_MIDDLE), max_size=2))
    def pulumi_while_something_happens(self, plan: list[tuple[int, str]]) -> None:
        self.plan = plan
        with contextlib.suppress(PowerCut):
            self.up()
        self.plan = []

    def up(self) -> None:
        """What needs a resource is not made where that fails."""
        self.destroyed, self.broken_off = False, True
        asked: dict[str, Any] = {
            "lease_url": lease.url_of("gs://b/control", "main"), "node_count": self.node_count,
        }  # fmt: skip
        if self.strategy:
            asked |= {"zones": list(ZONES), "strategy": self.strategy, "zone_wait_s": 600}
        is_specified = self._pulumi(lambda: self._describe({"main": wanted_props(**asked)}))
        self.broken_off = not (is_specified and self._pulumi(lambda: self.pulumi.up(wait_s=60, **asked)))

    @rule()
    def destroy(self) -> None:
        """What a resource's deletion needs to be deleted first stays where that fails."""
        self.broken_off = True
        steps = [self._pulumi(lambda: self._describe(None)), self._pulumi(self.pulumi.destroy)]
        identity = {"project": "grant", "owner": OWNER, "control_url": "gs://b/control"}
        if all(steps):
            self.destroyed = self._pulumi(lambda: self.identity.delete(OWNER, identity))
        self.broken_off = not self.destroyed

    @rule()
    def refresh(self) -> None:
        self._pulumi(self.pulumi.refresh)

    def _describe(self, slices: Any) -> None:
        documents = Away(self)
        found = documents.read(store.STACK)
        if slices is None:
            documents.delete(store.STACK, version=found.version)
        else:
            value = {"project": "grant", "owner": OWNER, "slices": slices, "inventory": to_json(INVENTORY)}
            documents.write(store.STACK, value, version=found.version)

    def _pulumi(self, action: Callable[[], Any]) -> bool:
        self.depth += 1
        self.is_locked = True
        before = len(self.control.journal())
        try:
            action()
        except (CloudTpuError, DocumentsError):
            return False
        finally:
            self.is_locked = False
            self.depth -= 1
            self.asked.append((before, len(self.control.journal())))
        return True

    # --- what befalls them ------------------------------------------------------------------------------------------

    @rule(event=st.sampled_from(EVENTS))
    def befall(self, event: str) -> None:
        self.happen(event)

    @rule(steps=st.integers(1, 60))
    def progress(self, steps: int) -> None:
        self.world.progress(steps)

    @rule()
    def crash(self) -> None:
        self.world.crash()

    @rule(seconds=st.sampled_from([5, 60, 600, 7200]))
    def time_passes(self, seconds: float) -> None:
        self.control.advance(seconds)

    # --- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def there_is_one_slice_at_most(self) -> None:
        """Of a race that was interrupted the next look takes one back."""
        assert self.strategy == "race" or len(self.live()) <= 1, self.live()

    def live(self) -> list[str]:
        """What is there of ours and nobody has asked to delete."""
        found = self.control.alive()["queuedResources"]
        ours = [each for each in found if request.is_owned(request.node_of(each), OWNER)]
        return [each["name"] for each in ours if request.state_of(each) != "DELETING"]

    @invariant()
    def what_is_destroyed_stays_so(self) -> None:
        if self.destroyed:
            assert self.cloud.alive() == []

    @invariant()
    def nothing_that_runs_was_deleted_but_by_pulumi(self) -> None:
        last: dict[str, str] = {}
        if self.strategy == "race":
            return  # whose losers may have come as well
        for index, line in enumerate(self.control.journal()):
            if line.state == "DELETING" and last.get(line.name) == "ACTIVE":
                assert any(start <= index < end for start, end in self.asked), line
            last[line.name] = line.state

    def teardown(self) -> None:
        """Once all is well again, the run is done, or is no longer kept and it is said why."""
        if not hasattr(self, "exits"):
            return
        try:
            self.plan, self.away_until_s = [], 0.0
            self.control.clear_faults()
            self.happen("restock")
            for _ in range(80):
                if self.world.runs:
                    assert len(self.live()) == 1, self.live()
                entry = store.read_wanted(Documents(self.folder)).get(RUN_ID)
                if (
                    entry is None
                    or entry.state == "ended"
                    or self.destroyed
                    or self.broken_off
                    or self.pulumi.state is None
                ):
                    break
                self.keeper()
                self.world.progress(EVERY + 5)
                self.control.advance(120.0)
            else:
                raise AssertionError(f"it is never brought back: {entry}\n{self.cloud.said}")
            if entry is not None and entry.state == "ended" and self.world.outcome != "done":
                assert "twice from" in entry.reason or "attempts" in entry.reason, entry.reason
            self.destroy()
            self.keeper()
            assert self.cloud.alive() == []
        finally:
            self.cloud.client.close()
            self.exits.close()
            assert threading.active_count() < self.threads + 20


@pytest.mark.parametrize(
    "event",
    [
        *("keeper", "keeper-dies", "suspended", "up", "destroy", "preempt"),
        *("vanish", "stock-out", "documents-away"),
    ],
)
def test_whatever_happens_at_any_moment_of_a_recovery(event: str) -> None:
    """At each of its sleeps, until there is none that is so late."""
    moment, is_over = 0, False
    while not is_over:
        moment += 1
        one = Machine()
        one.start(0.0)
        try:
            one.happen("preempt")
            one.plan = [(moment, event)]
            one.keeper()
            is_over, one.plan = bool(one.plan), []
            one.there_is_one_slice_at_most()
            one.what_is_destroyed_stays_so()
            one.nothing_that_runs_was_deleted_but_by_pulumi()
            if is_over:
                assert one.world.runs
        finally:
            one.teardown()
    assert moment > 5


@pytest.mark.parametrize("has_bucket", [True, False])
def test_what_a_keeper_asks_for_after_a_destruction_is_given_back(
    monkeypatch: pytest.MonkeyPatch, has_bucket: bool
) -> None:
    """It was stopped after it had looked at its lease, for longer than the destruction took."""
    one, create = Machine(), Client.create_queued_resource
    one.start(0.0)

    def gone(*_: Any, **__: Any) -> None:
        raise MissingError("there is no such bucket")

    def late(self: Client, parent: str, own_id: str, body: Any) -> Any:
        monkeypatch.setattr(Client, "create_queued_resource", create)
        one.destroy()
        if not has_bucket:
            monkeypatch.setattr(lease.Lease, "take", gone)
        return create(self, parent, own_id, body)

    try:
        one.happen("preempt")
        one.refresh()
        monkeypatch.setattr(Client, "create_queued_resource", late)
        one.keeper()
        assert one.destroyed
        one.what_is_destroyed_stays_so()
    finally:
        monkeypatch.undo()
        one.teardown()


@pytest.mark.parametrize(
    "sequences",
    [60, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1800)])],
)
def test_whatever_comes_in_whatever_order(sequences: int) -> None:
    few = settings(
        max_examples=sequences,
        stateful_step_count=12,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    run_state_machine_as_test(Machine, settings=few)
