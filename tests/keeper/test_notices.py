"""People are told what becomes of a run: also where its hosts and directory are gone, and until they take it."""

import dataclasses
import os
from typing import Any

import pytest

from console import notify
from console.notify import Event, Undelivered
from contracts.inventory import SPECIFICATION
from keeper import notices
from launch.control.control_documents import Limits
from tests.keeper import lab as labs
from tests.keeper.lab import RUN_ID, Lab

lab = labs.lab


class Channels:
    """What was delivered. away: a channel that takes nothing just now."""

    def __init__(self) -> None:
        self.got: list[tuple[str, str, str]] = []
        self.away = ""

    def deliver(self, channel: str, event: Event, *_: Any) -> None:
        if channel == self.away:
            raise Undelivered("it is away")
        self.got.append((channel, event.kind, event.text))

    def after_a_pass(self, lab: Lab, **changes: Any) -> list[tuple[str, str, str]]:
        lab.store.edit_run(RUN_ID, lambda now: now and dataclasses.replace(now, **changes))
        before = len(self.got)
        lab.later()
        return sorted(self.got[before:])


@pytest.fixture
def channels(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Channels:
    """Two channels, and a kept run whose slice is gone and does not come back."""
    made = Channels()
    for variable in notify.VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    # The variables that a pass takes from the stack are this test's alone.
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(notify, "_deliver", made.deliver)
    lab.up()
    environment = {
        notify.VARIABLES["slack"]: "secret:projects/grant/secrets/a",
        notify.VARIABLES["webhook"]: "secret:projects/grant/secrets/b",
        notify.VARIABLES["e-mail"]: "smtp://elsewhere",
        "GOOGLE_TPU_V2_CUSTOM_ENDPOINT": "http://elsewhere",
    }
    lab.documents.change(SPECIFICATION, lambda now: {**now, "environment": environment})
    lab.train()
    lab.preempt()
    lab.set_capacity(0)
    return made


LOST = "Its slice is lost. The keeper asks for it again."
GIVEN_UP = "It is given up: it has no attempts left."


def test_a_loss_is_told_when_it_is_seen_and_once_and_that_it_goes_on_too(
    lab: Lab, channels: Channels
) -> None:
    assert channels.after_a_pass(lab) == [("slack", "preempted", LOST), ("webhook", "preempted", LOST)]
    assert channels.after_a_pass(lab, not_before_s=0.0) == []
    lab.set_capacity(64)
    lab.cloud.control.advance(600.0)
    assert [kind for _, kind, _ in channels.after_a_pass(lab)] == ["recovered", "recovered"]
    assert lab.is_running and lab.run.notices == ()


def test_the_stack_s_document_sets_no_variable_but_the_secrets_of_channels(
    lab: Lab, channels: Channels
) -> None:
    """An endpoint would send the keeper's token to whoever may write in the bucket."""
    before = os.environ["GOOGLE_TPU_V2_CUSTOM_ENDPOINT"]
    lab.one_pass()
    assert os.environ[notify.VARIABLES["slack"]] == "secret:projects/grant/secrets/a"
    assert os.environ["GOOGLE_TPU_V2_CUSTOM_ENDPOINT"] == before
    assert notify.VARIABLES["e-mail"] not in os.environ


def test_a_run_that_is_given_up_without_its_hosts_is_told_of_until_it_is_taken(
    lab: Lab, channels: Channels
) -> None:
    channels.away = "webhook"
    assert channels.after_a_pass(lab, limits=Limits(attempts=0), seen="") == [("slack", "failed", GIVEN_UP)]
    assert lab.run.end is not None and f"{RUN_ID}: not notified by webhook: it is away" in lab.lines
    assert channels.after_a_pass(lab) == []
    channels.away = ""
    assert channels.after_a_pass(lab) == [("webhook", "failed", GIVEN_UP)]
    assert channels.after_a_pass(lab) == [] and lab.run.notices == ()


def test_what_is_not_taken_for_hours_is_dropped_and_of_a_stop_nobody_is_told(
    lab: Lab, channels: Channels
) -> None:
    channels.away = "slack"
    channels.after_a_pass(lab, limits=Limits(attempts=0), seen="")
    lab.cloud.control.advance(notices.LIFE_S)
    assert channels.after_a_pass(lab) == [] and lab.run.notices == ()
    channels.away = ""
    assert channels.after_a_pass(lab, end=None, desired="stopped") == []
    assert lab.run.end is not None and lab.run.end.outcome == "stopped"
