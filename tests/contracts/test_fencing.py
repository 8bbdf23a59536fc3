"""Of two attempts only the newer one writes, wherever the run directory lies and whenever the older one wakes up."""

import contextlib
import json
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from contracts import fencing
from contracts.errors import Superseded
from contracts.host_interface import PROTOCOL_VERSION
from contracts.run_directory import RESULT, RunDirectory
from host.agent.protocol import respond
from jobs.runtime.storage.bucket_files import files_of
from launch.hosts import HostError
from launch.remote_files import HostFiles


class LocalAgent:
    """An agent whose host is this process."""

    host = "host-0"

    def __init__(self, root: Path) -> None:
        self._root = str(root)

    def ask(self, verb: str, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        body = json.dumps({"version": PROTOCOL_VERSION, "root": self._root, **request}).encode()
        response, status = respond(verb, body)
        if status:
            raise HostError(host=self.host, reason=response["error"]["message"])
        return response


@pytest.fixture(params=["disk", "bucket", "disk that stands in for a bucket", "hosts"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> RunDirectory:
    if request.param == "disk":
        return RunDirectory(f"{tmp_path}/run")
    if request.param == "hosts":
        return RunDirectory(f"{tmp_path}/run", HostFiles((LocalAgent(tmp_path),)))  # type: ignore[arg-type]
    url = f"memory://{uuid.uuid4().hex}/run" if request.param == "bucket" else f"file://{tmp_path}/run"
    return RunDirectory(url, files_of(url))


def test_attempts_are_taken_in_turn_and_each_by_one(directory: RunDirectory) -> None:
    assert directory.newest_attempt() is None
    first = fencing.take(directory, 0, launch=0)
    first.require_newest()
    with pytest.raises(Superseded, match="attempt 0 of this run has been begun by somebody else"):
        fencing.take(directory, 0, launch=0)
    second = fencing.take(directory, 1, launch=1)
    assert directory.newest_attempt() == 1
    second.write_text(RESULT, "second")
    for write in (
        first.require_newest,
        lambda: first.write_text(RESULT, "first"),
        lambda: first.write_json("new.json", {}),
        lambda: first.remove(RESULT),
    ):
        with pytest.raises(Superseded, match="attempt 1 of this run has begun since; attempt 0 ends"):
            write()
    assert (directory.read_text(RESULT), directory.read_text("new.json")) == ("second", None)
    directory.write_text("notices.json", "of no attempt")


def test_an_attempt_that_is_frozen_between_its_check_and_its_write_changes_nothing(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, check = fencing.take(directory, 0, launch=0), RunDirectory.require_newest
    older.write_text(RESULT, "older")

    def frozen(self: RunDirectory) -> None:
        check(self)
        monkeypatch.undo()
        fencing.take(directory, 1, launch=1).write_text(RESULT, "newer")

    monkeypatch.setattr(RunDirectory, "require_newest", frozen)
    with pytest.raises(Superseded):
        older.write_text(RESULT, "older, and late")
    assert directory.read_text(RESULT) == "newer"


def test_a_token_whose_answer_was_lost_is_its_own(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = type(directory.files).create

    def without_answer(self: Any, path: str, data: bytes) -> bool:
        create(self, path, data)
        return create(self, path, data)  # as a client does that tries again

    monkeypatch.setattr(type(directory.files), "create", without_answer)
    fencing.take(directory, 0, launch=0).require_newest()


def test_of_many_who_take_an_attempt_at_the_same_time_one_gets_it(tmp_path: Path) -> None:
    directory, together = RunDirectory(str(tmp_path)), threading.Barrier(8)
    taken: list[RunDirectory] = []

    def take() -> None:
        together.wait()
        with contextlib.suppress(Superseded):
            taken.append(fencing.take(directory, 0, launch=0))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1


def test_an_attempt_that_writes_while_its_files_are_removed_does_not_keep_the_next_from_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(str(tmp_path))
    older = fencing.take(directory, 0, launch=0)
    older.write_text("a", "a")
    remove: Callable[[str, str], None] = directory.files.remove_folder
    results: Sequence[Any] = iter([OSError(39, "Directory not empty"), None])  # type: ignore[assignment]

    def disturbed(path: str, first: str) -> None:
        if (error := next(results)) is not None:  # type: ignore[call-overload]
            raise error
        remove(path, first)

    monkeypatch.setattr(directory.files, "remove_folder", disturbed)
    fencing.take(directory, 1, launch=1)
    assert directory.list(".unfinished") == []
