"""Takes the entries of a queue to the slices that are free, and sees to those that run: `fab queue work`, the keeper.

What is to be done follows from the queue, the run directories and what the hosts say, and not from what was done
before: a worker that is killed at any moment leaves nothing that another one does not find. Who starts a run holds the
lease of its slice; an entry that is `starting` while the lease is free has lost its worker.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager

from contracts import run_directory
from contracts.errors import DONE, FAILED, RequestError, Unreachable
from contracts.files import is_url
from contracts.run_directory import State
from keeper.queue import AT_WORK, Entry, Queue
from launch import follow, notify, recovery, runs
from launch import launch as launching
from launch.commands import track as tracking
from launch.hosts import STOP_NOW_S, HostError, HostsError, stop_processes
from launch.runs import Run
from launch.targets import Target

MOST_STARTS = 5
"""Tries in which the hosts were not ready, or the worker was lost, after which an entry has failed."""
POLL_S = 3.0
BUCKET_POLL_S = 15.0
"""Every look at a bucket is billed."""

Open = Callable[[Mapping[str, str]], Sequence[Target]]
"""Gives the target of each slice, for what an entry says of the target besides."""
Hold = Callable[[str], AbstractContextManager[bool]]
"""Holds the lease of a slice; False: somebody else has it."""


class Worker:
    """One of any number of workers of a queue.

    open_targets, hold: see Open and Hold. kept: the ids of runs that somebody else resumes.
    """

    def __init__(
        self,
        queue: Queue,
        open_targets: Open,
        hold: Hold,
        say: Callable[[str], None],
        kept: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        self._queue, self._open, self._hold, self._say, self._kept = queue, open_targets, hold, say, kept
        self._targets: dict[tuple[tuple[str, str], ...], Sequence[Target]] = {}
        self._told: dict[str, str] = {}

    def step(self) -> list[Entry]:
        """Do what can be done now, which may take as long as a run takes to start; return all entries after it."""
        entries = self._queue.entries()
        kept = self._kept() if any(each.state == "running" for each in entries) else ()
        for entry in entries:
            if entry.state == "running":
                self._guarded(entry, functools.partial(self._look_after, entry, kept))
            elif entry.state == "starting":
                self._guarded(entry, functools.partial(self._take_over, entry))
        if any(each.state == "waiting" for each in entries):
            self._start_waiting()
        return self._queue.entries() if any(each.is_pending for each in entries) else entries

    def _guarded(self, entry: Entry, act: Callable[[Target], None]) -> None:
        """Act on an entry where it runs; what does not answer now is tried again in the next step."""
        try:
            found = [each for each in self._targets_of(entry) if each.slice.name == entry.slice]
            if found:
                act(found[0])
            else:
                self._tell(
                    f"{entry.number}", f"entry {entry.number}: the stack has no hosts of {entry.slice} now"
                )
        except (HostError, HostsError, RequestError) as error:
            self._tell(f"{entry.number}", f"entry {entry.number}: {error}")

    def _targets_of(self, entry: Entry) -> Sequence[Target]:
        key = tuple(sorted(entry.where.items()))
        if key not in self._targets:
            self._targets[key] = self._open(entry.where)
        return self._targets[key]

    def _tell(self, about: str, text: str) -> None:
        """Say it, unless it is what was said last."""
        if self._told.get(about) != text:
            self._told[about] = text
            self._say(text)

    # --- entries that wait ------------------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        """Start the next entry on each slice that is free."""
        entries = self._queue.entries()
        taken = {each.slice for each in entries if each.state in AT_WORK}
        for entry in entries:
            if entry.state != "waiting":
                continue
            try:
                targets = [each for each in self._targets_of(entry) if each.slice.name in entry.slices]
            except RequestError as error:
                self._tell(f"{entry.number}", f"entry {entry.number}: {error}")
                continue
            for target in targets:
                if target.slice.name not in taken:
                    taken.add(target.slice.name)
                    if self._is_free(target) and self._start(entry, target):
                        break

    def _is_free(self, target: Target) -> bool:
        """Whether all hosts of a slice answer and none has a run."""
        name, known = target.slice.name, runs.look_at_all(target.agents)
        busy = {each["run_id"] for each in known.processes if each["state"] in ("starting", "running")}
        if known.errors:
            self._targets.clear()  # the slice may have been made again, with other hosts
            where = (
                "" if target.is_local else f"; `fab recover --stack {target.name}` or the keeper restores it"
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
        with self._hold(target.slice.name) as is_held:
            now = datetime.datetime.now(datetime.UTC)
            job = str(entry.submitted["name"])
            run_id = runs.new_run_id(job, now, random.Random())
            claimed = self._queue.claim(entry.number, target.slice.name, run_id) if is_held else None
            if claimed is not None:
                self._launch(claimed, target)
            return claimed is not None

    def _launch(self, entry: Entry, target: Target) -> None:
        assert entry.run_id is not None
        label = f"entry {entry.number} ({entry.what})"
        before = runs.read(target.runs.directory(entry.run_id))
        saved = before.directory.checkpoint_steps() if before else []
        try:
            if before is None or runs.state_now(target.find_agents(before.described), before) not in _SETTLED:
                self._say(f"{label} {'is resumed' if before else 'starts'} on {target.slice.name}")
                request = dataclasses.replace(self._queue.request(entry), resume=before)
                if before is not None:
                    request = dataclasses.replace(request, name=None, run_id=None)
                tracking.start(launching.launch(request, target, self._say), target, self._say)
        except launching.LaunchFailed:
            pass  # it has a result, which the next look finds
        except (HostError, HostsError, Unreachable) as error:
            self._put_back(entry, str(error))
            return
        except RequestError as error:
            self._end(entry, "failed", str(error))
            return
        except BaseException:
            self._queue.change(
                entry.number, lambda now: dataclasses.replace(now, state="waiting", slice=None)
            )
            raise
        newest = saved[-1] if saved else -1
        now = self._queue.change(
            entry.number,
            lambda now: dataclasses.replace(
                now, state="running" if now.state == "starting" else now.state, starts=0, saved_step=newest
            ),
        )
        if now.state == "cancelled":
            self._stop(now, target)

    def _put_back(self, entry: Entry, reason: str) -> None:
        """Let an entry wait again that could not be started, or end it after so many tries."""

        def put_back(now: Entry) -> Entry:
            if now.state != "starting":
                return now
            ends = now.starts + 1 >= MOST_STARTS
            said = f"given up after {MOST_STARTS} tries: {reason}" if ends else reason
            back = dataclasses.replace(now, slice=None, starts=now.starts + 1, reason=said)
            return dataclasses.replace(back, state="failed" if ends else "waiting")

        now = self._queue.change(entry.number, put_back)
        self._say(f"entry {entry.number} ({entry.what}) {now.state}: {now.reason}")

    def _take_over(self, entry: Entry, target: Target) -> None:
        """See to an entry whose worker was lost while it started the run."""
        with self._hold(target.slice.name) as is_held:
            if not is_held or entry.run_id is None:
                return
            now = next((each for each in self._queue.entries() if each.number == entry.number), entry)
            if now.state != "starting" or now.run_id != entry.run_id:
                return  # it was not lost
            run = runs.read(target.runs.directory(entry.run_id))
            state = runs.state_now(target.find_agents(run.described), run) if run else "lost"
            if state in _SETTLED:
                self._queue.change(entry.number, lambda now: dataclasses.replace(now, state="running"))
                self._say(f"entry {entry.number} ({entry.what}): its worker is gone, and its run {state}")
                return
            if run is not None:  # not all its processes had been started
                stop_processes(target.agents, run.run_id, run.attempt, grace_s=STOP_NOW_S)
            self._put_back(entry, "its worker was lost while it started the run")

    # --- entries that run -------------------------------------------------------------------------------------------

    def _look_after(self, entry: Entry, kept: Collection[str], target: Target) -> None:
        """If the run of an entry has ended, end the entry, or let it wait to be resumed."""
        assert entry.run_id is not None
        run = runs.read(target.runs.directory(entry.run_id))
        if run is None:
            self._end(entry, "failed", f"{target.runs_url}/{entry.run_id} is gone")
            return
        known = runs.look(target.find_agents(run.described), run)
        state = runs.state_by(run, known)
        if known.errors and run.current_result() is None:
            self._targets.clear()
            hosts = f"{len(known.errors)} of {run.processes} hosts do not answer"
            self._tell(run.run_id, f"entry {entry.number} ({run.run_id}): {hosts}, and it has no result")
        elif state == "failed" and run.current_result() is None and follow.is_ending(known):
            pass  # the agents are finding out which host failed first
        elif state not in run_directory.ACTIVE:
            if run.run_id in kept and state != "done":
                return
            run = follow.concluded(run, state)
            notify.about(run, state, self._say)
            again = self._again(entry, run, state)
            if again is None:
                self._end(entry, state, _reason(run, state))
            else:
                self._queue.change(entry.number, lambda now: again if now == entry else now)
                self._say(f"entry {entry.number} ({run.run_id}) {again.reason}")

    def _again(self, entry: Entry, run: Run, state: State) -> Entry | None:
        """Return the entry as it waits to be resumed; None where it has ended.

        A run that was preempted or lost goes on as long as it has a new checkpoint each time; else it takes a restart.
        """
        decision = recovery.decide(state, run)
        if not decision.resume or state == "stopped":
            return None
        newest = [-1, *run.directory.checkpoint_steps()][-1]
        is_free = state in ("preempted", "lost") and newest > entry.saved_step
        if not is_free and entry.restarts == 0:
            return None
        left = entry.restarts - (not is_free)
        return dataclasses.replace(
            entry,
            state="waiting",
            slice=None,
            restarts=left,
            reason=f"{decision.reason}, when a slice is free",
        )

    def _end(self, entry: Entry, state: State, reason: str) -> None:
        ended = self._queue.change(
            entry.number,
            lambda now: dataclasses.replace(now, state=state, reason=reason) if now.is_pending else now,
        )
        said = f": {ended.reason}" if ended.reason else ""
        self._say(f"entry {entry.number} ({entry.run_id or entry.what}) {ended.state}{said}")

    def _stop(self, entry: Entry, target: Target) -> None:
        run = runs.read(target.runs.directory(str(entry.run_id)))
        if run is not None:
            stop_processes(target.agents, run.run_id, run.attempt, grace_s=follow.STOP_GRACE_S)


_SETTLED: tuple[State, ...] = ("running", "saving", "done")
"""States of a run that nobody has to start."""


def _reason(run: Run, state: State) -> str:
    """How a run ended, in a line."""
    if state == "done":
        _, latest = runs.progress(run)
        return runs.figure(run, latest)
    return next(iter(str((run.current_result() or {}).get("error") or "").splitlines()), "")


def work(worker: Worker, queue: Queue, say: Callable[[str], None], *, stay: bool) -> int:
    """Work until nothing waits or runs, or with `stay` until interrupted; FAILED if a run ended otherwise than done."""
    pending: set[int] = set()
    ended: dict[int, str] = {}
    while True:
        entries = worker.step()
        ended |= {
            each.number: each.state for each in entries if each.number in pending and not each.is_pending
        }
        pending |= {each.number for each in entries if each.is_pending}
        if not stay and not any(each.is_pending for each in entries):
            break
        time.sleep(BUCKET_POLL_S if is_url(queue.documents.url) else POLL_S)
    done = [number for number, state in ended.items() if state == "done"]
    say(f"{len(done)} of {len(ended)} done; nothing waits or runs" if ended else "the queue is empty")
    return DONE if len(done) == len(ended) else FAILED
