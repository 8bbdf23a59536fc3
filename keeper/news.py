"""News of kept runs: written with what has happened, sent beside the pass, and sent again until it was taken.

A keeper that is killed between two of these steps loses no news, and may send some twice.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from contracts.durations import HOUR_S
from contracts.errors import RequestError
from infra.documents import Documents, DocumentsError
from keeper import rules, store
from keeper.store import Wanted
from launch import notify
from launch.hosts import HostError, in_thread
from launch.notify import Event, Kind
from launch.runs import Run

if TYPE_CHECKING:
    from keeper.hosts import Examined, Hosts

LIFE_S = 6 * HOUR_S
"""For so long an event is sent again, at each pass, to a channel that does not take it."""
LIMIT_S = 30.0
"""How long the end of a pass waits for what is being sent."""

type Item = Mapping[str, Any]
"""One event in `Wanted.news`. event: of launch.notify. since_s: when it happened. told: channels that have taken it."""


def of_end(wanted: Wanted, found: Examined | None, reason: str) -> tuple[Kind | None, str]:
    """Return which event it is that a run is no longer kept, and its text. found: None where its hosts are gone."""
    if wanted.stop:
        return None, ""
    if found is not None and found.facts.state in ("done", "stopped"):
        return notify.kind_of(found.run, found.facts.state), ""
    cost_usd = found.facts.cost_usd if found is not None else None
    max_usd = rules.limit_usd(wanted, found.facts) if found is not None else None
    is_spent = max_usd is not None and cost_usd is not None and cost_usd >= max_usd
    return "out of budget" if is_spent else "failed", f"The keeper has given it up: {reason}."


class Post:
    """What sends the news of one pass."""

    def __init__(self, documents: Documents, hosts: Hosts, say: Callable[[str], None]) -> None:
        self._documents, self._hosts, self._say = documents, hosts, say
        self._sending: dict[tuple[str, str], concurrent.futures.Future[None]] = {}

    @functools.cached_property
    def is_wanted(self) -> bool:
        """Whether a channel is set. Raises DocumentsError: nobody can tell, so that no news may be dropped."""
        try:
            stack = store.find_stack(self._documents)
        except DocumentsError:
            raise
        except RequestError:  # this version cannot read it, which the pass says
            stack = None
        if stack is not None:
            stack.take_environment()
        return bool(notify.channels(os.environ))

    def item(self, wanted: Wanted, kind: Kind | None, text: str, run: Run | None = None) -> Item | None:
        """Return what an entry holds of an event until it was sent; None where nobody is to be told.

        Raises:
            DocumentsError: as `is_wanted`.
        """
        if kind is None or not self.is_wanted:
            return None
        event = Event(kind=kind, text=text, run=wanted.run_id, name=wanted.name, stack=wanted.stack)
        with contextlib.suppress(HostError, RequestError, OSError):  # then less is known of the run
            if run is None and (found := self._hosts.without_hosts(wanted)) is not None:
                run = found.run
            if run is not None:
                event = notify.event_of(run, kind, text)
        return {"event": dataclasses.asdict(event), "since_s": self._documents.now_s(), "told": []}

    def send(self, several: Iterable[Wanted]) -> None:
        """Begin to send what these entries have, unless that has begun."""
        for wanted in several:
            for item in wanted.news:
                key = (wanted.run_id, str(item["event"]))
                if key not in self._sending:
                    self._sending[key] = in_thread(functools.partial(self._deliver, wanted, item))

    def settle(self) -> None:
        """Wait until all is sent, or not taken; what takes longer is sent again by the next pass."""
        for future in concurrent.futures.wait(self._sending.values(), LIMIT_S).done:
            if error := future.exception():
                self._say(f"news are sent again by the next pass: {error}")
        self._sending.clear()

    def _deliver(self, wanted: Wanted, item: Item) -> None:
        event, told, problems = Event(**item["event"]), {*item["told"]}, list[str]()
        if self.is_wanted:
            told, problems = notify.deliver(event, self._hosts.directory(wanted), told)
        for problem in problems:
            self._say(f"{wanted.run_id}: not notified by {problem}")
        is_over = not problems or self._documents.now_s() - float(item["since_s"]) > LIFE_S
        rest = () if is_over else ({**item, "told": sorted(told)},)

        def change(now: Wanted | None) -> Wanted | None:
            if now is None:
                return None
            others = (each for each in now.news if each["event"] != item["event"])
            return dataclasses.replace(now, news=(*others, *rest))

        if rest != (item,):
            store.change_wanted(self._documents, wanted.run_id, change)
