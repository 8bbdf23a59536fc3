"""A stack's queue: runs that wait for a slice, in one document that several programs change.

Of two that want the same entry or the same slice exactly one succeeds, because a change names the version of the
document that it has read (`infra.documents`). The code of an entry is kept beside, named by its hash.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from contracts import run_directory
from contracts.errors import RequestError
from infra.documents import ABSENT, ChangedError, Documents
from keeper.store import QUEUE
from launch.bundles import Bundle
from launch.jobs import Submitted
from launch.launch import Request

State = Literal["waiting", "stopping", "cancelled"] | run_directory.State
"""Once it is started, that of its run; `starting` only while a worker starts it, `stopping` until its run has ended."""
AT_WORK: tuple[State, ...] = ("starting", "running", "stopping")
PENDING: tuple[State, ...] = ("waiting", *AT_WORK)
MOST_ENDED = 200
"""Entries that have ended and are still listed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A run that was submitted.

    number: what people call it by. what: its job or script. request, submitted: the fields of Request and Submitted
    that JSON can hold. bundles: hashes of its code. where: what was said of the target besides stack and slice. slices:
    those it may run on. restarts: how often it may still be started again. starts: tries in which its hosts were not
    ready. losses: how often in a row its hosts were lost before there was a new checkpoint. saved_step: of the newest
    checkpoint when it was last started, -1 for none. judged: the attempt of its run that has
    ended and after which it waits again, -1 for none. reason: of its state, in words.
    """

    number: int
    what: str
    request: Mapping[str, Any]
    submitted: Mapping[str, Any]
    bundles: tuple[str, ...]
    where: Mapping[str, str]
    slices: tuple[str, ...]
    by: str
    added: str
    priority: int = 0
    restarts: int = 0
    state: State = "waiting"
    slice: str | None = None
    run_id: str | None = None
    starts: int = 0
    losses: int = 0
    saved_step: int = -1
    judged: int = -1
    reason: str = ""

    @property
    def is_pending(self) -> bool:
        return self.state in PENDING

    @property
    def sweep(self) -> str | None:
        """The name of the sweep that it is a member of."""
        return (self.request.get("sweep") or {}).get("name")

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Entry:
        """Return the entry that the document holds; keys of a newer version are left out."""
        known = {field.name: value[field.name] for field in dataclasses.fields(cls) if field.name in value}
        return cls(**{**known, "bundles": tuple(value["bundles"]), "slices": tuple(value["slices"])})


def describe(request: Request, submitted: Submitted) -> dict[str, Any]:
    """Return the fields of an Entry that say what is run."""
    left_out = ("command", "resume", "submitted", "bundles")
    asked, kept = (
        {name: value for name, value in vars(each).items() if name not in left_out}
        for each in (request, submitted)
    )
    return {
        "request": asked,
        "submitted": kept,
        "bundles": tuple(bundle.sha256 for bundle in submitted.bundles),
    }


class Queue:
    """The queue in a stack's documents; its methods raise DocumentsError as they do."""

    def __init__(self, documents: Documents) -> None:
        self.documents = documents

    def entries(self) -> list[Entry]:
        """Return all entries in the order in which they would be taken: by priority, then as they were submitted.

        One whose hosts were not ready lets the others go first.
        """
        found = _entries(self.documents.read(QUEUE).value)
        return sorted(
            found, key=lambda each: (0, each.starts, -each.priority) if each.is_pending else (1, 0, 0)
        )

    def add(self, several: Sequence[Entry], bundles: Sequence[Bundle]) -> list[Entry]:
        """Add entries, whose numbers are given to them here, all or none.

        Raises:
            RequestError: one has the name of another that waits.
        """
        added: list[Entry] = []

        def append(value: Any) -> dict[str, Any]:
            entries, number = _entries(value), (value or {}).get("next", 1)
            names = {each.request["name"]: each for each in entries if each.is_pending}
            for each in several:
                if (name := each.request["name"]) is not None and name in names:
                    raise RequestError(
                        f"--name {name}: entry {names[name].number} of the queue has it; choose another"
                    )
            added[:] = [
                dataclasses.replace(each, number=number + index) for index, each in enumerate(several)
            ]
            return _document([*entries, *added], number + len(added))

        self._keep(bundles)
        self.documents.change(QUEUE, append)
        self._keep(
            bundles
        )  # whoever removed them before the entries were there looks whether they are needed now
        return added

    def change(self, number: int, function: Callable[[Entry], Entry]) -> Entry:
        """Change an entry, and return it. function: returns it as it is to be.

        Raises:
            RequestError: there is no such entry.
        """

        def one(entries: list[Entry]) -> list[Entry]:
            require(entries, number)
            return [function(each) if each.number == number else each for each in entries]

        return require(self.change_all(one), number)

    def change_all(self, function: Callable[[list[Entry]], list[Entry]]) -> list[Entry]:
        """Change the entries, in the order in which they were submitted or moved, and return them."""

        needed: set[str] = set()

        def all_of_them(value: Any) -> dict[str, Any]:
            entries = _entries(value)
            needed.clear()
            needed.update(_code(entries))
            return _document(function(entries), (value or {}).get("next", 1))

        now = _entries(self.documents.change(QUEUE, all_of_them))
        if needed - _code(now):
            self._remove_code()
        return now

    def claim(self, number: int, slice_name: str, run_id: str) -> Entry | None:
        """Take an entry to a slice, and return it; None where it does not wait any more, or the slice is taken.

        run_id: of its run, unless it has one already.
        """

        def take(entries: list[Entry]) -> list[Entry]:
            claimed[:] = []
            if any(each.state in AT_WORK and each.slice == slice_name for each in entries):
                return entries
            return [_taken(each) if each.number == number else each for each in entries]

        def _taken(each: Entry) -> Entry:
            if each.state != "waiting":
                return each
            fresh = dataclasses.replace(
                each, state="starting", slice=slice_name, run_id=each.run_id or run_id, reason=""
            )
            claimed[:] = [fresh]
            return fresh

        claimed: list[Entry] = []
        self.change_all(take)
        return claimed[0] if claimed else None

    def request(self, entry: Entry) -> Request:
        """Return the request of an entry, with the code as it was submitted.

        Raises:
            RequestError: its code is gone, or a newer checkout has written it.
        """
        asked, kept = dict(entry.request), dict(entry.submitted)
        try:
            for name in ("arguments", "track"):
                asked[name] = tuple(asked[name])
            kept["arguments"] = tuple(kept["arguments"])
            submitted = Submitted(**kept, bundles=tuple(map(self._bundle, entry.bundles)))
            return Request(**{**asked, "resume": None, "run_id": entry.run_id, "submitted": submitted})
        except (TypeError, KeyError) as error:
            raise RequestError(
                f"entry {entry.number} was submitted by another version of tpu-stack ({error}); submit it again, or "
                "run `fab queue work` in that checkout"
            ) from None

    def _bundle(self, sha256: str) -> Bundle:
        found = self.documents.read(_place(sha256)).value
        bundle = Bundle.of_text(found["archive"], sha256) if found else None
        if bundle is None:
            raise RequestError(
                f"{self.documents.url}/{_place(sha256)}: the code is not there; submit it again"
            )
        return bundle

    def _remove_code(self) -> None:
        """Remove the code that no pending entry needs, also that of a submission that was broken off."""
        for name in self.documents.names("bundles/"):
            if name in self._code_in_need():
                continue
            found = self.documents.read(name)
            with contextlib.suppress(ChangedError):
                self.documents.delete(name, version=found.version)
                if found.value is not None and name in self._code_in_need():  # of an entry added just now
                    self.documents.write(name, found.value, version=ABSENT)

    def _code_in_need(self) -> set[str]:
        return {_place(sha256) for sha256 in _code(_entries(self.documents.read(QUEUE).value))}

    def _keep(self, bundles: Sequence[Bundle]) -> None:
        there = {*self.documents.names("bundles/")}
        for each in bundles:
            if _place(each.sha256) not in there:
                with contextlib.suppress(ChangedError):  # somebody else has written the same code
                    self.documents.write(_place(each.sha256), {"archive": each.text}, version=ABSENT)


def _code(entries: Sequence[Entry]) -> set[str]:
    """The hashes of the code that entries need which wait or run."""
    return {sha256 for entry in entries if entry.is_pending for sha256 in entry.bundles}


def require(entries: Sequence[Entry], number: int) -> Entry:
    """Return the entry with a number.

    Raises:
        RequestError: there is none.
    """
    found = next((each for each in entries if each.number == number), None)
    if found is None:
        raise RequestError(f"{number}: the queue has no such entry; `fab queue --all` lists them")
    return found


def _place(sha256: str) -> str:
    return f"bundles/{sha256}.json"


def _entries(value: Any) -> list[Entry]:
    return [Entry.of(each) for each in (value or {}).get("entries", ())]


def _document(entries: Sequence[Entry], following: int) -> dict[str, Any]:
    ended = [each.number for each in entries if not each.is_pending]
    old = {*ended[: -MOST_ENDED or None]} if len(ended) > MOST_ENDED else set()
    return {
        "next": following,
        "entries": [dataclasses.asdict(each) for each in entries if each.number not in old],
    }
