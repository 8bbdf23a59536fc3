"""Takes the entries of a queue to the slices that are free, and sees to those that run: `fab queue work`, the keeper.

What is to be done follows from the queue, the run directories and what the hosts say, and not from what was done
before: a worker that is killed at any moment leaves nothing that another one does not find. Who starts a run holds the
lease of its slice; an entry that is `starting` while the lease is free has lost its worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager

from console import follow, notify
from console import track as tracking
from contracts import run_directory
from contracts.errors import DONE, FAILED, RequestError, Unreachable
from contracts.files import is_url
from contracts.run_directory import State
from infra.lease import LeaseLostError
from keeper.queue import AT_WORK, Entry, Queue
from keeper.queue import State as EntryState
from keeper.store import Wanted, read_wanted
from launch import launch as launching
from launch import recovery, runs
from launch.hosts import STOP_NOW_S, HostError, HostsError, stop_processes
from launch.runs import Look, Run
from launch.targets import Target

MOST_STARTS = 5
"""Tries in which the hosts were not ready, or the worker was lost, after which an entry has failed."""
POLL_S = 3.0
BUCKET_POLL_S = 15.0
"""Every look at a bucket is billed."""

FOREIGN_LIMIT_S = 300.0
"""Without a heartbeat, after which a run that no agent has a record of is lost. Agents keep theirs by user, so another
one may have started it; nobody but its heartbeats can tell, and what they lie in may be away for a while."""
IN_USE_PAUSE_S = 60.0
"""Between two tries to start something on hosts that somebody else uses."""
INTERRUPTED = "its worker was interrupted while it started the run"
MOST_LOSSES = 5
"""Times in a row that a run may lose its hosts before it has a new checkpoint, without taking a restart."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """A stack as it is now. slices: the names of all; targets: of those that have hosts."""

    slices: frozenset[str]
    targets: Sequence[Target]

    def find(self, name: str | None) -> Target | None:
        return next((each for each in self.targets if each.slice.name == name), None)


Open = Callable[[Mapping[str, str]], Opened]
"""Gives the stack, for what an entry says of the target besides."""
Hold = Callable[[str], AbstractContextManager[Callable[[], object] | None]]
"""Holds the lease of a slice; gives what raises LeaseLostError once it is lost. None: somebody else has it."""


class Worker:
    """One of any number of workers of a queue.

    open_stack, hold: see Open and Hold. stop_grace_s: for a checkpoint of a run that is cancelled.
    """

    def __init__(
        self,
        queue: Queue,
        open_stack: Open,
        hold: Hold,
        say: Callable[[str], None],
        stop_grace_s: float = follow.STOP_GRACE_S,
    ) -> None:
        self._queue, self._open, self._hold, self._say = queue, open_stack, hold, say
        self._stop_grace_s = stop_grace_s
        self._opened: dict[tuple[tuple[str, str], ...], Opened] = {}
        self._told: dict[str, str] = {}
        self._in_use_until_s: dict[str, float] = {}

    def step(self) -> list[Entry]:
        """Do what can be done now, which may take as long as a run takes to start; return all entries after it."""
        entries = self._queue.entries()
        resumable = any(
            each.state == "running" or (each.state == "waiting" and each.run_id) for each in entries
        )
        kept = {each.run_id for each in self._kept()} if resumable else ()
        for entry in entries:
            if entry.state == "running":
                self._guarded(entry, functools.partial(self._look_after, entry, kept))
            elif entry.state in AT_WORK:
                self._guarded(entry, functools.partial(self._take_over, entry))
        if any(each.state == "waiting" for each in entries):
            self._start_waiting(kept)
        return self._queue.entries() if any(each.is_pending for each in entries) else entries

    def stop(self, entry: Entry) -> bool:
        """Stop the run of an entry that is `stopping`; False where it goes on for now, which was said."""
        self._guarded(entry, functools.partial(self._take_over, entry))
        return not any(each.number == entry.number and each.is_pending for each in self._queue.entries())

    def _kept(self) -> list[Wanted]:
        """The runs that the keeper resumes."""
        return [each for each in read_wanted(self._queue.documents).values() if each.is_kept]

    def _guarded(self, entry: Entry, act: Callable[[Target], None]) -> None:
        """Act on an entry where it runs; what does not answer now is tried again in the next step."""
        try:
            opened = self._open_for(entry)
            if (target := opened.find(entry.slice)) is not None:
                act(target)
            elif opened.slices and entry.slice not in opened.slices:
                self._without_slice(entry, opened)
            else:
                self._opened.clear()
                self._tell(
                    f"{entry.number}", f"entry {entry.number}: the stack has no hosts of {entry.slice} now"
                )
        except (HostError, HostsError, RequestError) as error:
            self._opened.clear()
            self._tell(f"{entry.number}", f"entry {entry.number}: {error}")

    def _without_slice(self, entry: Entry, opened: Opened) -> None:
        """See to an entry of which the stack has the slice no more: it goes on on another one, or has ended."""
        reason = f"the stack has no slice {entry.slice} any more"
        if entry.state == "stopping":
            self._end(entry, "cancelled", entry.reason)
        elif opened.slices.isdisjoint(entry.slices):
            self._end(entry, "lost", reason)
        else:
            self._queue.change(
                entry.number,
                lambda now: dataclasses.replace(now, state="waiting", reason=reason) if now == entry else now,
            )

    def _open_for(self, entry: Entry) -> Opened:
        key = tuple(sorted(entry.where.items()))
        if key not in self._opened:
            self._opened[key] = self._open(entry.where)
        return self._opened[key]

    def _state(self, entry: Entry, run: Run, target: Target) -> tuple[State, Look]:
        """Return what a run is doing, by the clock of the queue, and what the hosts that it was started on say."""
        there = self._open_for(entry).find(str((run.described.get("slice") or {}).get("name")))
        known = runs.look((there or target).find_agents(run.described), run)
        now_s = self._queue.documents.now_s()
        if _is_foreign(known):
            now_s -= FOREIGN_LIMIT_S - run_directory.SILENCE_LIMIT_S
        state = runs.state(
            run, known.processes, unanswered=len(known.errors), knowing=known.knowing, now_s=now_s
        )
        return state, known

    def _tell(self, about: str, text: str) -> None:
        """Say it, unless it is what was said last."""
        if self._told.get(about) != text:
            self._told[about] = text
            self._say(text)

    # --- entries that wait ------------------------------------------------------------------------------------------

    def _start_waiting(self, kept: Collection[str]) -> None:
        """Start the next entry on each slice that is free."""
        entries = self._queue.entries()
        taken = {each.slice for each in entries if each.state in AT_WORK}
        for entry in entries:
            if entry.state != "waiting" or entry.run_id in kept:
                continue
            try:
                opened = self._open_for(entry)
            except RequestError as error:
                self._tell(f"{entry.number}", f"entry {entry.number}: {error}")
                continue
            if opened.slices and opened.slices.isdisjoint(entry.slices):
                named = " or ".join(entry.slices)
                self._end(entry, "failed", f"the stack has no slice {named} any more; submit it again")
                continue
            for target in opened.targets:
                name = target.slice.name
                if name not in taken and name in entry.slices:
                    taken.add(name)
                    if self._is_free(target) and self._start(entry, target):
                        break

    def _is_free(self, target: Target) -> bool:
        """Whether all hosts of a slice answer and none has a run."""
        name = target.slice.name
        if self._in_use_until_s.get(name, 0.0) > time.monotonic():
            return False
        known = runs.look_at_all(target.agents)
        busy = {each["run_id"] for each in known.processes if each["state"] in ("starting", "running")}
        if known.errors:
            self._opened.clear()  # the slice may have been made again, with other hosts
            where = (
                f"; `fab recover --stack {target.name}` or the keeper restores it"
                if target.capabilities.is_billed
                else ""
            )
            self._tell(name, f"{name}: {len(known.errors)} of {len(target.hosts)} hosts do not answer{where}")
        elif busy:
            self._tell(
                name, f"{name}: has {', '.join(sorted(busy))}, which is not of the queue; it is waited for"
            )
        else:
            self._told.pop(name, None)
        return not known.errors and not busy

    def _start(self, entry: Entry, target: Target) -> bool:
        """Start or resume the run of an entry; False where somebody else has the entry or the slice."""
        name = target.slice.name
        with self._hold(name) as require:
            if require is None:
                return False
            # A kept run has its slice also while it fails and is resumed, and nothing runs there.
            of_runs = (each.run_id for each in self._kept() if each.slice == name and not each.for_queue)
            if kept := next(of_runs, ""):
                said = f"the keeper has it for {kept}; it is waited for (`fab unkeep {kept}` frees it)"
                self._tell(f"{name} is kept", f"{name}: {said}")
                return False
            now = datetime.datetime.now(datetime.UTC)
            job = str(entry.submitted["name"])
            run_id = runs.new_run_id(job, now, random.Random())
            claimed = self._queue.claim(entry.number, name, run_id)
            if claimed is None:
                return False
            self._launch(claimed, dataclasses.replace(target, alone=lambda: contextlib.nullcontext(require)))
            return True

    def _launch(self, entry: Entry, target: Target) -> None:
        assert entry.run_id is not None
        label, where = f"entry {entry.number} ({entry.what})", target.slice.name
        try:
            before = runs.read(target.runs.directory(entry.run_id))
            saved = before.directory.checkpoint_steps() if before else []
            state = self._state(entry, before, target)[0] if before else "lost"
            if before is not None and state in _AT_WORK_OR_DONE:
                where = str(before.described["slice"]["name"])
            else:
                self._tell(f"{label} starts", f"{label} {'is resumed' if before else 'starts'} on {where}")
                request = dataclasses.replace(self._queue.request(entry), resume=before)
                if before is not None:
                    request = dataclasses.replace(request, name=None, run_id=None)
                run = launching.launch(request, target, self._say)
                if before is not None:
                    notify.about(run, "recovered", self._say)
                tracking.start(run, target, self._say)
        except launching.LaunchFailed as failure:
            if failure.is_interrupted:
                self._put_back(entry, INTERRUPTED, counts=False)
                raise KeyboardInterrupt from None
            # else it has a result, which the next look finds
        except LeaseLostError as error:  # whoever has it sees to the entry
            self._say(f"{label}: {error}")
            return
        except (HostError, HostsError, Unreachable, runs.AtWorkError) as error:
            self._put_back(entry, str(error), counts=not self._is_in_use(error, target))
            return
        except RequestError as error:
            self._end(entry, "failed", str(error))
            return
        except BaseException:
            self._put_back(entry, INTERRUPTED, counts=False)
            raise
        newest = saved[-1] if saved else -1
        now = self._queue.change(
            entry.number,
            lambda now: dataclasses.replace(
                now,
                state="running" if now.state == "starting" else now.state,
                slice=where,
                starts=0,
                losses=0 if newest > now.saved_step else now.losses,
                saved_step=newest,
            ),
        )
        if now.state == "stopping":
            self._stop(now, target)

    def _is_in_use(self, error: Exception, target: Target) -> bool:
        """Whether a run could not be started because somebody else is at work there; then it is left for a while."""
        if found := launching.is_in_use(error):
            self._in_use_until_s[target.slice.name] = time.monotonic() + IN_USE_PAUSE_S
        return found

    def _put_back(self, entry: Entry, reason: str, *, counts: bool) -> None:
        """Let an entry wait again that could not be started, or end it after so many tries that count."""

        def put_back(now: Entry) -> Entry:
            if now.state != "starting":
                return now
            if not counts:
                return dataclasses.replace(now, state="waiting", reason=reason)
            ends = now.starts + 1 >= MOST_STARTS
            said = f"given up after {MOST_STARTS} tries: {reason}" if ends else reason
            return dataclasses.replace(
                now, starts=now.starts + 1, reason=said, state="failed" if ends else "waiting"
            )

        now = self._queue.change(entry.number, put_back)
        self._tell(f"{entry.number}", f"entry {entry.number} ({entry.what}) {now.state}: {now.reason}")

    def _take_over(self, entry: Entry, target: Target) -> None:
        """See to an entry that is starting, of which the worker may be lost, or that is to be stopped."""
        label = f"entry {entry.number} ({entry.what})"
        with self._hold(target.slice.name) as require:
            now = next((each for each in self._queue.entries() if each.number == entry.number), entry)
            if (
                require is None
                or entry.run_id is None
                or (now.state, now.run_id) != (entry.state, entry.run_id)
            ):
                return  # it was not lost
            run = runs.read(target.runs.directory(entry.run_id))
            state: State = "lost"
            known = None
            if run is not None:
                state, known = self._state(entry, run, target)
            if now.state == "stopping":
                if run is not None and state in run_directory.ACTIVE:
                    self._stop(now, target)
                    run = runs.read(run.directory) or run
                    state, known = self._state(entry, run, target)
                if run is not None and state in run_directory.ACTIVE:
                    self._tell(
                        f"{entry.number}", f"{label}: {run.run_id} is {state}, and is still to be stopped"
                    )
                    return
                if run is not None:
                    follow.concluded(run, state, target)
                self._end(now, "cancelled", now.reason)
            elif state in ("running", "saving", "done"):
                self._queue.change(entry.number, lambda now: dataclasses.replace(now, state="running"))
                self._say(f"{label}: its worker is gone, and its run is {state}")
            elif run is not None and run.current_result() is not None and run.attempt > now.judged:
                # It was started, and has ended since.
                self._queue.change(entry.number, lambda now: dataclasses.replace(now, state="running"))
            elif known is not None and state == "starting" and _is_foreign(known):
                self._tell(
                    f"{entry.number}", f"{label}: another user's worker is gone, and its run is starting"
                )
            else:
                if run is not None:  # not all its processes had been started
                    stop_processes(target.agents, run.run_id, run.attempt, grace_s=STOP_NOW_S)
                self._put_back(now, "its worker was lost while it started the run", counts=True)

    # --- entries that run -------------------------------------------------------------------------------------------

    def _look_after(self, entry: Entry, kept: Collection[str], target: Target) -> None:
        """If the run of an entry has ended, end the entry, or let it wait to be resumed."""
        assert entry.run_id is not None
        run = runs.read(target.runs.directory(entry.run_id))
        if run is None:
            self._end(entry, "failed", f"{target.runs_url}/{entry.run_id} is gone")
            return
        state, known = self._state(entry, run, target)
        if known.errors and run.current_result() is None:
            self._opened.clear()
            hosts = f"{len(known.errors)} of {run.processes} hosts do not answer"
            self._tell(run.run_id, f"entry {entry.number} ({run.run_id}): {hosts}, and it has no result")
        elif state == "failed" and run.current_result() is None and follow.is_ending(known):
            pass  # the agents are finding out which host failed first
        elif state not in run_directory.ACTIVE:
            if run.run_id in kept and state != "done":
                return
            run, state = follow.concluded(run, state, target)
            notify.about(run, state, self._say)
            names = {host.name for host in target.hosts}
            hosts_lost = bool(known.errors) or any(
                host["name"] not in names for host in run.described["hosts"]
            )
            again = self._again(entry, run, state, hosts_lost=hosts_lost)
            if again is None:
                self._end(entry, state, _reason(run, state))
            else:
                self._queue.change(entry.number, lambda now: again if now == entry else now)
                self._say(f"entry {entry.number} ({run.run_id}) {again.reason}")

    def _again(self, entry: Entry, run: Run, state: State, *, hosts_lost: bool) -> Entry | None:
        """Return the entry as it waits to be resumed; None where it has ended.

        A run that was preempted or lost goes on as long as it has a new checkpoint each time, and one whose hosts were
        lost so often without one as MOST_LOSSES says; else it takes a restart.
        """
        decision = recovery.decide(state, run)
        if not decision.resume or state == "stopped":
            return None
        newest = [-1, *run.directory.checkpoint_steps()][-1]
        is_new = newest > entry.saved_step
        losses = 0 if is_new else entry.losses + hosts_lost
        is_free = (is_new and state in ("preempted", "lost")) or (hosts_lost and losses <= MOST_LOSSES)
        if not is_free and entry.restarts == 0:
            return None
        return dataclasses.replace(
            entry,
            state="waiting",
            losses=losses,
            restarts=entry.restarts - (not is_free),
            judged=run.attempt,
            reason=f"{decision.reason}, when a slice is free",
        )

    def _end(self, entry: Entry, state: EntryState, reason: str) -> None:
        ended = self._queue.change(
            entry.number,
            lambda now: dataclasses.replace(now, state=state, reason=reason) if now.is_pending else now,
        )
        said = f": {ended.reason}" if ended.reason else ""
        self._say(f"entry {entry.number} ({entry.run_id or entry.what}) {ended.state}{said}")

    def _stop(self, entry: Entry, target: Target) -> None:
        run = runs.read(target.runs.directory(str(entry.run_id)))
        if run is not None:
            stop_processes(
                target.find_agents(run.described), run.run_id, run.attempt, grace_s=self._stop_grace_s
            )


def _is_foreign(known: Look) -> bool:
    """Whether no agent has a record of a run, as of one that another user has started."""
    return not (known.processes or known.knowing)


_AT_WORK_OR_DONE: tuple[State, ...] = (*run_directory.ACTIVE, "done")


def _reason(run: Run, state: State) -> str:
    """How a run ended, in a line."""
    if state == "done":
        _, latest = runs.progress(run)
        return runs.figure(run, latest)
    return next(iter(str((run.current_result() or {}).get("error") or "").splitlines()), "")


def _pause(queue: Queue) -> None:
    time.sleep(BUCKET_POLL_S if is_url(queue.documents.url) else POLL_S)


def work(worker: Worker, queue: Queue, say: Callable[[str], None], *, stay: bool) -> int:
    """Work until nothing waits or runs, or with `stay` until interrupted; FAILED if a run ended otherwise than done."""
    pending = {each.number for each in queue.entries() if each.is_pending}
    ended: dict[int, str] = {}
    said = ""
    while True:
        try:
            entries, said = worker.step(), ""
        except (HostError, HostsError, Unreachable) as error:  # the bucket may be away, or a host
            if str(error) != said:
                say(said := str(error))
            _pause(queue)
            continue
        ended |= {
            each.number: each.state for each in entries if each.number in pending and not each.is_pending
        }
        pending |= {each.number for each in entries if each.is_pending}
        if not stay and not any(each.is_pending for each in entries):
            break
        _pause(queue)
    done = [number for number, state in ended.items() if state == "done"]
    say(f"{len(done)} of {len(ended)} done; nothing waits or runs" if ended else "the queue is empty")
    return DONE if len(done) == len(ended) else FAILED
