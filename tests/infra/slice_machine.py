"""Any sequence of what users do with one slice and of what befalls the cloud, whichever API makes the slice.

Against a simulator over HTTP, through Google's own client; the engine is a model of its calls (`Stack`).
"""

import abc
import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from contracts.aliases import Json
from infra.slice_apis.retry import CloudTpuError
from rehearsal.simulated_cloud import ApiError
from tests.infra.cloud_tpu.lab import OWNER, Cloud, PowerCut, Stack


def own(name: str) -> st.SearchStrategy[Any]:
    """A strategy that the class of the machine has."""
    return st.runner().flatmap(lambda machine: getattr(machine, name))


class SliceMachine(RuleBasedStateMachine):
    """`left`: an up was cut off or has failed, so that there may be what no state knows of.

    configs: of the slice. events: for `befalls`. methods: patterns of those that fail. pool: of the slice's chips.
    """

    configs: ClassVar[st.SearchStrategy[Json]]
    events: ClassVar[st.SearchStrategy[str]]
    methods: ClassVar[st.SearchStrategy[str]]
    pool: ClassVar[str]

    @abc.abstractmethod
    def open_cloud(self, chips: int) -> contextlib.AbstractContextManager[Cloud]: ...

    @abc.abstractmethod
    def befalls(self, event: str) -> None:
        """Something happens at Google; it may raise ApiError or ValueError where a state does not allow it."""

    @abc.abstractmethod
    def vanish(self, name: str) -> None: ...

    @abc.abstractmethod
    def ours(self) -> Collection[str]:
        """The names of what has the owner's mark."""

    @abc.abstractmethod
    def others(self) -> Collection[str]:
        """The names of what has not."""

    @abc.abstractmethod
    def require_whole(self) -> None:
        """The state has what was asked for, which is ACTIVE."""

    @initialize(chips=st.sampled_from([0, 16, 64, 64]))
    def start(self, chips: int) -> None:
        self.exits = contextlib.ExitStack()
        self.cloud = self.exits.enter_context(self.open_cloud(chips))
        self.control = self.cloud.control
        self.stack = Stack(cloud=self.cloud)
        self.left = False
        self.asked: list[tuple[int, int]] = []  # what the journal has of deletions that the engine asked for
        self.config: Json = {}
        delete = self.cloud.provider.delete

        def asked(_id: str, props: Json) -> None:
            before = len(self.control.journal())
            try:
                delete(_id, props)
            finally:
                self.asked.append((before, len(self.control.journal())))

        self.cloud.provider.delete = asked  # type: ignore[assignment,method-assign]

    # --- what a user does -------------------------------------------------------------------------------------------

    @rule(config=st.none() | own("configs"))
    def up(self, config: Json | None) -> None:
        """With the same configuration as before, or another."""
        self.config = self.config if config is None else config
        before = self.stack.state
        self.act(lambda: self.stack.up(wait_s=60, **self.config))
        assert self.left or self.stack.state is before or self.ours()

    @rule(config=st.none() | own("configs"), sleeps=st.integers(1, 8), later_s=st.sampled_from([0, 600]))
    def interrupted_up(self, config: Json | None, sleeps: int, later_s: float) -> None:
        self.config = self.config if config is None else config

        def cut() -> None:
            raise PowerCut

        self.cloud.at_sleep(sleeps, cut)
        try:
            self.act(lambda: self.stack.up(wait_s=60, **self.config))
        except PowerCut:
            self.left = True
        self.control.advance(later_s)

    @rule(event=own("events"), sleeps=st.integers(1, 5))
    def up_while_something_happens(self, event: str, sleeps: int) -> None:
        self.cloud.at_sleep(sleeps, lambda: self.befall(event))
        self.up(None)

    @rule()
    def refresh(self) -> None:
        before = len(self.control.journal())
        self.act(self.stack.refresh)
        assert "DELETING" not in [line.state for line in self.control.journal()[before:]]

    @rule()
    def destroy(self) -> None:
        """Only of the slice; its remains that no state knows of go with the stack's identity (teardown)."""
        self.act(self.stack.destroy)

    # --- what befalls the cloud -------------------------------------------------------------------------------------

    @rule(chips=st.sampled_from([0, 4, 8, 16, 32, 64]))
    def set_capacity(self, chips: int) -> None:
        self.control.set_capacity(self.pool, chips)

    @rule(event=own("events"))
    def befall(self, event: str) -> None:
        with contextlib.suppress(ApiError, ValueError):
            self.befalls(event)

    @rule(seconds=st.sampled_from([1, 3, 10, 600]))
    def time_passes(self, seconds: float) -> None:
        self.control.advance(seconds)

    @rule(
        kind=st.sampled_from(["too-many-requests", "unavailable", "cut-before", "cut-after", "slow"]),
        methods=own("methods"),
        times=st.integers(1, 3),
    )
    def inject(self, kind: Any, methods: str, times: int) -> None:
        """Requests that go wrong and that a second try, or a third, gets through."""
        self.control.inject(kind, methods, times, 0.01 if kind == "slow" else 0.0)

    @rule()
    def the_others_go(self) -> None:
        for name in self.others():
            with contextlib.suppress(ApiError):
                self.vanish(name)

    # --- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def what_no_state_knows_of_is_the_work_of_an_interruption(self) -> None:
        if self.stack.state is None and not self.left:
            assert not self.ours()

    def teardown(self) -> None:
        """Once all is well again, an up makes what is asked for, and to destroy the stack leaves nothing of ours."""
        if not hasattr(self, "cloud"):
            return
        with self.exits:
            self.control.clear_faults()
            self.cloud.while_sleeping = lambda: None
            self.the_others_go()
            self.control.set_capacity(self.pool, 256)
            with _refusal_of_what_runs():
                self.stack.refresh()
                self.stack.up(wait_s=600, **self.config)
                self.require_whole()
            self.stack.destroy()
            self.cloud.lifecycle().remove_all("grant", OWNER)
            assert not self.ours()

    def act(self, action: Callable[[], None]) -> None:
        """What goes wrong for a reason is an error in words, and nothing of others is deleted."""
        others, before = self.others(), len(self.control.journal())
        try:
            action()
        except CloudTpuError:
            self.left = True
        finally:
            self.cloud.while_sleeping = lambda: None
            self.require_untouched(others, before)

    def require_untouched(self, names: Collection[str], since: int) -> None:
        """They may have gone by themselves, for want of chips; nobody but we could have had them deleted."""
        gone = set()
        for line in self.control.journal()[since:]:
            assert not (line.state == "DELETING" and line.name in names and line.name not in gone), line
            if line.state == "gone":
                gone.add(line.name)


@contextlib.contextmanager
def _refusal_of_what_runs() -> Iterator[None]:
    """An interrupted up has made an ACTIVE one that the present configuration does not want: only a person decides."""
    try:
        yield
    except CloudTpuError as error:
        assert "is ACTIVE. Nothing that runs" in str(error) or "its other nodes run" in str(error), error
