"""What people want of runs and slices: one document an object, in `control/` beside `runs/`.

People and `fab` write what is desired; `launch.reconcile` brings it about, and notes in the same documents what it has
begun. An object is deleted only once a look has shown that nothing exists for it any more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

from contracts.run_records import moment

Json = Mapping[str, Any]
Desired = Literal["running", "stopped", "removed", "unmanaged"]
"""removed: as stopped, and then its directory goes, and this document last. unmanaged: whatever runs goes on, and is
not started again (`fab unkeep`)."""
DESIRED: tuple[Desired, ...] = ("running", "stopped", "removed", "unmanaged")
Outcome = Literal["done", "failed", "stopped", "hung", "lost", "preempted", "cancelled", "unmanaged"]

MOST_HISTORY = 100
"""Lines of history that a document holds; the oldest go first."""
KEEP_ATTEMPTS = 20
"""Attempts of a run that is handed to the keeper, after the first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """When a run is no longer started again; None: without that limit.

    attempts: that may still begin, whatever ended the last one. restarts: that may still begin after failures, hangs
    and losses in which the run saved nothing new. deadline_s: Unix seconds. max_usd: of all attempts together.
    """

    attempts: int | None = None
    restarts: int | None = None
    deadline_s: float | None = None
    max_usd: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """The latest attempt that a reconciler has begun; written before anything starts.

    number: as run.json will have it. created: when the slice was created, as its API says it, so that hosts that are
    lost are told from hosts that are there. checkpoint: the step that it goes on from, -1: from the start.
    after: why the attempt before it ended, "" for none: see launch.policy.Cause.
    starting_until_s: Unix seconds until which another reconciler leaves it alone while its processes are not there yet.
    has_joined: whether all its processes were seen in the group, or at work.
    """

    number: int
    created: str = ""
    checkpoint: int = -1
    after: str = ""
    starting_until_s: float = 0.0
    has_joined: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submission:
    """What `fab submit` and `fab sweep` have written of a run that has no directory yet.

    number: what people call it by. what: its job or script. request, submitted: the fields of `Request` and
    `Submitted` that JSON can hold. bundles: hashes of its code. where: the options of its target besides stack and
    slice. by, added: who submitted it, and when.
    """

    number: int
    what: str
    request: Json
    submitted: Json
    bundles: tuple[str, ...]
    where: Mapping[str, str]
    by: str
    added: str

    @property
    def sweep(self) -> str | None:
        """The name of the sweep that it is a member of."""
        return (self.request.get("sweep") or {}).get("name")


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """How a run ended for the reconciler. at_s: Unix seconds."""

    outcome: Outcome
    reason: str
    at_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run that is wanted.

    slices: those that it may run on; slice: the one that it has, None: it waits for one. project: None on this
    machine. runs_url: the folder of its directory. priority, order: its place among those that wait; the highest
    priority and then the lowest order goes first. stop_grace_s: for a checkpoint, once it is to be stopped.
    failures: attempts in a row that saved nothing new, and starts that failed. failed_starts: starts in a row that
    failed. not_before_s: Unix seconds of the next try. seen: what a look saw last, "running" or "". history:
    {time, act, reason}. notices: events that people are still to be told of. extra: keys of a newer version, kept.
    """

    run_id: str
    stack: str
    runs_url: str
    slices: tuple[str, ...]
    slice: str | None = None
    project: str | None = None
    name: str | None = None
    desired: Desired = "running"
    limits: Limits = Limits()
    submission: Submission | None = None
    priority: int = 0
    order: float = 0.0
    added_s: float = 0.0
    stop_grace_s: float | None = None
    attempt: Attempt | None = None
    failures: int = 0
    failed_starts: int = 0
    not_before_s: float = 0.0
    seen: str = ""
    end: End | None = None
    reason: str = ""
    history: tuple[Json, ...] = ()
    notices: tuple[Json, ...] = ()
    extra: Json = dataclasses.field(default_factory=dict)

    @property
    def is_kept(self) -> bool:
        """Whether a reconciler starts it again."""
        return self.end is None and self.desired == "running"

    @property
    def is_unwanted(self) -> bool:
        """Whether people have asked for its end."""
        return self.desired in ("stopped", "removed")

    @property
    def label(self) -> str:
        if self.submission is None:
            return self.run_id
        return f"entry {self.submission.number} ({self.run_id if self.attempt else self.submission.what})"

    def to_be(self, desired: Desired) -> Run:
        """Return the run as it is wanted from now on; one that has ended, or is to be removed, stays so."""
        if self.end is not None or self.desired == "removed":
            return self
        return dataclasses.replace(self, desired=desired)

    def noted(self, act: str, reason: str, now_s: float, **changes: Any) -> Run:
        """Return the run with one more line of history, unless that was the last one, and with what has changed."""
        return _noted(self, act, reason, now_s, changes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
    """A slice that Pulumi has declared, and what a reconciler has asked for.

    requested: it was asked for by a reconciler, and no run has begun on it since; it is given back when no run needs
    it. prepared: `created` of the hosts that were prepared last. prepares: tries in a row that failed. failures:
    requests in a row that failed. refused: why asking again is of no use, or its hosts cannot be used. not_before_s:
    Unix seconds of the next try. busy_until_s: somebody else was seen at work there.
    """

    name: str
    requested: bool = False
    prepared: str | None = None
    prepares: int = 0
    failures: int = 0
    refused: str = ""
    not_before_s: float = 0.0
    busy_until_s: float = 0.0
    reason: str = ""
    history: tuple[Json, ...] = ()
    extra: Json = dataclasses.field(default_factory=dict)

    def noted(self, act: str, reason: str, now_s: float, **changes: Any) -> Slice:
        return _noted(self, act, reason, now_s, changes)


def _noted[T: (Run, Slice)](
    document: T, act: str, reason: str, now_s: float, changes: Mapping[str, Any]
) -> T:
    history: tuple[Json, ...] = document.history
    last = history[-1] if history else {}
    if (last.get("act"), last.get("reason")) != (act, reason):
        line = {"time": moment(now_s), "act": act, "reason": reason}
        history = (*history, line)[-MOST_HISTORY:]
    return dataclasses.replace(document, reason=reason, history=history, **changes)


# --- as JSON --------------------------------------------------------------------------------------------------------

PARTS: Mapping[str, type[Limits | Attempt | Submission | End]] = {
    "limits": Limits, "attempt": Attempt, "submission": Submission, "end": End,
}  # fmt: skip
LISTS = ("slices", "history", "notices", "bundles")


def to_json(document: Run | Slice) -> dict[str, Any]:
    """Return a document as JSON holds it."""
    value = dataclasses.asdict(document)
    return {**value.pop("extra"), **value}


def parse_run(value: Any) -> Run:
    """Return the run that a document holds; keys of a newer version are kept.

    Raises:
        ValueError: it is not one.
    """
    run: Run = _parsed(Run, value)
    if run.desired not in DESIRED or not (run.slice is None or run.slice in run.slices):
        raise ValueError(f"desired {run.desired!r}, slice {run.slice!r}")
    return run


def parse_slice(value: Any) -> Slice:
    """Return the slice that a document holds. Raises ValueError: it is not one."""
    parsed: Slice = _parsed(Slice, value)
    return parsed


@functools.cache
def _field_types(kind: Any) -> dict[str, str]:
    return {field.name: str(field.type) for field in dataclasses.fields(kind) if field.name != "extra"}


def _parsed(kind: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    names = _field_types(kind)
    fields: dict[str, Any] = {name: item for name, item in value.items() if name in names}
    for name, item in fields.items():
        if name in PARTS and isinstance(item, dict):
            fields[name] = _parsed(PARTS[name], item)
        elif name in LISTS:
            if not isinstance(item, list | tuple):
                raise ValueError(f"{name} is no list")
            fields[name] = tuple(item)
        elif not _fits(item, names[name]):
            raise ValueError(f"{name} is {item!r}")
    if kind in (Run, Slice):
        fields["extra"] = {name: item for name, item in value.items() if name not in names}
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _fits(item: Any, type_name: str) -> bool:
    if item is None:
        return "None" in type_name
    if isinstance(item, bool):
        return type_name == "bool"
    if isinstance(item, int | float):
        return "float" in type_name or ("int" in type_name and isinstance(item, int))
    if isinstance(item, str):
        return "str" in type_name or type_name in ("Desired", "Outcome")
    return isinstance(item, dict) and type_name.startswith(("Json", "Mapping"))
