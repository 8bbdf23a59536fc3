"""One of several programs may change a slice, whatever their clocks say and whoever of them is killed or stopped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.documents import Documents, DocumentsError, MissingError, StoredDocument, lease
from infra.documents.lease import RENEW_S, STALE_S, Lease, LeaseHeldError, LeaseLostError


class Time:
    """A clock that only sleeping moves. others: what other programs do whenever somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.others: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.others()


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def make(tmp_path: Path, time: Time) -> Callable[..., Lease]:
    """Leases of one slice. ahead_s: of a machine whose clock is off."""
    documents = Documents(str(tmp_path))

    def make(who: str, ahead_s: float = 0.0) -> Lease:
        return Lease(documents, "main", who, now=lambda: time.now_s + ahead_s, sleep=time.sleep)

    return make


def test_a_free_lease_is_taken_at_once_and_one_that_is_renewed_by_nobody_else(
    make: Callable[..., Lease], time: Time
) -> None:
    one, other = make("one"), make("other", ahead_s=3600.0)
    one.take()
    began_s = time.now_s

    def renew() -> None:
        if (time.now_s - began_s) % RENEW_S < lease.LOOK_S:
            one.renew()

    time.others = renew
    with pytest.raises(LeaseHeldError, match="one is changing the slice main"):
        other.take()
    assert time.now_s - began_s < STALE_S, "a holder that lives is recognised long before it counts as dead"
    said: list[str] = []
    with pytest.raises(LeaseHeldError):
        other.take(patience_s=300.0, waiting=said.append)
    assert time.now_s - began_s >= 300.0
    assert len(said) == 1
    assert one.require()
    one.release()
    taken_s = time.now_s
    other.take()
    assert time.now_s == taken_s


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 3600.0])
def test_one_whose_holder_is_dead_changes_hands_after_a_minute_and_the_dead_one_notices(
    make: Callable[..., Lease], time: Time, ahead_s: float
) -> None:
    dead, heir = make("dead"), make("heir", ahead_s)
    dead.take()
    died_s = time.now_s
    heir.take()
    assert STALE_S <= time.now_s - died_s < STALE_S + 2 * lease.LOOK_S
    for act in (dead.require, dead.renew):
        with pytest.raises(LeaseLostError, match="taken over the lease of the slice main"):
            act()
    dead.release()
    assert heir.require(), "whoever has lost a lease does not give that of another back"


def test_an_answer_that_is_lost_does_not_lose_the_lease(
    make: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make("one")
    one.take()
    write = Documents.write

    def lose_the_answer(self: Documents, name: str, value: object, *, version: int) -> int:
        write(self, name, value, version=version)
        raise DocumentsError("the bucket does not answer")

    monkeypatch.setattr(Documents, "write", lose_the_answer)
    with pytest.raises(DocumentsError):
        one.renew()
    monkeypatch.setattr(Documents, "write", write)
    one.renew()
    one.renew()
    assert one.require()


def test_documents_that_are_away_hold_a_holder_up_and_do_not_end_it(
    make: Callable[..., Lease], time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make("one")
    one.take()
    write, away_until_s = Documents.write, time.now_s + 300.0

    def refuse(self: Documents, name: str, value: object, *, version: int) -> int:
        if time.now_s < away_until_s:
            raise DocumentsError("the bucket does not answer")
        return write(self, name, value, version=version)

    monkeypatch.setattr(Documents, "write", refuse)
    assert one.require(), "nothing is asked within seconds of a renewal"
    time.sleep(lease.SURE_S + 1)
    assert one.require()
    assert time.now_s >= away_until_s
    away_until_s = float("inf")
    time.sleep(lease.SURE_S + 1)
    with pytest.raises(LeaseLostError, match="cannot be renewed: the bucket does not answer"):
        one.require()


def test_who_may_wait_for_an_outage_does_and_gives_a_holder_its_minute_after_it(
    make: Callable[..., Lease], time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, heir = make("holder"), make("heir")
    holder.take()
    read, back_s = Documents.read, time.now_s + 300.0

    def refuse(self: Documents, name: str) -> StoredDocument:
        if time.now_s < back_s:
            raise DocumentsError("the bucket does not answer")
        return read(self, name)

    monkeypatch.setattr(Documents, "read", refuse)
    with pytest.raises(DocumentsError):
        heir.take()
    with pytest.raises(DocumentsError):
        heir.take(outage_s=100.0)
    heir.take(outage_s=900.0)
    assert time.now_s >= back_s + STALE_S
    back_s = float("inf")

    def missing(self: Documents, name: str) -> StoredDocument:
        raise MissingError("there is no such bucket")

    monkeypatch.setattr(Documents, "read", missing)
    began_s = time.now_s
    with pytest.raises(MissingError):
        make("late").take(outage_s=900.0)
    assert time.now_s == began_s


def test_all_slices_of_a_stack_are_marked_as_removed_once_their_holders_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LOOK_S", 0.01)
    documents, url = Documents(f"{tmp_path}/control"), f"{tmp_path}/control"
    held = Lease(documents, "one", "the keeper")
    held.take()
    free = Lease(documents, "two", "the keeper")
    free.take()
    free.release()
    said: list[str] = []

    def over(line: str) -> None:
        said.append(line)
        held.release()

    refusals = iter([DocumentsError("the bucket does not answer")] * 2)

    def away(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **how: Any) -> Any:
            if error := next(refusals, None):
                raise error
            return function(*given, **how)

        return call

    for name in ("names", "read"):
        monkeypatch.setattr(Documents, name, away(getattr(Documents, name)))
    lease.mark_all_removed(url, "`pulumi`", over)
    assert next(refusals, None) is None
    assert len(said) == 1 and said[0].startswith("the keeper is changing the slice one")
    assert [documents.read(each).value["removed"] for each in documents.names()] == [True, True]
    assert {documents.read(each).value["token"] for each in documents.names()} == {""}


def test_what_pulumi_destroy_has_said_stays_until_somebody_says_otherwise(make: Callable[..., Lease]) -> None:
    pulumi = make("pulumi")
    pulumi.take()
    pulumi.removed = True
    pulumi.renew()
    pulumi.release()
    keeper = make("keeper")
    keeper.take()
    assert keeper.removed
    keeper.release()
    again = make("pulumi")
    again.take()
    again.removed = False
    again.release()
    keeper.take()
    assert not keeper.removed
