"""Where the documents of runs and slices are kept, and how several programs change them at once.

One document an object: `runs/RUN_ID.json`, `slices/NAME.json`. A change names the version that it replaces, so of two
at once exactly one succeeds and the other is made anew on what is there then. Each change also has an operation id,
which the document holds: a change that got through, and of which only the answer was lost, is not made a second time,
whoever has written since. A document that cannot be read is set aside and named, while the others go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from contracts import atomic
from contracts.errors import RequestError
from contracts.inventory import RECORDED, SPECIFICATION
from infra.documents import ABSENT, ChangedError, ContentError, Documents, OutageError
from launch.control import control_documents
from launch.control.control_documents import Run, Slice

RUNS, SLICES = "runs/", "slices/"
BUNDLES = "bundles/"
NUMBERS = "numbers.json"
"""The number of the next entry of the queue."""
OPERATIONS = "operations"
MOST_OPERATIONS = 30
"""Ids that a document holds of its latest changes: more than others can make while an answer is waited for."""
MOST_TRIES = 30
MOST_ENDED = 200
"""Runs that have ended and are still listed; the oldest go first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Content:
    """What the store holds. stack_values: what Pulumi and reconcilers have written of the stack: SPECIFICATION
    and RECORDED.
    unreadable: documents that are none, and why."""

    runs: Mapping[str, Run]
    slices: Mapping[str, Slice]
    stack_values: Mapping[str, Any]
    unreadable: Mapping[str, str]


class Store:
    """The runs and slices in the control documents of a stack, or of this machine.

    cache: a file of this machine that remembers documents by version, so that a look reads those that have changed;
    None: it is remembered for the life of this object. Every method raises DocumentsError where the place does not
    answer.
    """

    def __init__(self, documents: Documents, cache: Path | None = None) -> None:
        self.documents = documents
        self._cache = cache
        self._known: dict[str, tuple[int, Any]] = _read_cache(cache, documents.url)

    def now_s(self) -> float:
        """Return the time by the clock of the place, in Unix seconds."""
        return self.documents.now_s()

    def read(self) -> Content:
        """Return all runs and slices. One listing, and a read of each document that has changed."""
        versions = self.documents.versions((RUNS, SLICES, SPECIFICATION, RECORDED))
        is_same = {name: cached[0] for name, cached in self._known.items()} == versions
        fresh: dict[str, tuple[int, Any]] = {}
        unreadable: dict[str, str] = {}
        for name, version in versions.items():
            cached = self._known.get(name)
            if cached is None or cached[0] != version:
                try:
                    document = self.documents.read(name)
                except ContentError as error:
                    unreadable[name] = str(error)
                    continue
                if document.version == ABSENT:
                    continue
                cached = (document.version, document.value)
            fresh[name] = cached
        self._known = fresh
        if not is_same:
            _write_cache(self._cache, self.documents.url, fresh)
        runs: dict[str, Run] = {}
        slices: dict[str, Slice] = {}
        stack_values: dict[str, Any] = {}
        for name, (_, value) in fresh.items():
            try:
                if name.startswith(RUNS):
                    run = control_documents.parse_run(_content(value))
                    runs[run.run_id] = run
                elif name.startswith(SLICES):
                    slice_spec = control_documents.parse_slice(_content(value))
                    slices[slice_spec.name] = slice_spec
                else:
                    stack_values[name] = value
            except ValueError as error:
                unreadable[name] = f"{self.documents.url}/{name} cannot be read: {error}"
        return Content(runs=runs, slices=slices, stack_values=stack_values, unreadable=unreadable)

    def run(self, run_id: str) -> Run | None:
        """Return the run's document; None where there is none. Raises RequestError: it cannot be read."""
        name = f"{RUNS}{run_id}.json"
        return self._parsed(name, self.documents.read(name).value, control_documents.parse_run)

    def edit_run(self, run_id: str, change: Callable[[Run | None], Run | None]) -> Run | None:
        """Change one run, and return it as it is then. change: gets None where there is none; returning what it got
        changes nothing, returning None deletes it. It is called again where others write meanwhile."""
        return self._edit(f"{RUNS}{run_id}.json", control_documents.parse_run, change)

    def edit_slice(self, name: str, change: Callable[[Slice], Slice | None]) -> Slice:
        """Change one slice, and return it as it is then; one without a document is as nothing has befallen."""
        changed = self._edit(
            f"{SLICES}{name}.json",
            control_documents.parse_slice,
            lambda document: change(document or Slice(name=name)),
        )
        return changed or Slice(name=name)

    def add_runs(self, runs: list[Run]) -> list[Run]:
        """Add submitted runs, which get consecutive numbers, and return them."""
        first = 0

        def count(value: Any) -> int:
            nonlocal first
            first = int(value or 1)
            return first + len(runs)

        self.documents.change(NUMBERS, count)
        added = []
        for number, run in enumerate(runs, first):
            assert run.submission is not None
            numbered = dataclasses.replace(
                run, submission=dataclasses.replace(run.submission, number=number), order=float(number)
            )
            self.edit_run(run.run_id, lambda _, run=numbered: run)  # type: ignore[misc]
            added.append(numbered)
        return added

    def forget_ended(self, content: Content) -> None:
        """Delete the documents of the runs that ended first, where there are more than MOST_ENDED."""
        ended = sorted(
            (run.end.at_s, run.run_id)
            for run in content.runs.values()
            if run.end is not None and not run.notices
        )
        for _, run_id in ended[: -MOST_ENDED or None]:
            self.edit_run(run_id, lambda run: None if run is not None and run.end is not None else run)

    def _parsed[T](self, name: str, value: Any, parse: Callable[[Any], T]) -> T | None:
        try:
            return None if value is None else parse(_content(value))
        except ValueError as error:
            raise RequestError(
                f"{self.documents.url}/{name} cannot be read: {error}; remove that document ({name}) if nobody needs it"
            ) from None

    def _edit[T: Run | Slice](
        self, name: str, parse: Callable[[Any], T], change: Callable[[T | None], T | None]
    ) -> T | None:
        operation = uuid.uuid4().hex
        for attempt in range(MOST_TRIES):
            document = self.documents.read(name)
            value = document.value
            before = self._parsed(name, value, parse)
            operations = list(value.get(OPERATIONS, ())) if isinstance(value, dict) else []
            if operation in operations:
                return before  # it got through, and only its answer was lost
            after = change(before)
            if after == before:
                return before
            with contextlib.suppress(ChangedError):
                if after is None:
                    self.documents.delete(name, version=document.version)
                else:
                    operation_ids = [*operations, operation][-MOST_OPERATIONS:]
                    self.documents.write(
                        name,
                        {**control_documents.to_json(after), OPERATIONS: operation_ids},
                        version=document.version,
                    )
                return after
            time.sleep(random.random() * min(1.0, 0.02 * 2**attempt))
        raise OutageError(
            f"{self.documents.url}/{name}: others have changed it {MOST_TRIES} times while it was being changed; try "
            "again"
        )


def _content(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if name != OPERATIONS}


def _read_cache(path: Path | None, url: str) -> dict[str, tuple[int, Any]]:
    if path is None:
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["url"] == url:
            return {name: (int(version), item) for name, (version, item) in value["documents"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # it is a cache
    return {}


def _write_cache(path: Path | None, url: str, cached: Mapping[str, tuple[int, Any]]) -> None:
    if path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write(path, json.dumps({"url": url, "documents": cached}).encode(), mode=0o600)
