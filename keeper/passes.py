"""One look at all wanted runs, and what it leads to: every minute, by a timer, in a process of its own.

While all is well a look is a few requests and changes nothing. Where something is not, its slice's lease is taken and
everything is looked at anew: what is done follows from what there is, so it does not matter who was killed when.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from contracts.errors import RequestError
from infra import lease
from infra.cloud_tpu.retry import Backoff, CloudTpuError, LostAgainError
from infra.cloud_tpu.zones import WRONG
from infra.documents import Documents, DocumentsError
from infra.lease import Lease, LeaseHeldError, LeaseLostError
from keeper import hosts as hosts_
from keeper import news, rules, slices, store
from keeper.news import Post
from keeper.rules import Sign
from keeper.store import Stack, Wanted
from launch import launch as launching
from launch import notify
from launch.hosts import HostError, HostsError
from launch.launch import LaunchFailed

if TYPE_CHECKING:
    from infra.cloud_tpu.client import Client
    from keeper.hosts import Examined, Hosts

Say = Callable[[str], None]
AT_ONCE = 8
"""Slices that are seen to at the same time."""
LOOKS_S = (0.0, 30.0)
"""Of one pass: with a timer of a minute a lost slice is found within half of one."""
MOST_PREPARED = 12
"""Tries to prepare the hosts of one run, one after another; with the growing pauses that is some seven hours."""
WELL = Sign(beat_age_s=0.0, has_result=False)
REFUSALS = (CloudTpuError, DocumentsError, HostError, HostsError, RequestError)
"""What may be better at the next look."""


class SliceLostError(Exception):
    """The slice was lost while its hosts were waited for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Means:
    """What a pass works with. lease_of: of a slice, by name. hold: as `infra.lease.held`."""

    documents: Documents
    client: Callable[[], Client]
    backoff: Backoff
    hosts: Hosts
    say: Say
    lease_of: Callable[[str], Lease]
    hold: Callable[..., contextlib.AbstractContextManager[Lease]] = lease.held
    at_once: int = AT_ONCE

    @functools.cached_property
    def post(self) -> Post:
        return Post(self.documents, self.hosts, self.say)


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
        lease_of=lambda name: Lease(documents, name, lease.myself("the keeper")),
    )


def run_pass(means: Means, *, looks_s: Sequence[float] = LOOKS_S) -> bool:
    """Look at all wanted runs, and act; return whether any of them is a slice that the queue wants.

    Raises:
        DocumentsError: what is wanted cannot be read.
    """
    began_s = means.backoff.now()
    entries = store.read_wanted(means.documents)
    means.post.send(entries.values())
    _looks({name: each for name, each in entries.items() if each.state != "ended"}, means, began_s, looks_s)
    means.post.settle()
    return any(each.for_queue for each in entries.values())


def _looks(wanted: dict[str, Wanted], means: Means, began_s: float, looks_s: Sequence[float]) -> None:
    projects = {each.project for each in wanted.values() if each.project is not None}
    signs = means.hosts.signs([*wanted.values()])
    for number, look_s in enumerate(looks_s):
        if number and not projects:
            return
        means.backoff.sleep(max(0.0, began_s + look_s - means.backoff.now()))
        found = slices.listed(means.client(), projects, means.say) if projects else {}
        seen = signs if number == 0 else dict.fromkeys(wanted, WELL)
        if _look([*wanted.values()], found, seen, means) and number + 1 < len(looks_s):
            wanted = {
                run_id: each
                for run_id, each in store.read_wanted(means.documents).items()
                if run_id in wanted
            }


def _look(
    wanted: Sequence[Wanted],
    found: Mapping[str, list[dict[str, Any]]],
    signs: Mapping[str, Sign],
    means: Means,
) -> bool:
    """Act on what was seen; False: all is well."""
    now_s = means.documents.now_s()

    @functools.cache
    def stack() -> Stack | None:
        try:
            return store.find_stack(means.documents)
        except DocumentsError:
            raise
        except RequestError:
            return None  # said by who cannot do without

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
    attempts = [Attempt(means, group, standing[group[0].run_id], signs) for group in groups]
    if means.at_once == 1:
        for each in attempts:
            each.attend()
    elif attempts:
        with concurrent.futures.ThreadPoolExecutor(means.at_once) as pool:
            list(pool.map(Attempt.attend, attempts))
    return bool(attempts)


class Attempt:
    """What one look does about one slice and the runs that want it."""

    def __init__(
        self, means: Means, group: Sequence[Wanted], standing: rules.Slice, signs: Mapping[str, Sign]
    ) -> None:
        self._means, self._group, self._standing, self._signs = means, list(group), standing, signs
        self._name, self._others = group[0].slice, False
        self._asked: Stack | None = None
        """Whose slice was asked for."""
        self._documents, self._hosts, self._post = means.documents, means.hosts, means.post

    def attend(self) -> None:
        """See to the slice and the runs, unless somebody else is at it."""
        try:
            if self._standing in ("none", "active") and self._all_run():
                return
            with self._means.hold(self._means.lease_of(self._name)) as mine:
                self._mend(mine)
        except LeaseHeldError as error:
            self._means.say(str(error))
        except LeaseLostError as error:
            self._means.say(str(error))
            self._give_up()
        except REFUSALS as error:
            self._means.say(f"{self._name}: {error}")
            with contextlib.suppress(DocumentsError):
                for each in self._group:
                    self._note(each, "failed", str(error))

    def _give_up(self) -> None:
        """Withdraw what was asked for after the lease was lost, if `pulumi destroy` has removed the slice meanwhile.

        A process that was stopped between looking at its lease and asking can be so late.
        """
        if self._asked is None:
            return
        means, name = self._means, self._name
        patience = {"patience_s": lease.PATIENCE_S, "outage_s": lease.OUTAGE_LIMIT_S}
        try:
            with means.hold(means.lease_of(name), **patience) as mine:
                if mine.removed:
                    slices.withdraw(means.client(), means.backoff, self._asked, name, mine)
        except (LeaseHeldError, LeaseLostError, *REFUSALS) as error:
            means.say(f"{name}: what was asked for may be left: {error}; `fab zombies` shows it")

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
                if each.for_queue and each.state == "watched":
                    continue
                if each.for_queue:
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
        doubled = self._stack() if self._standing == "doubled" else None
        fresh = {
            run_id: each
            for run_id, each in store.read_wanted(self._documents).items()
            if each.state != "ended"
        }
        ids = {each.run_id for each in self._group}
        self._others = any(each.slice == self._name and each.run_id not in ids for each in fresh.values())
        self._group = [fresh[each.run_id] for each in self._group if each.run_id in fresh]
        self._group = [each for each in self._group if not self._has_ended(each)]
        if not self._group:
            if doubled is not None and not mine.removed and self._name in doubled.slices:
                # What another zone has of it is withdrawn: nobody looks at the slice after its last run.
                slices.have(self._means.client(), self._means.backoff, doubled, self._name, mine, wait_s=0.0)
            return
        stack, is_new = self._stack(), False
        if stack is not None:
            if mine.removed or self._name not in stack.slices:
                for each in self._group:
                    self._note(each, "waits", REMOVED, state="waiting")
                return
            before = next(each for each in stack.inventory.slices if each.name == self._name)
            if not self._ask(stack, mine):
                return
            stack = slices.with_newest(stack, self._documents)
            after = next(each for each in stack.inventory.slices if each.name == self._name)
            is_new = bool(before.hosts) and before.hosts != after.hosts
        for each in self._group:
            self._bring_back(each, stack, mine, is_new=is_new)

    def _has_ended(self, wanted: Wanted) -> bool:
        """End an entry whose run needs no slice any more, as far as that can be seen without hosts."""
        sign = self._signs.get(wanted.run_id)
        if self._standing not in ("absent", "lost") and not (sign is not None and sign.has_result):
            return False
        found = self._hosts.without_hosts(wanted)
        if found is None:
            return False
        is_lost = self._standing in ("absent", "lost")  # which is no fault of the run's own
        step = rules.next_step(
            dataclasses.replace(wanted, slice_lost=wanted.slice_lost or is_lost), found.facts, self._now_s()
        )
        if step.do == "end":
            self._end(wanted, step.reason, found)
        return step.do == "end"

    def _ask(self, stack: Stack, mine: Lease) -> bool:
        """See to it that the slice is there; False: not now."""
        now_s, is_queued = self._now_s(), self._standing in rules.QUEUED
        is_gone = is_queued or self._standing in ("absent", "lost")
        was_asked = any(each.state == "waiting" or each.slice_lost for each in self._group)
        for each in [*self._group] if is_gone else ():
            step = rules.glance(each, self._standing, self._signs.get(each.run_id), now_s)
            if step.do == "end":
                self._end(each, step.reason, None)
                self._group.remove(each)
            elif step.do == "ask" and not is_queued:
                told = None
                if each.state == "watched" and not each.for_queue:  # the queue tells of its runs
                    told = self._post.item(each, "preempted", LOST)
                self._group[self._group.index(each)] = self._note(
                    each, "asks", step.reason, told, state="recovering", slice_lost=True
                )
        if not self._group:
            if was_asked and is_queued and not self._others:
                slices.withdraw(self._means.client(), self._means.backoff, stack, self._name, mine)
            return False
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
                self._name,
                mine,
                # One that waits already is looked at, so that the next zone has its turn.
                wait_s=0.0 if is_queued else slices.WAIT_S,
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
                not_before_s = self._now_s() + rules.pause_s(failures)
                changes: dict[str, Any] = {
                    "state": "waiting",
                    "failures": failures,
                    "not_before_s": not_before_s,
                }
                self._note(each, "asked", str(error), **changes)
            return False
        if made is None:
            for each in self._group:
                self._note(each, "waits", f"no capacity for {self._name} yet", state="waiting")
            return False
        slices.record(self._documents, made)
        return True

    def _bring_back(self, wanted: Wanted, stack: Stack | None, mine: Lease, *, is_new: bool) -> None:
        def reopen() -> Any:
            return self._hosts.target(wanted, stack)

        if is_new:
            wanted = self._note(wanted, "has a new slice", f"{self._name} was made again", slice_lost=True)
        target = reopen()
        is_doubtful = wanted.slice_lost or wanted.failures > 1 or wanted.prepares > 0
        if stack is not None and (is_doubtful or self._hosts.silent(target)):
            if not self._may_prepare(wanted):
                return
            try:
                target = self._hosts.prepare(reopen, lambda: self._require_there(wanted))
            except SliceLostError as error:
                # No fault of the hosts: it is asked for again at the next look, without a pause.
                self._note(
                    wanted, "lost", str(error), slice_lost=True, prepares=wanted.prepares,
                    not_before_s=wanted.not_before_s,
                )  # fmt: skip
                return
            self._change(wanted, lambda now: dataclasses.replace(now, prepares=0))
        if wanted.for_queue:
            ready: dict[str, Any] = {
                "state": "watched",
                "slice_lost": False,
                "failures": 0,
                "not_before_s": 0.0,
            }
            self._note(wanted, "is there", f"{self._name} is there for the queue", **ready)
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
            raise SliceLostError(f"{self._name} was lost while its hosts were being prepared")

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
        now_s = self._now_s()
        self._change(
            wanted,
            lambda now: dataclasses.replace(
                now, prepares=prepares, not_before_s=now_s + rules.pause_s(prepares)
            ),
        )
        return True

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
            run = self._hosts.resume(found.run, target, self._now_s)
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
        """Change an entry, unless somebody has taken it out or ended it meanwhile; then None."""

        def change(now: Wanted | None) -> Wanted | None:
            return now if now is None or now.state == "ended" else function(now)

        fresh = store.change_wanted(self._documents, wanted.run_id, change)
        return None if fresh is None or fresh.state == "ended" else fresh

    def _note(
        self, wanted: Wanted, act: str, reason: str, told: news.Item | None = None, **changes: Any
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
        told = self._post.item(wanted, *news.of_end(wanted, found, reason), found.run if found else None)

        def end(now: Wanted | None) -> Wanted | None:
            return now and now.noted("ends", reason, now_s, state="ended", news=_more(now, told))

        ended = store.change_wanted(self._documents, wanted.run_id, end)
        if ended is not None:
            self._post.send([ended])
            if found is not None:
                self._written(ended, found)

    def _written(self, wanted: Wanted, found: Examined) -> None:
        try:
            self._hosts.write_acts(wanted, found.run)
        except (HostError, OSError) as error:
            self._means.say(f"warning: {wanted.run_id}: keeper.jsonl could not be written: {error}")


def _more(now: Wanted, told: news.Item | None) -> tuple[news.Item, ...]:
    return now.news if told is None else (*now.news, told)


def _as_before(wanted: Wanted) -> dict[str, Any]:
    """What `rules.resumed` has counted, but for the pause, as of a try that was none."""
    return {name: getattr(wanted, name) for name in ("attempts_left", "last_restored_step", "failures")}


OTHER_CODE = ", with the code that the keeper was installed with, as the run directory does not have its own"
LOST = "Its slice is lost. The keeper asks for it again."
REMOVED = (
    "its slice was removed by `pulumi destroy`; `pulumi up` makes it again, `fab unkeep` forgets the run"
)
