"""What is kept is shown, and taken back, for all slices of a stack and without its hosts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from contracts import inventory
from contracts.errors import RequestError
from infra.documents import Documents
from keeper import commands, store
from keeper.store import Wanted
from launch import targets
from tests.keeper.test_machine import INVENTORY


def test_no_host_is_needed_and_no_slice_is_asked_for(tmp_path: Path) -> None:
    several = tuple(dataclasses.replace(INVENTORY.slices[0], name=name) for name in ("a", "b"))
    file = tmp_path / "stack.json"
    file.write_text(inventory.to_json(dataclasses.replace(INVENTORY, slices=several, keeper="gs://b/keeper")))
    assert store.documents_for(targets.Wanted(stack=str(file))).url == "gs://b/keeper"


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
