"""Carries out what `launch.policy` decides about the runs and slices of a store.

Any number of reconcilers may look at one store: the keeper's timer, `fab queue work`, `fab keeper run`. What is to be
done follows from the documents and from what is observed, not from what was done before, so one that is killed at any
moment leaves nothing that another one does not find. Whoever acts on a slice or on the runs that have it holds its
lease, and decides anew once it is held. A look in which all is well changes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from contracts.errors import RequestError
from contracts.inventory import is_made_again
from infra.documents import DocumentsError
from infra.documents.lease import Lease, LeaseHeldError, LeaseLostError
from launch import policy
from launch.control.control_documents import End, Run, Slice
from launch.control.store import Content, Store
from launch.policy import Action, RunObserved, Signs, SliceObserved

AT_ONCE = 8
"""Slices that are seen to at the same time."""
LOOK_EVERY_S = 30.0
"""With a timer of a minute, and two looks at least, a lost slice is found within half of one."""
MOST_ACTIONS = 12
"""Of one look about one slice; the next look goes on."""
IN_USE_PAUSE_S = 60.0
REMOVED = (
    "its slice was removed by `pulumi destroy`; `pulumi up` makes it again, `fab unkeep` forgets the run"
)


NO_SLICES = "the stack has no slices now; `pulumi up` makes them again, `fab queue cancel` takes the run back"


class RequestRefusedError(Exception):
    """A slice is not available. is_final: nor with the same request later."""

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final


class SliceLostError(Exception):
    """The slice was lost while its hosts were waited for."""


class NotStartedError(Exception):
    """A run could not be started, and nothing of it lives. is_final: the request is wrong. is_in_use: somebody else is
    at work on the hosts. is_outage: something outside was away. has_result: its processes had begun, and the run
    directory says how they ended."""

    def __init__(
        self,
        reason: str,
        *,
        is_final: bool = False,
        is_in_use: bool = False,
        is_outage: bool = False,
        has_result: bool = False,
    ) -> None:
        super().__init__(reason)
        self.is_final, self.is_in_use, self.is_outage, self.has_result = (
            is_final,
            is_in_use,
            is_outage,
            has_result,
        )


class NotDesiredError(Exception):
    """Somebody has changed a run's document since the decision, so what was decided is not carried out."""


class World(Protocol):
    """What a reconciler observes and acts on: hosts, run directories, the API of slices.

    Every method may raise RequestError, HostError, Unreachable: then nothing is known, and nothing is done.
    """

    def slices(self, content: Content) -> Mapping[str, SliceObserved]:
        """Return how each slice stands that the stack declares, by one listing; unknown where that cannot be seen."""
        ...

    def signs(self, runs: Sequence[Run]) -> Mapping[str, Signs]:
        """Return what a listing shows of each run's directory; a run that cannot be listed is left out."""
        ...

    def examine(self, run: Run, content: Content, *, has_hosts: bool) -> RunObserved | None:
        """Read a run's directory, and ask its hosts where it has any; None: it has no directory that can be read."""
        ...

    def silent(self, name: str, content: Content) -> int:
        """Return how many hosts of a slice do not answer."""
        ...

    def request(self, name: str, content: Content, lease: Lease, *, wait_s: float) -> bool:
        """Ask for a slice, or look at what was asked for; whether it is there. Raises RequestRefusedError."""
        ...

    def release(self, name: str, content: Content, lease: Lease) -> None: ...

    def prepare(
        self, name: str, run: Run, content: Content, lease: Lease, require_there: Callable[[], None]
    ) -> None:
        """Wait until the hosts of a slice answer, and prepare them. Raises RequestError, SliceLostError."""
        ...

    def start(self, run: Run, require: Callable[[], object]) -> int:
        """Start an attempt of a run on the slice that it has, and return its number once its processes have joined.

        require: raises once the run is not to be started any more. Raises NotStartedError.
        """
        ...

    def stop(self, run: Run) -> None:
        """Stop the processes of a run, with a checkpoint."""
        ...

    def remove(self, run: Run) -> None:
        """Remove the directory of a run that has ended; it may be gone already."""
        ...

    def hold(self, name: str) -> contextlib.AbstractContextManager[Lease]:
        """Hold the lease of a slice."""
        ...


class Witness(Protocol):
    """Whoever tells people what became of runs."""

    def notice(self, run: Run, kind: str, text: str) -> Mapping[str, Any] | None:
        """Return what the run's document holds of an event until it was delivered; None: nobody is to be told."""
        ...

    def deliver(self, runs: Sequence[Run]) -> None:
        """Begin to deliver what the documents of runs hold."""
        ...

    def record(self, run: Run) -> None:
        """Write what was done about a run into its directory."""
        ...


class Reconciler:
    """refusals: what a World raises that may be better at the next look, besides RequestError. at_once: slices that are
    seen to at the same time; 1 is without threads. wait_s: for a slice that was requested just now. only: the runs that
    a command is about; no others get a slice. None: all."""

    def __init__(
        self,
        store: Store,
        world: World,
        witness: Witness,
        say: Callable[[str], None],
        *,
        refusals: tuple[type[Exception], ...] = (),
        at_once: int = AT_ONCE,
        wait_s: float = 120.0,
        only: Collection[str] | None = None,
    ) -> None:
        self.store, self._world, self._witness, self._say = store, world, witness, say
        self._refusals: tuple[type[Exception], ...] = (RequestError, *refusals)
        self.at_once, self._wait_s, self._only = at_once, wait_s, only
        self._last_lines: dict[str, str] = {}

    # --- passes and looks -------------------------------------------------------------------------------------------

    def run_pass(
        self, wait: Callable[[Collection[Future[None]]], None], content: Content, min_looks: int = 1
    ) -> None:
        """Look, act on what is due, and look again while something is being done; `min_looks` times at least.

        wait: waits until the next look, or until one of these is done. content: as it is at the first look.
        """
        busy: dict[str, Future[None]] = {}
        with ThreadPoolExecutor(self.at_once) as pool:
            number = 0
            while number < min_looks or busy:
                try:
                    now = content if number == 0 else self.store.read()
                    due = [name for name in self.look(now, is_full=number % 2 == 0) if name not in busy]
                except DocumentsError as error:
                    self._say(str(error))
                    due = []
                for name in due[: self.at_once - len(busy)] if self.at_once > 1 else due:
                    if self.at_once > 1:
                        busy[name] = pool.submit(self.bring_about, name)
                    else:
                        self.bring_about(name)
                number += 1
                if busy or number < min_looks:
                    wait(busy.values())
                for name in [name for name, future in busy.items() if future.done()]:
                    busy.pop(name).result()

    def look(self, content: Content, *, is_full: bool = True) -> list[str]:
        """Return the slices about which something is to be done, or whose runs have to be examined.

        is_full: whether the directories of runs are listed too; else it is about slices and the queue alone.

        Raises:
            DocumentsError: the store does not answer.
        """
        for name, problem in content.unreadable.items():
            self._tell(name, f"{problem}; the others go on without it")
        self._witness.deliver([run for run in content.runs.values() if run.notices])
        removed = [run for run in content.runs.values() if run.end is not None and run.desired == "removed"]
        if removed:
            with contextlib.suppress(*self._refusals):
                self._world.slices(content)  # their hosts are known by that
        for run in removed:
            self._remove(run)
        living = [run for run in content.runs.values() if run.end is None]
        used = {run.slice for run in living}
        for slice_spec in content.slices.values():
            if slice_spec.name not in used and not slice_spec.requested:
                self.store.edit_slice(slice_spec.name, lambda now: None if not now.requested else now)
        if not living and not any(slice_spec.requested for slice_spec in content.slices.values()):
            return []
        try:
            places = self._world.slices(content)
        except self._refusals as error:
            self._say(str(error))
            return []
        now_s = self.store.now_s()
        slices = {name: (content.slices.get(name, Slice(name=name)), place) for name, place in places.items()}
        if self._only is None:
            living = self._assigned(living, slices, now_s)
        chosen = [run for run in living if self._only is None or run.run_id in self._only]
        signs = self._world.signs(chosen) if is_full else {}
        due: dict[str, None] = {}
        for run in chosen:
            slice_spec, place = slices.get(
                run.slice or "", (Slice(name=""), SliceObserved(standing="absent"))
            )
            sign = signs.get(run.run_id)
            action = policy.next_action(run, slice_spec, place, sign, None, now_s)
            if run.slice is None:
                if action.do == "end":
                    self._end(run, action)
            elif run.slice not in slices and action.do == "end":
                self._end(run, action)
            elif run.slice not in slices:
                self._wait_for_pulumi(run, REMOVED)
            elif action.do != "wait" and (is_full or action.do != "examine"):
                due[run.slice] = None
        for name, (slice_spec, place) in slices.items():
            if policy.next_slice_action(slice_spec, place, living, 0, now_s).do != "wait":
                due[name] = None
        return list(due)

    def _assigned(
        self, living: Sequence[Run], slices: Mapping[str, tuple[Slice, SliceObserved]], now_s: float
    ) -> list[Run]:
        """Give the runs that wait the slices that are free, and return all as they are then."""
        runs = {run.run_id: run for run in living}
        for run_id, name in policy.assignments(living, slices, now_s).items():
            before = runs[run_id]

            def assign(now: Run | None, before: Run = before, name: str = name) -> Run | None:
                return dataclasses.replace(now, slice=name) if now and _is_same(now, before) else now

            runs[run_id] = self.store.edit_run(run_id, assign) or before
        for run in runs.values():
            if run.slice is not None or run.submission is None or any(name in slices for name in run.slices):
                continue
            if slices:
                names = " or ".join(run.slices)
                self._end(
                    run, Action(do="end", reason=f"the stack has no slice {names} any more; submit it again")
                )
            else:
                self._wait_for_pulumi(run, NO_SLICES)
        return [run for run in runs.values() if run.end is None]

    # --- one slice and the runs that have it ------------------------------------------------------------------------

    def bring_about(self, name: str) -> None:
        """Do what is due about a slice and its runs, unless somebody else is at it."""
        try:
            with self._world.hold(name) as lease:
                for _ in range(MOST_ACTIONS):
                    if not self._act(name, lease):
                        break
        except LeaseHeldError as error:
            self._tell(f"lease {name}", str(error))
        except LeaseLostError as error:
            self._say(str(error))
        except self._refusals as error:
            self._tell(f"error {name}", f"{name}: {error}")

    def _act(self, name: str, lease: Lease) -> bool:
        """Carry out the next action about a slice or its runs; False: there is none, or it has to be waited for."""
        content = self.store.read()
        places = self._world.slices(content)
        now_s = self.store.now_s()
        slice_spec = content.slices.get(name, Slice(name=name))
        place = places.get(name, SliceObserved(standing="absent"))
        runs = [run for run in content.runs.values() if run.slice == name and run.end is None]
        has_hosts = place.standing in policy.USABLE
        decided: list[tuple[Run, RunObserved | None, Action]] = []
        silent = 0
        for run in runs:
            observed = None
            if place.standing != "unknown" and not (run.attempt is None and run.submission is not None):
                observed = self._world.examine(run, content, has_hosts=has_hosts)
                if observed is None and has_hosts:
                    observed = RunObserved(living="absent")
            silent = max(silent, observed.silent if observed else 0)
            decided.append((run, observed, policy.next_action(run, slice_spec, place, None, observed, now_s)))
        if runs and not silent and slice_spec.requested and place.standing == "active":
            silent = self._world.silent(name, content)
        for run, observed, action in decided:
            if action.do == "end":
                self._end(run, action, observed)
                return True
            if action.do == "stop":
                self._say(f"{run.label}: is stopped")
                self._world.stop(run)
                self._note(run, "stops", f"`fab {'rm' if run.desired == 'removed' else 'stop'}` asked for it")
                return False
            if observed is not None and observed.living == "present":
                self._is_well(run, observed)
                if slice_spec.prepares:
                    self.store.edit_slice(name, lambda now: dataclasses.replace(now, prepares=0))
            elif action.do == "wait" and action.reason and has_hosts:
                # While a submitted run pauses before its next try, others may have its slice.
                is_paused = run.submission is not None and run.not_before_s > now_s
                frees = is_paused and observed is not None and observed.living == "absent"
                if frees or action.reason != run.reason:
                    self._note(run, "waits", action.reason, _without_slice if frees else lambda now: now)
        if name not in places:
            return False
        action = policy.next_slice_action(slice_spec, place, runs, silent, now_s)
        if action.do == "request":
            return self._request(slice_spec, runs, action, content, lease, place)
        if action.do == "prepare":
            return self._prepare(slice_spec, runs, place, content, lease)
        if action.do == "release":
            lease.require()
            self._say(f"{name}: {action.reason}; it is given back")
            self._world.release(name, content, lease)
            self.store.edit_slice(name, lambda _: None)
            return False
        for run, observed, action in decided:
            if action.do == "start":
                return self._start(run, observed, slice_spec, place, action, lease)
        return False

    def _wait_for_pulumi(self, run: Run, reason: str) -> None:
        if run.reason != reason:
            self._say(f"{run.label}: {reason}")
            self._note(run, "waits", reason)

    def _is_well(self, run: Run, observed: RunObserved) -> None:
        if run.seen == "running" and not run.failed_starts:
            return

        def well(now: Run) -> Run:
            attempt = now.attempt and dataclasses.replace(
                now.attempt, number=max(now.attempt.number, observed.attempt), has_joined=True
            )
            return dataclasses.replace(now, seen="running", failed_starts=0, attempt=attempt)

        self._note(run, "runs", f"it is {observed.state}", well)

    def _request(
        self,
        slice_spec: Slice,
        runs: Sequence[Run],
        action: Action,
        content: Content,
        lease: Lease,
        place: SliceObserved,
    ) -> bool:
        name, now_s = slice_spec.name, self.store.now_s()
        if lease.removed:
            for run in runs:
                self._wait_for_pulumi(run, REMOVED)
            return False
        is_new = place.standing in ("lost", "absent")
        for run in runs:
            if is_new and run.seen == "running":
                notice = self._witness.notice(
                    run, "preempted", "Its slice is lost. The keeper asks for it again."
                )
                self._note(run, "asks", f"its slice is {action.reason.removeprefix('it is ')}", _lost(notice))
        self.store.edit_slice(
            name,
            lambda now: now.noted("asks", action.reason, now_s, requested=now.requested or is_new),
        )
        try:
            is_there = self._world.request(name, content, lease, wait_s=self._wait_s if is_new else 0.0)
        except SliceLostError as error:
            text = str(error)
            self.store.edit_slice(name, lambda now: now.noted("lost", text, now_s))
            return False
        except RequestRefusedError as error:
            reason, failures = str(error), slice_spec.failures + 1
            refused = f"its slice would be refused again: {reason}" if error.is_final else ""
            self.store.edit_slice(
                name,
                lambda now: now.noted(
                    "asked", reason, now_s, failures=failures, refused=refused,
                    not_before_s=self.store.now_s() + policy.pause_s(failures),
                ),
            )  # fmt: skip
            for run in runs:
                self._note(run, "waits", reason)
            return bool(refused)
        self.store.edit_slice(
            name, lambda now: dataclasses.replace(now, failures=0, not_before_s=0.0, refused="")
        )
        if not is_there:
            for run in runs:
                self._note(run, "waits", f"no capacity for {name} yet")
        return is_there

    def _prepare(
        self, slice_spec: Slice, runs: Sequence[Run], place: SliceObserved, content: Content, lease: Lease
    ) -> bool:
        """Prepare the hosts of a slice. A try is counted before it begins: hosts cost money while they are tried."""
        name, now_s = slice_spec.name, self.store.now_s()
        prepares = slice_spec.prepares + 1
        if prepares > policy.MOST_PREPARES:
            reason = f"its hosts could not be prepared {policy.MOST_PREPARES} times: {slice_spec.reason}"
            self.store.edit_slice(name, lambda now: dataclasses.replace(now, refused=reason))
            return True
        until_s = now_s + policy.pause_s(prepares)
        self.store.edit_slice(
            name, lambda now: dataclasses.replace(now, prepares=prepares, not_before_s=until_s)
        )
        run = next(run for run in runs if run.desired == "running")
        if run.attempt and is_made_again(run.attempt.created, place.created):
            self._note(run, "has a new slice", f"{name} was made again")

        def require_there() -> None:
            observed = self._world.slices(self.store.read()).get(name)
            if observed is not None and observed.standing in ("absent", "lost"):
                raise SliceLostError(f"{name} was lost while its hosts were being prepared")

        try:
            self._world.prepare(name, run, content, lease, require_there)
        except SliceLostError as error:
            # No fault of the hosts: it is asked for again at once.
            text = str(error)
            self.store.edit_slice(
                name,
                lambda now: now.noted("lost", text, now_s, prepares=slice_spec.prepares, not_before_s=0.0),
            )
            return True
        except self._refusals as error:
            text = str(error)
            self._say(f"{name}: {text}")
            self.store.edit_slice(name, lambda now: now.noted("prepared in vain", text, now_s))
            for run in runs:
                self._note(run, "waits", text)
            return False
        self.store.edit_slice(
            name,
            lambda now: now.noted("prepared", f"{name} is there", now_s, prepared=place.created),
        )
        return True

    def _start(
        self,
        run: Run,
        observed: RunObserved | None,
        slice_spec: Slice,
        place: SliceObserved,
        action: Action,
        lease: Lease,
    ) -> bool:
        now_s = self.store.now_s()
        lease.require()
        kind = {"preempted": "preempted", "lost": "failed", "failed": "failed", "hung": "failed"}.get(
            observed.cause if observed and run.seen == "running" else "", ""
        )
        notice = self._witness.notice(run, kind, "") if kind else None

        def count(now: Run | None) -> Run | None:
            if now is None or not _is_same(now, run):
                return now
            counted = policy.begin_attempt(now, observed, place.created, now_s)
            return _with(
                counted.noted("starts" if observed is None else "resumes", action.reason, now_s), notice
            )

        counted = self.store.edit_run(run.run_id, count)
        if counted is None or counted.attempt is None or counted.attempt == run.attempt:
            return True  # somebody has changed it meanwhile
        self._witness.deliver([counted])
        self._say(f"{run.label}: {action.reason}{'' if observed else f' on {run.slice}'}")

        def require() -> None:
            lease.require()
            now = self.store.run(run.run_id)
            if (
                now is None
                or now.desired != "running"
                or now.end is not None
                or now.attempt != counted.attempt
            ):
                raise NotDesiredError(f"{run.run_id} is not wanted any more")

        try:
            number = self._world.start(counted, require)
        except NotDesiredError as error:
            self._say(str(error))
            self._not_begun(run, counted, str(error), counts=False)
            return True
        except NotStartedError as error:
            return self._failed_start(run, counted, error, observed)
        except BaseException as error:
            # Whoever interrupts a launch has it stopped everywhere, or nobody knows: then the attempt stays begun.
            if isinstance(error, KeyboardInterrupt):
                self._not_begun(run, counted, "its start was interrupted", counts=False)
            raise
        return self._note_start(counted, number, slice_spec, is_resumed=observed is not None and number > 0)

    def _note_start(self, counted: Run, number: int, slice_spec: Slice, *, is_resumed: bool) -> bool:
        notice = self._witness.notice(counted, "recovered", "") if is_resumed else None

        def started(now: Run) -> Run:
            if now.attempt is None or now.attempt.number != counted.attempt.number:  # type: ignore[union-attr]
                return now
            attempt = dataclasses.replace(now.attempt, number=number, has_joined=True)
            return _with(dataclasses.replace(now, attempt=attempt, seen="running", failed_starts=0), notice)

        noted = self._note(counted, "runs", f"attempt {number}", started)
        self._witness.record(noted)
        if slice_spec.requested or slice_spec.busy_until_s or slice_spec.prepares:
            self.store.edit_slice(
                slice_spec.name,
                lambda now: dataclasses.replace(now, requested=False, busy_until_s=0.0, prepares=0),
            )
        return noted.desired != "running"

    def _failed_start(
        self, run: Run, counted: Run, error: NotStartedError, observed: RunObserved | None
    ) -> bool:
        reason = str(error)
        self._say(f"{run.label}: {reason}")
        if error.is_final:
            event = "it cannot be started" if observed is None else "it cannot be resumed"
            self._end(counted, Action(do="end", reason=f"{event}: {reason}"), observed)
            return True
        if error.has_result:
            self._note(counted, "did not start", reason)
            return False
        counts = not (error.is_in_use or error.is_outage)
        self._not_begun(run, counted, reason, counts=counts)
        if error.is_in_use and run.slice is not None:
            until_s = self.store.now_s() + IN_USE_PAUSE_S
            self.store.edit_slice(run.slice, lambda now: dataclasses.replace(now, busy_until_s=until_s))
        return False

    def _not_begun(self, run: Run, counted: Run, reason: str, *, counts: bool) -> None:
        now_s = self.store.now_s()

        def undone(now: Run) -> Run:
            if now.attempt != counted.attempt:
                return now
            fresh = policy.undo_attempt(run, now, now_s, counts=counts)
            is_queued = run.submission is not None and run.attempt is None
            return dataclasses.replace(fresh, slice=None) if is_queued else fresh

        self._note(counted, "did not start", reason, undone)

    # --- what is written --------------------------------------------------------------------------------------------

    def _note(self, run: Run, act: str, reason: str, change: Callable[[Run], Run] = lambda now: now) -> Run:
        """Write a line about a run that has not ended, and return it as it is then."""
        now_s = self.store.now_s()

        def note(now: Run | None) -> Run | None:
            return now if now is None or now.end is not None else change(now).noted(act, reason, now_s)

        noted = self.store.edit_run(run.run_id, note) or run
        self._witness.deliver([noted])
        return noted

    def _end(self, run: Run, action: Action, observed: RunObserved | None = None) -> None:
        now_s = self.store.now_s()
        notice = self._witness.notice(run, *_kind_of_end(run, action, observed))
        end = End(outcome=action.outcome, reason=action.reason, at_s=now_s)
        has_ended = False

        def write(now: Run | None) -> Run | None:
            nonlocal has_ended
            if now is None or not _is_same(now, run):
                return now
            has_ended = True
            return _with(now.noted("ends", action.reason, now_s, end=end), notice)

        ended = self.store.edit_run(run.run_id, write)
        if ended is not None and has_ended:
            event = "is not kept any more" if action.outcome == "unmanaged" else "ends"
            self._say(f"{run.label} {event}: {action.reason}")
            self._witness.deliver([ended])
            if ended.desired == "removed":
                self._remove(ended)
            else:
                self._witness.record(ended)

    def _remove(self, run: Run) -> None:
        """Remove the directory of a run that has ended, and then its document. Nothing starts it any more: whoever
        wants it from now on finds a document that says that it is to be removed."""
        try:
            self._world.remove(run)
        except self._refusals as error:
            text, now_s = f"it cannot be removed: {error}", self.store.now_s()
            if text != run.reason:
                self._say(f"{run.label}: {text}")
            self.store.edit_run(run.run_id, lambda now: now and now.noted("waits", text, now_s))
            return
        self.store.edit_run(run.run_id, lambda now: None if now and now.desired == "removed" else now)
        self._say(f"{run.label} is removed")

    def _tell(self, about: str, text: str) -> None:
        """Say it, unless it is what was said of it last."""
        if self._last_lines.get(about) != text:
            self._last_lines[about] = text
            self._say(text)


def _is_same(now: Run, before: Run) -> bool:
    """Whether a decision about `before` still holds: nothing that it was made from has changed."""
    return _decided_from(now) == _decided_from(before)


def _decided_from(run: Run) -> Run:
    return dataclasses.replace(run, history=(), notices=(), seen="", reason="", extra={})


def _with(run: Run, notice: Mapping[str, Any] | None) -> Run:
    return run if notice is None else dataclasses.replace(run, notices=(*run.notices, notice))


def _without_slice(run: Run) -> Run:
    return dataclasses.replace(run, slice=None)


def _lost(notice: Mapping[str, Any] | None) -> Callable[[Run], Run]:
    return lambda now: _with(dataclasses.replace(now, seen=""), notice)


def _kind_of_end(run: Run, action: Action, observed: RunObserved | None) -> tuple[str, str]:
    """Return which event it is that a run has ended, "" for none, and its text."""
    if run.desired != "running":
        return "", ""
    if action.outcome == "done":
        return "done", ""
    if observed is not None and observed.cause == "stopped":
        return "", ""
    is_spent = observed is not None and (observed.cause == "over budget" or policy.is_spent(run, observed))
    return ("out of budget" if is_spent else "failed"), f"It is given up: {action.reason}."
