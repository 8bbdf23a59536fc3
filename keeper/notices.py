"""What people are told of runs: written into a run's document with what has happened, and delivered until it is taken.

A reconciler that is killed between the two loses no notice, and may deliver some twice.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

from console import notify
from console.notify import Event, Kind
from contracts import run_directory
from contracts.aliases import Say
from contracts.durations import HOUR_S
from contracts.errors import RequestError
from keeper.world import World
from launch import runs
from launch.control.control_documents import Run
from launch.control.store import Store
from launch.hosts import HostError, in_thread

LIFE_S = 6 * HOUR_S
"""For so long a notice is delivered again, at each pass, to a channel that does not take it."""
SETTLE_LIMIT_S = 30.0


class Notices:
    """The `launch.reconcile.Witness` of one pass."""

    def __init__(self, store: Store, world: World, say: Say) -> None:
        self._store, self._world, self._say = store, world, say
        self._delivering: dict[tuple[str, str], concurrent.futures.Future[None]] = {}
        self._lock = threading.Lock()

    @functools.cached_property
    def has_channel(self) -> bool:
        """Whether a channel is set, by this machine or by the stack's document, which a pass has read by then."""
        return bool(notify.channels(os.environ))

    def notice(self, run: Run, kind: str, text: str) -> Mapping[str, Any] | None:
        if not kind or not self.has_channel:
            return None
        event = Event(kind=cast(Kind, kind), text=text, run=run.run_id, name=run.name, stack=run.stack)
        with contextlib.suppress(HostError, RequestError, OSError):  # then less is known of the run
            directory = self._world.directory(run) if run.attempt is not None else None
            attempted = runs.read(directory) if directory is not None else None
            if attempted is not None:
                event = notify.run_event(attempted, cast(Kind, kind), text)
        return {"event": dataclasses.asdict(event), "since_s": self._store.now_s(), "told": []}

    def deliver(self, noticed: Sequence[Run]) -> None:
        for run in noticed:
            for notice in run.notices:
                key = (run.run_id, json.dumps(notice["event"], sort_keys=True))
                with self._lock:  # a look and the threads of slices deliver at the same time
                    if key not in self._delivering:
                        self._delivering[key] = in_thread(functools.partial(self._deliver, run, notice))

    def settle(self) -> None:
        """Wait until all is delivered, or not taken; what takes longer is delivered again by the next pass."""
        for future in concurrent.futures.wait(self._delivering.values(), SETTLE_LIMIT_S).done:
            if error := future.exception():
                self._say(f"notices are delivered again by the next pass: {error}")
        self._delivering.clear()

    def record(self, run: Run) -> None:
        """Write what was done about a run into its directory."""
        if run.attempt is None:  # it has none yet
            return
        text = "".join(json.dumps(dict(line)) + "\n" for line in run.history)
        try:
            directory = self._world.directory(run)
            if directory is not None and runs.read(directory) is not None:
                directory.write_text(run_directory.KEEPER, text)
        except (HostError, RequestError, OSError) as error:
            self._say(f"warning: {run.run_id}: {run_directory.KEEPER} could not be written: {error}")

    def _deliver(self, run: Run, notice: Mapping[str, Any]) -> None:
        event, delivered, problems = Event(**notice["event"]), {*notice["told"]}, list[str]()
        if self.has_channel:
            delivered, problems = notify.deliver(event, self._world.directory(run), delivered)
        for problem in problems:
            self._say(f"{run.run_id}: not notified by {problem}")
        is_over = not problems or self._store.now_s() - float(notice["since_s"]) > LIFE_S
        remaining = () if is_over else ({**notice, "told": sorted(delivered)},)

        def change(now: Run | None) -> Run | None:
            if now is None:
                return None
            different = (other for other in now.notices if other["event"] != notice["event"])
            return dataclasses.replace(now, notices=(*different, *remaining))

        if remaining != (notice,):
            self._store.edit_run(run.run_id, change)
