"""Kept runs on their hosts: their signs of life by one listing of each bucket; a run examined, resumed or stopped.

A run is resumed by `launch.recovery` and `launch.launch`, as `fab recover` does it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from contracts import run_directory
from contracts.errors import RequestError, Unreachable
from contracts.files import is_url
from contracts.run_directory import RunDirectory, State
from infra.documents import Documents, DocumentsError
from jobs.runtime.metric_definitions import finite
from keeper.rules import Facts, Sign
from keeper.store import Stack, Wanted
from launch import costs, recovery, runs, targets
from launch import launch as launching
from launch.follow import STOP_GRACE_S
from launch.hosts import HostError, stop_processes
from launch.runs import Run
from launch.targets import Given, Target

Say = Callable[[str], None]


class WrongRequestError(Exception):
    """A run cannot be resumed as it is described, however often that is tried."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examined:
    """A run as it was read, and what the rules have to know of it."""

    run: Run
    facts: Facts


def _facts(run: Run, state: State) -> Facts:
    result = run.current_result() or {}
    return Facts(
        state=state,
        is_wrong=bool(result.get("request")),
        error=str(result.get("error") or "").partition("\n")[0],
        cost_usd=costs.least_usd(run),
        max_usd=finite(run.described.get("max_usd")),
        saved=() if state in run_directory.ACTIVE else tuple(run.directory.checkpoint_steps()),
    )


class Hosts:
    """The hosts of wanted runs. Every method may raise HostError, HostsError or RequestError."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def signs(self, wanted: Sequence[Wanted]) -> dict[str, Sign]:
        """Return what a listing shows of each run; runs that cannot be listed from this machine are left out."""
        found: dict[str, Sign] = {}
        names = [run_directory.heartbeat(0), run_directory.RESULT]
        for folder in sorted({each.runs_url for each in wanted if not each.for_queue}):
            ids = sorted(each.run_id for each in wanted if each.runs_url == folder)
            if not is_url(folder) and not Path(folder).is_dir():
                continue
            try:
                ages_s = Documents(folder).ages_s(ids, names)
            except DocumentsError as error:
                self._say(str(error))
                continue
            for run_id in ids:
                beat, result = (f"{run_id}/{name}" for name in names)
                found[run_id] = Sign(beat_age_s=ages_s.get(beat), has_result=result in ages_s)
        return found

    def directory(self, wanted: Wanted) -> RunDirectory | None:
        """Return a run's directory as this machine sees it without hosts; None where it does not."""
        if wanted.for_queue or (not is_url(wanted.runs_url) and not Path(wanted.runs_url).is_dir()):
            return None
        here = targets.resolve(targets.Wanted(runs=wanted.runs_url))
        return here.runs.directory(wanted.run_id)

    def without_hosts(self, wanted: Wanted) -> Examined | None:
        """Return a run whose hosts are gone, as its directory tells it; None where that cannot be read from here."""
        directory = self.directory(wanted)
        if directory is None or (run := runs.read(directory)) is None:
            return None
        outcome = (run.current_result() or {"outcome": "lost"}).get("outcome")
        state: State = next((known for known in run_directory.OUTCOMES if known == outcome), "lost")
        return Examined(run=run, facts=_facts(run, state))

    def target(self, wanted: Wanted, stack: Stack | None) -> Target:
        """Return where a run is to go on. stack: with the hosts as they are now; None: this machine."""
        if stack is None:
            place = targets.Wanted(runs=wanted.runs_url)
            here = targets.resolve(place)
            run = runs.read(here.runs.directory(wanted.run_id))
            return targets.resolve(place, run) if run else here
        return self.on(stack, wanted.slice, wanted.runs_url or None)

    def on(self, stack: Stack, slice_name: str, runs_url: str | None = None) -> Target:
        """Return a slice of a stack. runs_url: where its runs are; None: where they are by default."""
        from keeper import login  # with asyncssh, which a quiet pass does without

        inventory = login.from_here(stack.inventory, os.environ)
        given = None
        if stack.platform is not None:
            given = Given(
                inventory=inventory,
                folder=Path("/nonexistent"),
                platform=stack.platform,
                python=stack.python or targets.PYTHON,
                stand_in_devices=stack.stand_in_devices or (),
            )
        asked = targets.Wanted(stack=inventory.stack, slice=slice_name, runs=runs_url, given=given)
        return targets.of_inventory(inventory, asked)

    def examine(self, wanted: Wanted, target: Target, now_s: float) -> Examined:
        """Read a run and ask its hosts what it is doing. now_s: by the clock of the store.

        Raises:
            RequestError: there is no such run.
        """
        run = runs.read(target.runs.directory(wanted.run_id))
        if run is None:
            raise RequestError(f"{wanted.runs_url}/{wanted.run_id}: there is no such run any more")
        known = runs.look(target.find_agents(run.described), run)
        state = runs.state(
            run, known.processes, unanswered=len(known.errors), knowing=known.knowing, now_s=now_s
        )
        return Examined(run=run, facts=_facts(run, state))

    def silent(self, target: Target) -> list[HostError]:
        return list(runs.look_at_all(target.agents).errors)

    def prepare(self, reopen: Callable[[], Target], require_there: Callable[[], None]) -> Target:
        """Wait until new hosts answer, and prepare them. require_there: raises once their slice is lost."""
        return recovery.prepared(reopen, self._say, require_there)

    def resume(self, run: Run, target: Target, now_s: Callable[[], float]) -> Run:
        """Start the next attempt of a run with the code of its latest one, and return when every process has joined.

        now_s: the clock of the store. This machine's may be wrong, for which hosts would be refused.

        Where its directory does not have that code, it goes on with the code that this keeper was installed with.

        Raises:
            WrongRequestError: it cannot be resumed as it is described.
            launch.launch.LaunchFailed: they did not join.
        """
        request = dataclasses.replace(recovery.resuming(run), submitted=recovery.as_it_was(run))
        try:
            launching.work_out(request, target)
        except Unreachable:
            raise
        except RequestError as error:
            raise WrongRequestError(str(error)) from None
        return launching.launch(request, target, self._say, now_s=now_s)

    def stop(self, run: Run, target: Target) -> None:
        """Stop a run with a checkpoint, as `fab stop` does, also where the keeper's own user has resumed it."""
        stop_processes(target.find_agents(run.described), run.run_id, run.attempt, grace_s=STOP_GRACE_S)

    def write_acts(self, wanted: Wanted, run: Run) -> None:
        """Write what was done about a run into its directory."""
        text = "".join(json.dumps(dict(act)) + "\n" for act in wanted.acts)
        run.directory.write_text(run_directory.KEEPER, text)
