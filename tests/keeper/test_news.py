"""People are told what becomes of a kept run: also where its hosts and directory are gone, and until they take it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from console import notify
from console.notify import Event, Undelivered
from contracts.inventory import to_json
from infra.cloud_tpu.client import Listing
from infra.cloud_tpu.retry import Backoff, CloudTpuError
from infra.documents import Documents, DocumentsError
from infra.lease import Lease, held
from keeper import passes, slices, store
from keeper.hosts import Hosts
from keeper.store import Wanted
from tests.keeper.test_machine import INVENTORY, RUN_ID

NOW_S = 1_800_000_000.0


@dataclasses.dataclass
class Lab:
    """A kept run whose slice is gone and does not come back. away: a channel that takes nothing just now."""

    documents: Documents
    said: list[str] = dataclasses.field(default_factory=list)
    got: list[tuple[str, Event]] = dataclasses.field(default_factory=list)
    away: str = ""
    clock_s: float = NOW_S

    def look(self, **changes: Any) -> list[tuple[str, str, str]]:
        """What a pass has sent."""
        store.change_wanted(self.documents, RUN_ID, lambda now: now and dataclasses.replace(now, **changes))
        before = len(self.got)
        means = passes.Means(
            documents=self.documents,
            client=lambda: None,  # type: ignore[arg-type, return-value]
            backoff=Backoff(sleep=lambda _: None, now=lambda: self.clock_s),
            hosts=Hosts(self.said.append),
            say=self.said.append,
            hold=lambda name, **how: held(Lease(self.documents, name, "keeper"), **how),
        )
        passes.run_pass(means)
        return sorted((channel, event.kind, event.text) for channel, event in self.got[before:])

    @property
    def entry(self) -> Wanted:
        return store.read_wanted(self.documents)[RUN_ID]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    made = Lab(Documents(str(tmp_path)))
    monkeypatch.setattr(Documents, "now_s", lambda _: made.clock_s)
    for variable in notify.VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(slices, "listed", lambda *_: {"grant": Listing(found=[])})

    def full(*_: Any, **__: Any) -> None:
        raise CloudTpuError("no capacity", status="RESOURCE_EXHAUSTED")

    def deliver(channel: str, event: Event, *_: Any) -> None:
        if channel == made.away:
            raise Undelivered("it is away")
        made.got.append((channel, event))

    monkeypatch.setattr(slices, "have", full)
    monkeypatch.setattr(notify, "_deliver", deliver)
    stack = {
        "project": "grant",
        "owner": "o",
        "slices": {"main": {}},
        "inventory": to_json(INVENTORY),
        "environment": {
            notify.VARIABLES["slack"]: "secret:projects/grant/secrets/a",
            notify.VARIABLES["webhook"]: "secret:projects/grant/secrets/b",
            notify.VARIABLES["e-mail"]: "smtp://elsewhere",
            "GOOGLE_TPU_V2_CUSTOM_ENDPOINT": "http://elsewhere",
        },
    }
    made.documents.change(store.STACK, lambda _: stack)
    entry = Wanted(
        run_id=RUN_ID,
        stack="dev",
        slice="main",
        runs_url="/nowhere/runs",
        project="grant",
        origin="queued-resource main",
    )
    store.change_wanted(made.documents, RUN_ID, lambda _: entry)
    # The variables that a pass takes from the stack are this test's alone.
    monkeypatch.setattr(os, "environ", {**os.environ})
    return made


LOST = "Its slice is lost. The keeper asks for it again."


def test_a_loss_is_told_when_it_is_seen_and_once(lab: Lab) -> None:
    assert lab.look() == [("slack", "preempted", LOST), ("webhook", "preempted", LOST)]
    assert lab.look(not_before_s=0.0) == []
    assert lab.entry.failures == 2


def test_the_stack_s_document_sets_no_variable_but_the_secrets_of_channels(lab: Lab) -> None:
    """An endpoint would send the keeper's token to whoever may write in the bucket."""
    lab.look()
    assert os.environ[notify.VARIABLES["slack"]] == "secret:projects/grant/secrets/a"
    assert not {notify.VARIABLES["e-mail"], "GOOGLE_TPU_V2_CUSTOM_ENDPOINT"} & {*os.environ}


def test_a_run_that_is_given_up_without_its_hosts_is_told_of_until_it_is_taken(lab: Lab) -> None:
    lab.away = "webhook"
    text = "The keeper has given it up: it has no attempts left."
    assert lab.look(attempts_left=0) == [("slack", "failed", text)]
    assert lab.entry.state == "ended" and f"{RUN_ID}: not notified by webhook: it is away" in lab.said
    assert lab.look() == []
    lab.away = ""
    assert lab.look() == [("webhook", "failed", text)]
    assert lab.look() == [] and lab.entry.news == ()


def test_what_is_not_taken_for_hours_is_dropped_and_a_stop_is_no_news(lab: Lab) -> None:
    lab.away = "slack"
    lab.look(attempts_left=0)
    lab.clock_s += passes.NEWS_LIFE_S + 1
    lab.look()
    assert lab.entry.news == ()
    store.change_wanted(lab.documents, RUN_ID, lambda now: now and dataclasses.replace(now, state="watched"))
    lab.away = ""
    assert lab.look(stop=True) == [] and lab.entry.state == "ended"


def test_news_are_not_dropped_while_nobody_can_tell_who_gets_them(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as away:
        refused = raising(DocumentsError("the bucket does not answer"))
        away.setattr("keeper.store.find_stack", refused)
        assert lab.look() == [] and lab.entry.state == "watched"
    assert [kind for _, kind, _ in lab.look()] == ["preempted", "preempted"]


def raising(error: Exception) -> Callable[..., None]:
    def call(*_: Any) -> None:
        raise error

    return call
