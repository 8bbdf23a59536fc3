"""What is kept is shown, and taken back, for all slices of a stack and without its hosts."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest

from backends.local.backend import on_this_machine
from contracts import inventory
from contracts.errors import RequestError
from infra.documents import Documents
from keeper import commands, store
from keeper.queue import Entry, Queue
from keeper.store import Wanted
from launch import targets
from tests.keeper.test_machine import INVENTORY


def test_no_host_is_needed_and_no_slice_is_asked_for(tmp_path: Path) -> None:
    several = tuple(dataclasses.replace(INVENTORY.slices[0], name=name) for name in ("a", "b"))
    file = tmp_path / "stack.json"
    storage = dataclasses.replace(INVENTORY.storage, bucket_url=f"file://{tmp_path}")
    file.write_text(inventory.to_json(dataclasses.replace(INVENTORY, slices=several, storage=storage)))
    assert store.documents_for(targets.Wanted(stack=str(file))).url == f"{tmp_path}/control"


@pytest.mark.parametrize(
    ("wanted", "meant"),
    [
        ("job-20261123-100000-aaaa", "job-20261123-100000-aaaa"),
        ("bbbb", "job-20261123-110000-bbbb"),
        ("mine", "job-20261123-100000-aaaa"),
        ("latest", "job-20261123-120000-cccc"),
        ("dddd", "dddd is not kept; `fab keeper status` lists"),
        ("job-2026", r"job-2026: 3 runs that are kept fit \(job-20261123-100000-aaaa, "),
        ("", " is not kept"),
        ("latest:job", "job-20261123-120000-cccc"),
        ("latest:jo", "latest:jo is not kept"),
    ],
)
def test_a_run_is_meant_by_its_id_a_part_of_it_its_name_or_as_the_last(
    tmp_path: Path, wanted: str, meant: str
) -> None:
    documents = Documents(str(tmp_path))
    for number, letter in enumerate("abc"):
        entry = Wanted(
            run_id=f"job-20261123-1{number}0000-{4 * letter}",
            stack="dev",
            slice="ab"[number % 2],
            runs_url="gs://b/runs",
            added_s=float(number),
            name="mine" if letter == "a" else None,
        )
        store.change_wanted(documents, entry.run_id, lambda _, entry=entry: entry)  # type: ignore[misc]
    before = {*store.read_wanted(documents)}
    if meant in before:
        assert commands.unkeep(documents, wanted) == 0
        assert before - {*store.read_wanted(documents)} == {meant}
    else:
        with pytest.raises(RequestError, match=meant):
            commands.unkeep(documents, wanted)
        assert {*store.read_wanted(documents)} == before


def test_what_the_keeper_or_the_queue_resumes_is_neither_removed_nor_left_running_by_a_stop(
    tmp_path: Path,
) -> None:
    """A run that waits for capacity has no process, and its checkpoints are what it goes on from."""
    target = dataclasses.replace(on_this_machine(hosts=None, platform="cpu"), runs_url=str(tmp_path))
    assert commands.resumed_by(target) == {} and not list(tmp_path.iterdir())
    documents = store.store_of(target)
    for run_id in ("kept", "unkept"):
        entry = Wanted(run_id=run_id, stack="local", slice="vm", runs_url=str(tmp_path))
        store.change_wanted(documents, run_id, lambda _, entry=entry: entry)  # type: ignore[misc]
    commands.unkeep(documents, "unkept")
    entry_of = functools.partial(
        Entry,
        what="job",
        request={"name": None},
        submitted={},
        bundles=(),
        where={},
        slices=("vm",),
        by="me",
        added="",
    )
    queued = Queue(documents).add([entry_of(number=0), entry_of(number=0)], [])
    Queue(documents).claim(queued[0].number, "vm", "queued")
    assert commands.resumed_by(target) == {
        "kept": "the keeper resumes it; `fab unkeep kept` first",
        "queued": f"the queue resumes it; `fab queue cancel {queued[0].number}` first",
    }
    assert commands.stop(target, "kept") and not commands.stop(target, "nobody's")
    assert store.read_wanted(documents)["kept"].stop
