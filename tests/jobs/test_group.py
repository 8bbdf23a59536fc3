"""What the processes of a group do together, with a board of notes that goes when the process that keeps it ends."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from contracts.errors import RequestError
from jobs.runtime import group


class Notes:
    """Kept by rank 0: there is nothing to be read any more once `closed` is set."""

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}
        self.closed = threading.Event()

    def put(self, name: str, text: str) -> None:
        if self.closed.is_set():
            raise RuntimeError("UNAVAILABLE: connection reset by peer")
        self.notes[name] = text

    def get(self, name: str) -> str | None:
        if self.closed.is_set():
            raise RuntimeError("UNAVAILABLE: connection reset by peer")
        return self.notes.get(name)


class SlowNotes(Notes):
    """As a slower process sees the same notes."""

    def __init__(self, notes: Notes) -> None:
        self.notes, self.closed = notes.notes, notes.closed

    def get(self, name: str) -> str | None:
        time.sleep(0.1)
        return super().get(name)


def agreement(notes: Notes, rank: int, fingerprint: str) -> str:
    try:
        group.agree(notes, rank, 3, "the data", fingerprint, print)
    except (RequestError, RuntimeError) as error:
        return str(error)
    finally:
        if rank == 0:
            notes.closed.set()
    return "agreed"


def test_processes_that_do_not_agree_all_know_why_before_the_one_that_keeps_the_notes_ends() -> None:
    notes = Notes()
    slow = SlowNotes(notes)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(agreement, (notes, slow, slow), range(3), ("ab", "ab", "cd")))
    assert len(set(answers)) == 1
    assert answers[0].startswith("the data is not the same on every host: ranks [2] differ from rank 0")


def test_a_process_that_ends_without_a_word_does_not_keep_rank_0_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group, "REFUSAL_LIMIT_S", 0.5)
    notes = Notes()
    notes.notes = {"agree/the data/1": "ab", "agree/the data/2": "cd"}
    assert "ranks [2] differ" in agreement(notes, 0, "ab")
