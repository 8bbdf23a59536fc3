"""What the keeper and the queue observe and act on: run directories, hosts, Google's queued resources.

It is the `launch.reconcile.World` of a stack, or of this machine. A run is started by `launch.launching`, a slice
is made again by `backends.vm.ensure`, as every command does it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.resolve import inventory_target, read_inventory, resolve
from backends.vm import ensure
from console import follow, removal
from console import track as tracking
from contracts import run_directory
from contracts.errors import RequestError, Unreachable
from contracts.files import is_url
from contracts.host_interface import STOP_GRACE_S
from contracts.inventory import RECORDED, SPECIFICATION
from contracts.inventory import Slice as InventorySlice
from contracts.run_directory import RunDirectory, State
from infra.documents import Documents, DocumentsError
from infra.documents.lease import Lease, held, myself
from infra.slice_apis import lifecycles, zone_search
from infra.slice_apis.lifecycles import Clients
from infra.slice_apis.retry import Backoff, CloudTpuError, LostAgainError
from infra.slice_apis.slice_api import ACTIVE, SliceApi
from infra.slice_apis.zone_search import WRONG
from keeper import submissions
from keeper.gateway_login import from_here
from keeper.stack_store import Stack, stack_at
from launch import launching, runs, targets
from launch.code import precompiled
from launch.control.control_documents import Run
from launch.control.store import Content
from launch.hosts import HostError, HostsError
from launch.launching import LaunchFailed
from launch.policy import RunObserved, Signs, SliceObserved, Standing
from launch.reconcile import NotStartedError, RequestRefusedError, SliceLostError
from launch.request.run_request import as_it_was, resuming, work_out
from launch.targets import PresetInventory, Target

if TYPE_CHECKING:
    from infra.slice_apis.google_api import Listing

REFUSALS = (CloudTpuError, HostError, HostsError, DocumentsError)
"""What may be better at the next look, besides RequestError."""
FOREIGN_LIMIT_S = 300.0
"""Without a heartbeat, after which a run that no agent has a record of is lost. Agents keep theirs by user, so another
one may have started it; nobody but its heartbeats can tell, and what they lie in may be away for a while."""


class World:
    """documents: the control documents. request: the target that a command names; None: of the keeper, which knows its
    stack by the documents alone. program: who holds leases."""

    def __init__(
        self,
        documents: Documents,
        say: Callable[[str], None],
        *,
        program: str,
        request: targets.TargetRequest | None = None,
        backoff: Backoff | None = None,
        clients: Clients | None = None,
    ) -> None:
        self._documents, self._say, self._program, self._request = documents, say, program, request
        self.backoff = backoff or Backoff(say=say)
        self.clients = clients or Clients(lifecycles.read_environment_settings, self.backoff)
        self._local = threading.local()  # what one slice is done by is not what another thread has read

    @property
    def _content(self) -> Content:
        none = Content(runs={}, slices={}, stack_values={}, unreadable={})
        content: Content = getattr(self._local, "content", none)
        return content

    @_content.setter
    def _content(self, content: Content) -> None:
        self._local.content = content

    # --- slices -----------------------------------------------------------------------------------------------------

    def slices(self, content: Content) -> dict[str, SliceObserved]:
        self._content = content
        if (problem := content.unreadable.get(SPECIFICATION)) is not None:
            raise RequestError(problem)
        stack = stack_at(content, self._documents.url)
        if stack is None:
            return self._unspecified(content)
        by_name: dict[str, SliceObserved] = {}
        hosts = {entry.name: entry.hosts for entry in self._inventory_slices(stack)}
        for entry in stack.inventory.slices:
            if entry.name not in stack.slices:
                by_name[entry.name] = SliceObserved(standing="fixed" if hosts.get(entry.name) else "unknown")
        listings: dict[str, Listing | None] = {}
        for name, properties in stack.slices.items():
            key = lifecycles.api_name(properties)
            try:
                api = lifecycles.api_for(properties, self.clients, self.backoff)
                if key not in listings:
                    listings[key] = None  # where it is refused, it is asked once
                    listings[key] = api.listing(stack.project)
                by_name[name] = observed_slice(api, properties, _recorded(stack, name), listings[key])
            except CloudTpuError as error:
                self._say(str(error))
                by_name[name] = SliceObserved(standing="unknown")
        return by_name

    def _inventory_slices(self, stack: Stack) -> Sequence[InventorySlice]:
        return (stack.inventory if self._request is None else read_inventory(self._request)).slices

    def _unspecified(self, content: Content) -> dict[str, SliceObserved]:
        """Return the slices of this machine, or of an inventory, which nothing here can make again."""
        if self._request is None or self._request.stack == targets.LOCAL:
            # A run of a project whose stack is gone has no slice any more.
            names = {name for run in content.runs.values() if run.project is None for name in run.slices}
            return {name: SliceObserved(standing="fixed") for name in names}
        return {
            entry.name: SliceObserved(standing="fixed" if entry.hosts else "unknown")
            for entry in read_inventory(self._request).slices
            if entry.pool is None
        }

    def request(self, name: str, content: Content, lease: Lease, *, wait_s: float) -> bool:
        stack = self._specified(content)
        try:
            remade_slice = ensure.ensure(
                self.clients,
                self.backoff,
                stack.slices[name],
                _recorded(stack, name),
                lease,
                wait_s=wait_s,
                lost=lambda reason: self._say(f"{name}: is lost ({reason})"),
            )
        except ensure.UnpublishedError as error:
            self._say(str(error))
            return True  # preparing the hosts waits for that
        except LostAgainError as error:
            raise SliceLostError(str(error)) from None
        except CloudTpuError as error:
            raise RequestRefusedError(str(error), is_final=error.status in WRONG) from None
        if remade_slice is not None:
            ensure.record(self._documents, remade_slice)
        return remade_slice is not None

    def release(self, name: str, content: Content, lease: Lease) -> None:
        stack = self._specified(content)
        ensure.release(self.clients, self.backoff, stack.slices[name], lease)
        ensure.record(self._documents, dataclasses.replace(_recorded(stack, name), hosts=()))

    def _specified(self, content: Content) -> Stack:
        stack = stack_at(content, self._documents.url)
        if stack is None:
            raise RequestError(f"{self._documents.url}: does not say what the stack's slices are made of")
        return stack

    def _observe(self, stack: Stack, name: str) -> None:
        """Record the hosts that a slice has now."""
        fresh = ensure.observed(self.clients, self.backoff, stack.slices[name], _recorded(stack, name))
        if fresh is not None and fresh != _recorded(stack, name):
            ensure.record(self._documents, fresh)

    # --- hosts ------------------------------------------------------------------------------------------------------

    def target(self, run: Run, name: str | None = None) -> Target:
        """Return where a run goes on. name: of the slice; None: the run's own."""
        name = name or run.slice or ""
        where = dict(run.submission.where) if run.submission else {}
        if run.project is None and (self._request is None or self._request.stack == targets.LOCAL):
            place = targets.TargetRequest(**{**where, "runs": run.runs_url})  # type: ignore[arg-type]  # texts alone
            before = runs.read(resolve(place).runs.directory(run.run_id))
            return resolve(place, before) if before else resolve(place)
        if self._request is not None:
            request = dataclasses.replace(self._request, **{**where, "runs": run.runs_url}, slice=name)  # type: ignore[arg-type]
            return inventory_target(read_inventory(request), request)
        stack = self._specified(self._content)
        if name in stack.slices and not _recorded(stack, name).hosts:
            self._observe(stack, name)
            recorded = self._documents.read(RECORDED).value
            self._content = dataclasses.replace(
                self._content, stack_values={**self._content.stack_values, RECORDED: recorded}
            )
            stack = self._specified(self._content)
        return on(stack, name, run.runs_url or None)

    def silent(self, name: str, content: Content) -> int:
        run = next(run for run in content.runs.values() if run.slice == name)
        return len(self.target(run).backend.status().errors)

    def prepare(
        self, name: str, run: Run, content: Content, lease: Lease, require_there: Callable[[], None]
    ) -> None:
        stack = stack_at(content, self._documents.url)
        if stack is not None and name in stack.slices:
            # One of which a node is gone, which the listing does not show, is made again here.
            if not self.request(name, content, lease, wait_s=0.0):
                raise SliceLostError(f"{name} has lost a node, and waits for capacity")
            recorded = self._documents.read(RECORDED).value
            self._content = dataclasses.replace(
                content, stack_values={**content.stack_values, RECORDED: recorded}
            )
        target = self.target(run, name)
        target.backend.prepare(lambda: self.target(run, name), self._say, require_there)

    # --- runs -------------------------------------------------------------------------------------------------------

    def signs(self, observed_runs: Sequence[Run]) -> dict[str, Signs]:
        by_run: dict[str, Signs] = {}
        names = [run_directory.heartbeat(0), run_directory.RESULT]
        for folder in sorted(
            {run.runs_url for run in observed_runs if run.attempt is not None or not run.submission}
        ):
            ids = sorted(run.run_id for run in observed_runs if run.runs_url == folder)
            if not is_url(folder) and not Path(folder).is_dir():
                continue
            try:
                ages_s = Documents(folder).ages_s(ids, names)
            except DocumentsError as error:
                self._say(str(error))
                continue
            for run_id in ids:
                beat, result = (f"{run_id}/{name}" for name in names)
                by_run[run_id] = Signs(beat_age_s=ages_s.get(beat), has_result=result in ages_s)
        return by_run

    def directory(self, run: Run) -> RunDirectory | None:
        """Return a run's directory as this machine sees it without hosts; None where it does not."""
        if not is_url(run.runs_url) and not Path(run.runs_url).is_dir():
            return None
        return resolve(targets.TargetRequest(runs=run.runs_url)).runs.directory(run.run_id)

    def examine(self, run: Run, content: Content, *, has_hosts: bool) -> RunObserved | None:
        self._content = content
        if not has_hosts:
            directory = self.directory(run)
            run_read = runs.read(directory) if directory is not None else None
            if run_read is None:
                return None
            outcome = (run_read.current_result() or {"outcome": "lost"}).get("outcome")
            state: State = next((name for name in run_directory.OUTCOMES if name == outcome), "lost")
            return launching.observed(run_read, state)
        target = self.target(run)
        try:
            run_read = runs.read(target.runs.directory(run.run_id))
        except HostError:
            if silent := len(target.backend.status().errors):  # which alone may reach it
                return RunObserved(living="unknown", silent=silent)
            raise
        if run_read is None:
            return None
        look = target.backend.status([run_read]).for_run(run_read)
        now_s = self._documents.now_s()
        if not (look.processes or look.knowing):
            # No agent has a record of it: another user has started it.
            now_s -= FOREIGN_LIMIT_S - run_directory.SILENCE_LIMIT_S
        state = runs.state(
            run_read, look.processes, unanswered=len(look.errors), knowing=look.knowing, now_s=now_s
        )
        has_result = run_read.current_result() is not None
        silent = len(look.errors)
        if state in run_directory.ACTIVE or (state == "failed" and not has_result and follow.is_ending(look)):
            return launching.observed(run_read, state, living="present")
        if silent and not (has_result and state == "done"):
            return launching.observed(run_read, state, living="unknown", silent=silent)
        run_read, state = follow.concluded(run_read, state, target)
        return launching.observed(run_read, state)

    def start(self, run: Run, require: Callable[[], object]) -> int:
        try:
            target = self.target(run)
            before = runs.read(target.runs.directory(run.run_id))
            if before is None and run.submission is not None:
                launch_request = submissions.request(self._documents, run)
            elif before is not None:
                # A stop of a kept run is in its document; one from before it was kept is overruled.
                request = resuming(before, launching.stop_asked(before))
                launch_request = dataclasses.replace(request, submitted=as_it_was(before))
            else:
                raise RequestError(f"{run.runs_url}/{run.run_id}: there is no such run any more")
            planned = work_out(launch_request, target)
            if planned.step is not None and planned.precompiled is None:
                note = precompiled.find_published(planned.step, self._documents)
                launch_request = dataclasses.replace(launch_request, precompiled=note)
        except (Unreachable, DocumentsError, HostError, HostsError) as error:
            raise NotStartedError(str(error), is_outage=isinstance(error, Unreachable)) from None
        except RequestError as error:
            raise NotStartedError(str(error), is_final=True) from None
        try:
            started = launching.launch(
                launch_request,
                target,
                self._say,
                hold=lambda: contextlib.nullcontext(require),
                now_s=self._documents.now_s,
            )
        except LaunchFailed as failure:
            if failure.is_interrupted:
                raise KeyboardInterrupt from None
            raise NotStartedError(str(failure), has_result=True) from None
        except Unreachable as error:
            raise NotStartedError(str(error), is_outage=True) from None
        except (HostError, HostsError, RequestError) as error:
            is_outage = isinstance(error, HostError) and error.is_outage
            raise NotStartedError(
                str(error), is_in_use=launching.is_in_use(error), is_outage=is_outage
            ) from None
        tracking.start(started, target, self._say)
        return started.attempt

    def stop(self, run: Run) -> None:
        target = self.target(run)
        run_read = runs.read(target.runs.directory(run.run_id))
        if run_read is not None:
            grace_s = STOP_GRACE_S if run.stop_grace_s is None else run.stop_grace_s
            target.backend.stop(run_read, grace_s=grace_s)

    def remove(self, run: Run) -> None:
        directory, target = self.directory(run), None
        if directory is None:  # only its hosts see it
            target = self.target(run)
            if not any(host.internal_address for host in target.hosts):
                raise RequestError(
                    f"only the hosts of {run.slice} reach {run.runs_url}, and there are none now"
                )
            directory = target.runs.directory(run.run_id)
        run_read = runs.read(directory)
        if run_read is not None and run.attempt is not None and run_read.attempt > run.attempt.number:
            raise RequestError(
                f"attempt {run_read.attempt} of it was started by hand; once that has ended, `fab rm` again"
            )
        removal.remove_directory(directory, None if run_read is None else run_read.attempt)

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[Lease]:
        with held(Lease(self._documents, name, myself(self._program))) as mine:
            yield mine


def on(stack: Stack, slice_name: str, runs_url: str | None = None) -> Target:
    """Return a slice of a stack, as the keeper reaches it. runs_url: where its runs are; None: by default."""
    inventory = from_here(stack.inventory, os.environ)
    preset = None
    if stack.platform is not None:
        preset = PresetInventory(
            inventory=inventory,
            folder=Path("/nonexistent"),
            platform=stack.platform,
            python=stack.python or targets.PYTHON,
            stand_in_devices=stack.stand_in_devices or (),
        )
    request = targets.TargetRequest(stack=inventory.stack, slice=slice_name, runs=runs_url, preset=preset)
    return inventory_target(inventory, request)


def _recorded(stack: Stack, name: str) -> InventorySlice:
    return next(entry for entry in stack.inventory.slices if entry.name == name)


def observed_slice(
    api: SliceApi[Any], properties: Mapping[str, Any], recorded: InventorySlice, listing: Listing | None
) -> SliceObserved:
    """Return how a slice stands by a listing of its project; None: Google gave no answer. recorded: as recorded."""
    if listing is None:
        return SliceObserved(standing="unknown")
    spec = api.spec(properties)
    sightings = [api.glance(spec, resource) for resource in api.in_listing(listing, spec).values()]
    if listing.unreachable and ACTIVE not in [look.state for look in sightings]:
        return SliceObserved(standing="unknown")  # it may be in a zone that could not be asked
    kinds = [look.kind for look in sightings]
    order: tuple[Standing, ...] = ("active", "waiting", "lost")
    kind: Standing = next((entry for entry in order if entry in kinds), "absent")
    created = next((str(look.resource.get("createTime", "")) for look in sightings if look.kind == kind), "")
    if kind == "active" and len(spec.zones) > 1 and sum(look.state != "DELETING" for look in sightings) > 1:
        kind = "doubled"
    if kind == "waiting" and len(spec.zones) > 1 and spec.strategy != "race":
        kind = "overdue" if any(zone_search.is_over(spec, look, api.now()) for look in sightings) else kind
    # Recorded when its hosts were: a listing of requests does not show when their nodes end.
    ends_s = recorded.ends_s if created and recorded.created == created else None
    return SliceObserved(standing=kind, created=created, ends_s=ends_s)
