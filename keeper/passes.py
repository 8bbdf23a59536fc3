"""One pass over all wanted runs, and what it leads to: every minute, by a timer, in a process of its own.

While all is well it is a few requests and changes nothing. Where something is not, its slice's lease is taken and
everything is looked at anew: what is done follows from what there is, so it does not matter who was killed when.

News of runs are written with what has happened, sent beside the pass, and sent again until they were taken. A keeper
that is killed between two of these steps loses no news, and may send some twice.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from console import notify
from console.notify import Event, Kind
from contracts.durations import HOUR_S
from contracts.errors import RequestError
from infra import lease
from infra.cloud_tpu.request import Spec
from infra.cloud_tpu.retry import Backoff, CloudTpuError, LostAgainError
from infra.cloud_tpu.zones import WRONG
from infra.documents import Documents, DocumentsError, MissingError
from infra.lease import Lease, LeaseHeldError, LeaseLostError
from keeper import hosts as hosts_
from keeper import rules, slices, store
from keeper.rules import Sign
from keeper.store import Stack, Wanted
from launch import launch as launching
from launch.hosts import HostError, HostsError, in_thread
from launch.launch import LaunchFailed
from launch.runs import Run

if TYPE_CHECKING:
    from infra.cloud_tpu.client import Client
    from keeper.hosts import Examined, Hosts

Say = Callable[[str], None]
AT_ONCE = 8
"""Slices that are seen to at the same time."""
LOOK_EVERY_S = 30.0
"""With a timer of a minute, and two looks at least, a lost slice is found within half of one."""
LOOKS = 60
"""At most, of a pass in which something is being done all the time. What is under way then is waited for."""
REST = ""
"""What else a pass does, where the others under way have the name of a slice."""
MOST_PREPARED = 12
"""Tries to prepare the hosts of one run, one after another; with the growing pauses that is some seven hours."""
NEWS_LIFE_S = 6 * HOUR_S
"""For so long an event is sent again, at each pass, to a channel that does not take it."""
NEWS_LIMIT_S = 30.0
"""How long the end of a pass waits for what is being sent."""
WELL = Sign(beat_age_s=0.0, has_result=False)
REFUSALS = (CloudTpuError, DocumentsError, HostError, HostsError, RequestError)
"""What may be better at the next look."""


OTHER_CODE = ", with the code that the keeper was installed with, as the run directory does not have its own"
LOST = "Its slice is lost. The keeper asks for it again."
REMOVED = (
    "its slice was removed by `pulumi destroy`; `pulumi up` makes it again, `fab unkeep` forgets the run"
)

type Item = Mapping[str, Any]
"""One event in `Wanted.news`. event: of console.notify. since_s: its time. told: channels that have taken it."""


class SliceLostError(Exception):
    """The slice was lost while its hosts were waited for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Means:
    """What a pass works with. hold: `infra.lease.held`, of a slice by its name. at_once: 1 is without threads."""

    documents: Documents
    client: Callable[[], Client]
    backoff: Backoff
    hosts: Hosts
    say: Say
    hold: Callable[..., contextlib.AbstractContextManager[Lease]]
    at_once: int = AT_ONCE

    @functools.cached_property
    def post(self) -> Post:
        return Post(self.documents, self.hosts, self.say)

    @functools.cached_property
    def wanted(self) -> dict[str, Wanted]:
        """All entries as the pass finds them. Raises DocumentsError."""
        return store.read_wanted(self.documents)


def means_of(documents: Documents, say: Say) -> Means:
    """Return what a pass on this machine works with."""
    backoff = Backoff(say=say)

    @functools.cache
    def client() -> Client:
        from infra.cloud_tpu import client, settings  # this machine's own runs need none

        return client.Client(settings.read(lambda _: None), backoff)

    return Means(
        documents=documents,
        client=client,
        backoff=backoff,
        hosts=hosts_.Hosts(say),
        say=say,
        hold=lambda name, **how: lease.held(Lease(documents, name, lease.myself("the keeper")), **how),
    )


def run_pass(means: Means, rest: Callable[[], None] = lambda: None) -> None:
    """Look at all wanted runs, and act. While something is being done, look for what else is lost, and act on that.

    Every other look is for slices alone. rest: what else a pass does, beside the looks.

    Raises:
        DocumentsError: what is wanted cannot be read.
    """
    looks = Looks(means, rest)
    means.post.send(means.wanted.values())
    with ThreadPoolExecutor(means.at_once + 1) as pool:
        begin = _carried_out if means.at_once == 1 else pool.submit
        for number in range(LOOKS):
            looks.look(number, begin)
            if looks.are_over(number):
                break
    means.post.settle()


class Looks:
    """The looks of one pass."""

    def __init__(self, means: Means, rest: Callable[[], None]) -> None:
        self._means, self._rest, self._began_s = means, rest, means.backoff.now()
        self._entries, self._has_begun = means.wanted, False
        self._busy: dict[str, Future[None]] = {}
        """What is being done, by the name of its slice; see REST."""

    def look(self, number: int, begin: Callable[[Callable[[], None]], Future[None]]) -> None:
        """Begin what is to be done now, and wait for it until the next look."""
        means, busy, is_full = self._means, self._busy, number % 2 == 0
        try:
            if number and (is_full or self._has_begun):
                self._entries = store.read_wanted(means.documents)
            found = _troubled(self._entries, means, is_full=is_full)
            begun = [each for each in found if each.name not in busy]
            self._has_begun = bool(begun)
            for attempt in begun[: means.at_once - len(busy.keys() - {REST})]:
                busy[attempt.name] = begin(attempt.attend)
            if is_full:
                store.note_look(means.documents)
        except DocumentsError as error:
            means.say(str(error))
        self._wait(number)
        if is_full and REST not in busy:
            busy[REST] = begin(self._rest)
            self._wait(number)

    def are_over(self, number: int) -> bool:
        """Whether there is nothing more to be done; if there is, it is time for the next look then."""
        for name in [name for name, each in self._busy.items() if each.done()]:
            self._busy.pop(name).result()
        if not self._busy and (number > 0 or not _projects(self._entries)):
            return True
        self._means.backoff.sleep(self._left_s(number))
        return False

    def _wait(self, number: int) -> None:
        # On this machine one thing is done after the other: a launch changes the directory of the process.
        limit_s = self._left_s(number) if _projects(self._entries) else None
        concurrent.futures.wait(self._busy.values(), limit_s)

    def _left_s(self, number: int) -> float:
        next_s = self._began_s + (number + 1) * LOOK_EVERY_S
        return max(0.0, next_s - self._means.backoff.now())


def _carried_out(act: Callable[[], None]) -> Future[None]:
    done: Future[None] = Future()
    act()
    done.set_result(None)
    return done


def _projects(entries: Mapping[str, Wanted]) -> set[str]:
    return {each.project for each in entries.values() if each.project is not None and each.state != "ended"}


def _troubled(entries: Mapping[str, Wanted], means: Means, *, is_full: bool) -> list[Attempt]:
    """Return what is to be done about slices and runs that are not well. is_full: as their signs of life say, too."""
    wanted, projects = [each for each in entries.values() if each.state != "ended"], _projects(entries)
    if not (is_full or projects):
        return []
    signs = means.hosts.signs(wanted) if is_full else dict.fromkeys(entries, WELL)
    found = slices.listed(means.client(), projects, means.say) if projects else {}
    now_s = means.documents.now_s()

    stack = functools.cache(lambda: store.readable_stack(means.documents))

    def standing_of(each: Wanted) -> rules.Slice:
        try:
            return slices.standing(each, found, stack, lambda: means.client().now())
        except DocumentsError as error:
            means.say(str(error))
            return "unread"

    standing = {each.run_id: standing_of(each) for each in wanted}
    troubled = [
        each
        for each in wanted
        if rules.glance(each, standing[each.run_id], signs.get(each.run_id), now_s).do != "nothing"
    ]
    by_slice = sorted(troubled, key=lambda each: (each.slice, each.added_s))
    groups = [list(group) for _, group in itertools.groupby(by_slice, key=lambda each: each.slice)]
    return [Attempt(means, group, standing[group[0].run_id], signs) for group in groups]


class Attempt:
    """What one look does about one slice and the runs that want it."""

    def __init__(
        self, means: Means, group: Sequence[Wanted], standing: rules.Slice, signs: Mapping[str, Sign]
    ) -> None:
        self._means, self._group, self._standing, self._signs = means, list(group), standing, signs
        self.name = group[0].slice
        self._asked: Stack | None = None
        """Whose slice was asked for."""
        self._documents, self._hosts, self._post = means.documents, means.hosts, means.post

    def attend(self) -> None:
        """See to the slice and the runs, unless somebody else is at it."""
        try:
            if self._standing in ("none", "active") and self._all_run():
                return
            with self._means.hold(self.name) as mine:
                self._mend(mine)
        except LeaseHeldError as error:
            self._means.say(str(error))
        except LeaseLostError as error:
            self._means.say(str(error))
            self._give_up()
        except REFUSALS as error:
            self._means.say(f"{self.name}: {error}")
            with contextlib.suppress(DocumentsError):
                for each in self._group:
                    self._note(each, "failed", str(error))

    def _give_up(self) -> None:
        """Withdraw what was asked for after the lease was lost, if `pulumi destroy` has removed the slice meanwhile.

        A process that was stopped between looking at its lease and asking can be so late. A bucket that is not there
        any more has gone with the stack, and nobody else acts without it; but what was active before stays.
        """
        if self._asked is None:
            return
        means, withdraw = self._means, functools.partial(self._withdraw, self._asked)
        try:
            with contextlib.suppress(MissingError):
                with means.hold(
                    self.name, patience_s=lease.PATIENCE_S, outage_s=lease.OUTAGE_LIMIT_S
                ) as mine:
                    if mine.removed:
                        withdraw(mine)
                return
            if self._standing not in ("active", "doubled"):
                withdraw(None)
        except (LeaseHeldError, LeaseLostError, *REFUSALS) as error:
            how = Spec.of(self._asked.slices[self.name]).how_to_delete
            means.say(
                f"{self.name}: what was asked for may be left: {error}\nIf the stack was destroyed, delete it: {how}"
            )

    def _withdraw(self, stack: Stack, mine: Lease | None) -> None:
        slices.withdraw(self._means.client(), self._means.backoff, stack, self.name, mine)

    # --- as they are ------------------------------------------------------------------------------------------------

    def _stack(self) -> Stack | None:
        """The stack as it is now; None: this machine."""
        if self._group[0].project is None:
            return None
        stack = slices.with_newest(store.read_stack(self._documents), self._documents)
        stack.take_environment()
        return stack

    def _all_run(self) -> bool:
        """Whether all runs are doing what they should, as their hosts say."""
        try:
            stack = self._stack()
            for each in self._group:
                if each.for_queue or each.unkept:
                    return False
                found = self._hosts.examine(each, self._hosts.target(each, stack), self._now_s())
                if rules.next_step(each, found.facts, self._now_s()).do != "nothing":
                    return False
                self._is_well(each, found)
        except REFUSALS:
            return False  # what is wrong is said once the lease is ours
        return True

    def _is_well(self, wanted: Wanted, found: Examined) -> None:
        if wanted.state != "watched" and found.facts.state in rules.ACTIVE:
            self._note(wanted, "runs", f"it is {found.facts.state}", state="watched", slice_lost=False)

    # --- to have the slice, and the run on it -----------------------------------------------------------------------

    def _mend(self, mine: Lease) -> None:
        fresh = {
            name: each for name, each in store.read_wanted(self._documents).items() if each.state != "ended"
        }
        self._group = [fresh[each.run_id] for each in self._group if each.run_id in fresh]
        endings = {each.run_id: found for each in self._group if (found := self._ending(each)) is not None}
        is_awaited = any(each.slice == self.name and name not in endings for name, each in fresh.items())
        if not is_awaited and self._standing in ("doubled", *rules.QUEUED):
            self._let_go(mine)
        for each in [each for each in self._group if each.run_id in endings]:
            self._end(each, *endings[each.run_id])
            self._group.remove(each)
        if not self._group:
            return
        stack, is_new = self._stack(), False
        if stack is not None:
            if mine.removed or self.name not in stack.slices:
                for each in self._group:
                    self._note(each, "waits", REMOVED, state="waiting")
                return
            were = next(each for each in stack.inventory.slices if each.name == self.name)
            if not self._ask(stack, mine):
                return
            stack = slices.with_newest(stack, self._documents)
            after = next(each for each in stack.inventory.slices if each.name == self.name)
            is_new = bool(were.hosts) and were.hosts != after.hosts
        for each in self._group:
            self._bring_back(each, stack, mine, is_new=is_new)

    def _ending(self, wanted: Wanted) -> tuple[str, Examined | None] | None:
        """Return why a run is kept no more, and the run, as far as that can be seen without hosts."""
        is_lost = self._standing in ("absent", "lost")  # which is no fault of the run's own
        sign = self._signs.get(wanted.run_id)
        if not wanted.unkept and (is_lost or (sign is not None and sign.has_result)):
            found = self._hosts.without_hosts(wanted)
            if found is not None:
                lost = dataclasses.replace(wanted, slice_lost=wanted.slice_lost or is_lost)
                step = rules.next_step(lost, found.facts, self._now_s())
                if step.do == "end":
                    return step.reason, found
        step = rules.glance(wanted, self._standing, sign, self._now_s())
        return (step.reason, None) if step.do == "end" else None

    def _let_go(self, mine: Lease) -> None:
        """Withdraw what was asked for and waits, or what a race has left: nobody looks at the slice after its last run.

        What others than the keeper have asked for stays.
        """
        stack = self._stack()
        if stack is None or mine.removed or self.name not in stack.slices:
            return
        if self._standing == "doubled":
            slices.have(
                self._means.client(),
                self._means.backoff,
                stack,
                self.name,
                mine,
                wait_s=0.0,
                lost=self._is_lost,
            )
        elif any(each.state == "waiting" or each.slice_lost for each in self._group):
            self._withdraw(stack, mine)

    def _ask(self, stack: Stack, mine: Lease) -> bool:
        """See to it that the slice is there; False: not now."""
        now_s, is_queued = self._now_s(), self._standing in rules.QUEUED
        if self._standing in ("absent", "lost"):
            self._note_loss()
        if self._standing == "active" and all(
            each.prepares and each.not_before_s > now_s for each in self._group
        ):
            return False
        self._asked = stack
        try:
            made = slices.have(
                self._means.client(),
                self._means.backoff,
                stack,
                self.name,
                mine,
                # One that waits already is looked at, so that the next zone has its turn.
                wait_s=0.0 if is_queued else slices.WAIT_S,
                lost=self._is_lost,
            )
        except slices.UnpublishedError as error:
            for each in self._group:
                if self._may_prepare(each):
                    self._note(each, "asked", str(error), state="recovering")
            return False
        except LostAgainError as error:
            for each in self._group:
                self._note(each, "lost", str(error), slice_lost=True)
            return False
        except CloudTpuError as error:
            if error.status in WRONG:
                for each in self._group:
                    self._end(each, f"its slice would be refused again: {error}", None)
                return False
            for each in self._group:
                failures = each.failures + 1
                until_s = self._now_s() + rules.pause_s(failures)
                self._note(
                    each, "asked", str(error), state="waiting", failures=failures, not_before_s=until_s
                )
            return False
        if made is None:
            for each in self._group:
                self._note(each, "waits", f"no capacity for {self.name} yet", state="waiting")
            return False
        slices.record(self._documents, made)
        return True

    def _is_lost(self, why: str) -> None:
        """Take note that the slice is lost, which a listing may not show: it says ACTIVE, and a node of it is gone."""
        if self._standing not in ("absent", "lost"):
            self._means.say(f"{self.name} is lost: {why}")
            self._standing = "lost"
            self._note_loss()

    def _note_loss(self) -> None:
        for number, each in enumerate(self._group):
            step = rules.glance(each, self._standing, None, self._now_s())
            if step.do == "ask":
                told = None
                if each.state == "watched" and not each.for_queue:  # the queue tells of its runs
                    told = self._post.item(each, "preempted", LOST)
                self._group[number] = self._note(
                    each, "asks", step.reason, told, state="recovering", slice_lost=True
                )

    def _bring_back(self, wanted: Wanted, stack: Stack | None, mine: Lease, *, is_new: bool) -> None:
        def reopen() -> Any:
            return self._hosts.target(wanted, stack)

        if is_new:
            wanted = self._note(wanted, "has a new slice", f"{self.name} was made again", slice_lost=True)
        target = reopen()
        is_doubtful = wanted.slice_lost or wanted.failures > 1 or wanted.prepares > 0
        if stack is not None and (is_doubtful or self._hosts.silent(target)):
            if not self._may_prepare(wanted):
                return
            try:
                target = self._hosts.prepare(reopen, lambda: self._require_there(wanted))
            except SliceLostError as error:
                # No fault of the hosts: it is asked for again at the next look, without a pause.
                prepares, until_s = wanted.prepares, wanted.not_before_s
                self._note(
                    wanted, "lost", str(error), slice_lost=True, prepares=prepares, not_before_s=until_s
                )
                return
            self._change(wanted, lambda now: dataclasses.replace(now, prepares=0))
        if wanted.for_queue:
            reason = f"{self.name} is there for the queue"
            self._note(
                wanted, "is there", reason, state="watched", slice_lost=False, failures=0, not_before_s=0.0
            )
            return
        found = self._hosts.examine(wanted, target, self._now_s())
        step = rules.next_step(wanted, found.facts, self._now_s())
        if step.do == "end":
            self._end(wanted, step.reason, found)
        elif step.do == "resume":
            self._resume(wanted, found, target, step.reason, mine)
        elif step.do == "stop":
            self._hosts.stop(found.run, target)
            self._note(wanted, "stops", "`fab stop` asked for it")
        elif found.facts.state in rules.ACTIVE:
            self._is_well(wanted, found)
        else:
            self._note(wanted, "waits", step.reason)

    def _require_there(self, wanted: Wanted) -> None:
        """Raise SliceLostError where the slice whose hosts are waited for has been lost meanwhile."""
        assert wanted.project is not None
        found = slices.listed(self._means.client(), {wanted.project}, self._means.say)
        stands = slices.standing(wanted, found, lambda: self._asked, lambda: self._means.client().now())
        if stands in ("absent", "lost"):
            raise SliceLostError(f"{self.name} was lost while its hosts were being prepared")

    def _may_prepare(self, wanted: Wanted) -> bool:
        """Count a try to prepare hosts, which cost money while they cannot be: the limits of a run hold for it too."""
        if wanted.not_before_s > self._now_s():
            return False
        if refusal := rules.STOPPED if wanted.stop else rules.refusal(wanted, self._now_s()):
            self._end(wanted, refusal, None)
            return False
        prepares = wanted.prepares + 1
        if prepares > MOST_PREPARED:
            self._end(wanted, f"its hosts could not be prepared {MOST_PREPARED} times", None)
            return False
        until_s = self._now_s() + rules.pause_s(prepares)
        counted = self._change(
            wanted, lambda now: dataclasses.replace(now, prepares=prepares, not_before_s=until_s)
        )
        return counted is not None

    def _resume(self, wanted: Wanted, found: Examined, target: Any, reason: str, mine: Lease) -> None:
        now_s = self._now_s()
        mine.require()
        loss = notify.KIND_OF_STATE.get("preempted" if wanted.slice_lost else found.facts.state)
        told = self._post.item(wanted, loss, "", found.run) if wanted.state == "watched" else None
        counted = self._change(
            wanted,
            lambda now: rules.resumed(now, found.facts, now_s).noted(
                "resumes", reason, now_s, news=_more(now, told)
            ),
        )
        if counted is None:
            return  # nobody wants it any more
        self._post.send([counted])
        self._means.say(f"{wanted.run_id}: {reason}")
        try:
            run = self._hosts.resume(found.run, target, self._now_s, mine.require)
        except hosts_.WrongRequestError as error:
            self._end(counted, f"it cannot be resumed: {error}", found)
        except (LaunchFailed, *REFUSALS) as error:
            self._means.say(f"{wanted.run_id}: {error}")
            given_back = _as_before(wanted) if launching.is_in_use(error) else {}
            self._written(self._note(counted, "did not start", str(error), **given_back), found)
        else:
            told = self._post.item(counted, "recovered", "", run)
            codes = {each.described["code"]["bundle"] for each in (found.run, run)}
            reason = f"attempt {run.attempt}" + ("" if len(codes) == 1 else OTHER_CODE)
            wanted = self._note(counted, "runs", reason, told, state="watched", slice_lost=False)
            self._written(wanted, found)

    # --- what is written --------------------------------------------------------------------------------------------

    def _now_s(self) -> float:
        return self._documents.now_s()

    def _change(self, wanted: Wanted, function: Callable[[Wanted], Wanted]) -> Wanted | None:
        """Change an entry, unless somebody has taken it back or ended it meanwhile; then None."""

        def change(now: Wanted | None) -> Wanted | None:
            return now if now is None or not now.is_kept else function(now)

        fresh = store.change_wanted(self._documents, wanted.run_id, change)
        return fresh if fresh is not None and fresh.is_kept else None

    def _note(
        self, wanted: Wanted, act: str, reason: str, told: Item | None = None, **changes: Any
    ) -> Wanted:
        """Write a line about a run, unless that was the last one. told: what people are told of it."""
        now_s = self._now_s()

        def note(now: Wanted) -> Wanted:
            last, more = (now.acts[-1] if now.acts else {}), {**changes, "news": _more(now, told)}
            if (last.get("act"), last.get("reason")) == (act, reason):
                return dataclasses.replace(now, reason=reason, **more)
            return now.noted(act, reason, now_s, **more)

        fresh = self._change(wanted, note) or wanted
        self._post.send([fresh])
        return fresh

    def _end(self, wanted: Wanted, reason: str, found: Examined | None) -> None:
        self._means.say(f"{wanted.run_id}: no longer kept: {reason}")
        now_s = self._now_s()
        told = self._post.item(wanted, *_news_of_end(wanted, found, reason), found.run if found else None)

        def end(now: Wanted | None) -> Wanted | None:
            if wanted.unkept:
                return None if now is None or now.unkept else now
            return now and now.noted("ends", reason, now_s, state="ended", news=_more(now, told))

        ended = store.change_wanted(self._documents, wanted.run_id, end)
        if ended is not None:
            self._post.send([ended])
        if ended is not None and found is not None:
            self._written(ended, found)

    def _written(self, wanted: Wanted, found: Examined) -> None:
        try:
            self._hosts.write_acts(wanted, found.run)
        except (HostError, OSError) as error:
            self._means.say(f"warning: {wanted.run_id}: keeper.jsonl could not be written: {error}")


def _more(now: Wanted, told: Item | None) -> tuple[Item, ...]:
    return now.news if told is None else (*now.news, told)


def _as_before(wanted: Wanted) -> dict[str, Any]:
    """What `rules.resumed` has counted, but for the pause, as of a try that was none."""
    return {name: getattr(wanted, name) for name in ("attempts_left", "last_restored_step", "failures")}


def _news_of_end(wanted: Wanted, found: Examined | None, reason: str) -> tuple[Kind | None, str]:
    """Return which event it is that a run is no longer kept, and its text. found: None where its hosts are gone."""
    if wanted.stop or wanted.unkept:
        return None, ""
    if found is not None and found.facts.state in ("done", "stopped"):
        return notify.kind_of(found.run, found.facts.state), ""
    cost_usd = found.facts.cost_usd if found is not None else None
    max_usd = rules.limit_usd(wanted, found.facts) if found is not None else None
    is_spent = max_usd is not None and cost_usd is not None and cost_usd >= max_usd
    return "out of budget" if is_spent else "failed", f"The keeper has given it up: {reason}."


class Post:
    """What sends the news of one pass."""

    def __init__(self, documents: Documents, hosts: Hosts, say: Callable[[str], None]) -> None:
        self._documents, self._hosts, self._say = documents, hosts, say
        self._sending: dict[tuple[str, str], concurrent.futures.Future[None]] = {}

    @functools.cached_property
    def is_wanted(self) -> bool:
        """Whether a channel is set. Raises DocumentsError: nobody can tell, so that no news may be dropped."""
        stack = store.readable_stack(self._documents)
        if stack is not None:
            stack.take_environment()
        return bool(notify.channels(os.environ))

    def item(self, wanted: Wanted, kind: Kind | None, text: str, run: Run | None = None) -> Item | None:
        """Return what an entry holds of an event until it was sent; None where nobody is to be told.

        Raises:
            DocumentsError: as `is_wanted`.
        """
        if kind is None or not self.is_wanted:
            return None
        event = Event(kind=kind, text=text, run=wanted.run_id, name=wanted.name, stack=wanted.stack)
        with contextlib.suppress(HostError, RequestError, OSError):  # then less is known of the run
            if run is None and (found := self._hosts.without_hosts(wanted)) is not None:
                run = found.run
            if run is not None:
                event = notify.event_of(run, kind, text)
        return {"event": dataclasses.asdict(event), "since_s": self._documents.now_s(), "told": []}

    def send(self, several: Iterable[Wanted]) -> None:
        """Begin to send what these entries have, unless that has begun."""
        for wanted in several:
            for item in wanted.news:
                key = (wanted.run_id, str(item["event"]))
                if key not in self._sending:
                    self._sending[key] = in_thread(functools.partial(self._deliver, wanted, item))

    def settle(self) -> None:
        """Wait until all is sent, or not taken; what takes longer is sent again by the next pass."""
        for future in concurrent.futures.wait(self._sending.values(), NEWS_LIMIT_S).done:
            if error := future.exception():
                self._say(f"news are sent again by the next pass: {error}")
        self._sending.clear()

    def _deliver(self, wanted: Wanted, item: Item) -> None:
        event, told, problems = Event(**item["event"]), {*item["told"]}, list[str]()
        if self.is_wanted:
            told, problems = notify.deliver(event, self._hosts.directory(wanted), told)
        for problem in problems:
            self._say(f"{wanted.run_id}: not notified by {problem}")
        is_over = not problems or self._documents.now_s() - float(item["since_s"]) > NEWS_LIFE_S
        rest = () if is_over else ({**item, "told": sorted(told)},)

        def change(now: Wanted | None) -> Wanted | None:
            if now is None:
                return None
            others = (each for each in now.news if each["event"] != item["event"])
            return dataclasses.replace(now, news=(*others, *rest))

        if rest != (item,):
            store.change_wanted(self._documents, wanted.run_id, change)
