"""The store: a stack's documents in `<bucket>/control`, which the keeper, `fab` and `pulumi up` read and change.

    stack.json          what is to be known of the stack, written by `pulumi up`: see `Stack`
    wanted.json         the runs to keep, by run id: see `Wanted`; all in one, so that a look costs one read
    inventory.json      slices that the keeper has made again, by name, as contracts.inventory has them
    leases/<slice>.json who may change a slice now: see `infra.lease`
    queue.json          runs that wait for a slice: see `keeper.queue`
    capacity.json       stock-outs that were seen: see `infra.stock_outs`
    used.json           when a TPU of a slice was last seen open: see `keeper.reclaim`
    looked.json         when a pass last began, as it notes now and then: see `note_look`

On this machine they are in `.control` of the runs folder; a stack without a bucket has none.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

from backends.targets import inventory_of, resolve
from console import notify
from contracts.durations import MINUTE_S, spoken
from contracts.errors import RequestError
from contracts.inventory import RECORDED, SPECIFICATION, Inventory, InventoryError, from_json
from infra.documents import Documents, DocumentsError
from launch import targets
from launch.targets import Target
from launch.targets import Wanted as AskedFor

WANTED, STACK, INVENTORY, QUEUE, CAPACITY = (
    "wanted.json", SPECIFICATION, RECORDED, "queue.json", "capacity.json",
)  # fmt: skip

LOOKED = "looked.json"
NOTED_EVERY_S, NOTED_WITHIN_S = 15 * MINUTE_S, 2 * MINUTE_S
NEGLECTED_S = 2 * NOTED_EVERY_S

State = Literal["watched", "waiting", "recovering", "ended"]
MOST_ACTS = 100
"""Lines of its history that an entry holds; the oldest go first."""
MOST_ENDED = 30
"""Entries of ended runs, which `fab keeper status` shows until newer ones take their place."""
ATTEMPTS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """A run to keep.

    stack, slice, project, origin: where it runs; project is None on this machine, origin as the inventory has it.
    runs_url: the folder of its directory. attempts_left: how often it may still be resumed. deadline_s: Unix seconds
    after which it is not any more; None: never. max_usd: what all its attempts together may cost.
    last_restored_step: of the checkpoint that it was last resumed from, -1 for none; None: not resumed yet.
    not_before_s: the next try. failures: tries since the last new checkpoint. prepares: tries to prepare its hosts
    since that last succeeded. slice_lost: its slice was lost since it was last started, so that its end is no fault of
    its own. unkept: whether `fab unkeep` has taken it back; the next look withdraws what was asked for.
    name: as `fab train --name` gave it. reason: of its state, in words. stop: whether `fab stop` was asked to end the
    run. for_queue: no run but its slice is kept, because entries of the queue need it; the queue itself starts what
    runs there.
    acts: what was done, the newest last: {time, act, reason}. news: what people are still to be told, as
    `keeper.news` has it.
    """

    run_id: str
    stack: str
    slice: str
    runs_url: str
    attempts_left: int = ATTEMPTS
    deadline_s: float | None = None
    max_usd: float | None = None
    added_s: float = 0.0
    last_restored_step: int | None = None
    not_before_s: float = 0.0
    failures: int = 0
    prepares: int = 0
    slice_lost: bool = False
    project: str | None = None
    origin: str = ""
    name: str | None = None
    state: State = "watched"
    reason: str = ""
    stop: bool = False
    unkept: bool = False
    for_queue: bool = False
    acts: tuple[Mapping[str, Any], ...] = ()
    news: tuple[Mapping[str, Any], ...] = ()

    @property
    def is_kept(self) -> bool:
        return self.state != "ended" and not self.unkept

    @classmethod
    def of(cls, run_id: str, value: Mapping[str, Any]) -> Wanted:
        """Return the entry that a document holds; keys of a newer version are left out.

        Raises:
            DocumentsError: a key is missing.
        """
        known = {field.name: value[field.name] for field in dataclasses.fields(cls) if field.name in value}
        lists = {name: tuple(value.get(name, ())) for name in ("acts", "news")}
        try:
            return cls(**{**known, **lists, "run_id": run_id})
        except TypeError as error:
            raise DocumentsError(f"{WANTED}: {run_id}: {error}; `fab unkeep {run_id}`") from None

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "run_id"}

    def noted(self, act: str, reason: str, now_s: float, **changes: Any) -> Wanted:
        """Return the entry with one more line of history, and with what has changed."""
        moment = datetime.datetime.fromtimestamp(now_s, datetime.UTC)
        line = {"time": f"{moment:%Y-%m-%dT%H:%M:%SZ}", "act": act, "reason": reason}
        return dataclasses.replace(self, reason=reason, acts=(*self.acts, line)[-MOST_ACTS:], **changes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """What the keeper has to know of a stack that Pulumi made.

    owner: the id that tells its slices from others'. slices: of each queued slice, by name, the properties that ask for
    it. inventory: of the stack, its slices without hosts. environment: variables of the keeper. platform,
    python, stand_in_devices: of a rehearsal's hosts.
    """

    project: str
    owner: str
    slices: Mapping[str, Mapping[str, Any]]
    inventory: Inventory
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    platform: str | None = None
    python: str | None = None
    stand_in_devices: tuple[str, ...] | None = None

    def take_environment(self) -> None:
        """Set the variables of the notification channels in this process, but for those that it has.

        Whoever may write in the bucket writes this document, so other variables are ignored: that of an API's endpoint
        would send the keeper's token elsewhere. A channel's value names a secret that the keeper's account may read.
        """
        for variable in notify.VARIABLES.values():
            value = self.environment.get(variable, "")
            if value.startswith(notify.SECRET):
                os.environ.setdefault(variable, value)


def store_of(target: Target) -> Documents:
    """Return the documents of a target's stack, or of this machine, beside its runs.

    Raises:
        RequestError: the stack has no place for them.
    """
    if target.capabilities.shares_files:
        return Documents(f"{target.runs_url.rstrip('/')}/.control")
    return _documents_of(target.inventory, target.name)


def documents_for(asked: AskedFor) -> Documents:
    """Return the documents of the stack that is asked for, or of this machine; no host is needed.

    Raises:
        RequestError: there is no such stack, or as `store_of`.
    """
    if asked.stack == targets.LOCAL:
        return store_of(resolve(asked))
    return _documents_of(inventory_of(asked), asked.stack)


def _documents_of(inventory: Inventory, stack: str) -> Documents:
    if inventory.control is None:
        raise RequestError(
            f"--stack {stack}: what is kept or queued, and stock-outs, are noted in its bucket, and it has none; set "
            "tpu-stack:storage.bucket, then `pulumi up`"
        )
    return Documents(inventory.control)


def read_stack(documents: Documents) -> Stack:
    """Return what `pulumi up` has written of the stack.

    Raises:
        RequestError: there is nothing, or nothing that this version can read.
    """
    found = find_stack(documents)
    if found is None:
        raise RequestError(f"{documents.url}/{STACK}: there is none; {WRITES_IT}")
    return found


WRITES_IT = "`pulumi up` writes it"


def readable_stack(documents: Documents) -> Stack | None:
    """Return as `find_stack`; None also where this version cannot read it, which is said by who cannot do without.

    Raises:
        DocumentsError: nobody can tell.
    """
    try:
        return find_stack(documents)
    except DocumentsError:
        raise
    except RequestError:
        return None


def find_stack(documents: Documents) -> Stack | None:
    """Return what `pulumi up` has written of the stack; None where it has not, as for this machine.

    Raises:
        RequestError: this version cannot read it.
    """
    found = documents.read(STACK).value
    if not isinstance(found, dict):
        return None
    try:
        devices = found.get("stand_in_devices")
        return Stack(
            project=str(found["project"]),
            owner=str(found["owner"]),
            slices=dict(found["slices"]),
            inventory=from_json(found["inventory"]),
            environment=dict(found.get("environment") or {}),
            platform=found.get("platform"),
            python=found.get("python"),
            stand_in_devices=None if devices is None else tuple(devices),
        )
    except (KeyError, TypeError, ValueError, InventoryError) as error:
        raise RequestError(f"{documents.url}/{STACK} cannot be read ({error}); {WRITES_IT}") from None


def is_noted(documents: Documents) -> bool:
    """Whether it is time for what not every pass does: within the first NOTED_WITHIN_S of each NOTED_EVERY_S."""
    return documents.now_s() % NOTED_EVERY_S <= NOTED_WITHIN_S


def note_look(documents: Documents) -> None:
    """Note that a keeper looks, once in NOTED_EVERY_S, as a pass in which all is well writes nothing."""
    now_s = documents.now_s()
    if is_noted(documents):
        documents.change(LOOKED, lambda at_s: at_s if now_s - (at_s or 0.0) <= NOTED_WITHIN_S else now_s)


def neglected(documents: Documents) -> str:
    """Return a line if no keeper looks at what is kept; "" if one does, or nothing has been kept for long."""
    kept = [each for each in read_wanted(documents).values() if each.is_kept]
    looked_s = float(documents.read(LOOKED).value or 0.0) if kept else 0.0
    silent_s = documents.now_s() - max(
        looked_s, min((each.added_s for each in kept), default=documents.now_s())
    )
    if silent_s < NEGLECTED_S:
        return ""
    return (
        f"no keeper has looked for {spoken(silent_s, units=1)}, and what is kept waits: `fab keeper install` puts one "
        "on the gateway, `fab keeper run` looks now, `fab unkeep RUN` leaves the run's slice to others"
    )


def read_wanted(documents: Documents) -> dict[str, Wanted]:
    """Return all entries by run id, also those of runs that have ended."""
    return _entries(documents.read(WANTED).value)


def _entries(value: Any) -> dict[str, Wanted]:
    return {run_id: Wanted.of(run_id, each) for run_id, each in (value or {}).items()}


def change_wanted(
    documents: Documents, run_id: str, function: Callable[[Wanted | None], Wanted | None]
) -> Wanted | None:
    """Change one entry, and return it. function: gets None where there is none; returns None to take it out."""
    changed: list[Wanted | None] = []

    def change(value: Any) -> dict[str, Any]:
        entries = _entries(value)
        fresh = function(entries.get(run_id))
        changed[:] = [fresh]
        entries.pop(run_id, None) if fresh is None else entries.update({run_id: fresh})
        ended = sorted(
            (each for each in entries.values() if each.state == "ended"),
            key=lambda each: str(each.acts[-1]["time"]) if each.acts else "",
        )
        for old in ended[: -MOST_ENDED or None]:
            del entries[old.run_id]
        return {name: each.as_json() for name, each in entries.items()}

    documents.change(WANTED, change)
    return changed[0]
