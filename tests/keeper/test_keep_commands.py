"""What is kept is shown, taken back and stopped, for all slices of a stack and without its hosts."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from backends.local.local_backend import on_this_machine
from contracts import inventory
from contracts.errors import RequestError
from infra.documents import Documents
from keeper import __main__ as keeper_main
from keeper import keep_commands, queue_commands, stack_store
from keeper.keep_commands import HandOver
from keeper.world import World
from launch import targets
from launch.control.control_documents import Attempt, End, Limits, Run, Submission
from launch.control.store import Store
from tests.keeper.lab import INVENTORY

QUEUED = Submission(
    number=1, what="train.py", request={}, submitted={}, bundles=(), where={}, by="me", added="2026-11-23T09:00:00Z"
)  # fmt: skip


def kept(run_id: str, **changes: Any) -> Run:
    run = Run(
        run_id=run_id, stack="dev", runs_url="gs://b/runs", slices=("vm",), slice="vm", project="grant",
        limits=Limits(attempts=3), attempt=Attempt(number=0),
    )  # fmt: skip
    return dataclasses.replace(run, **changes)


def add(documents: Documents, run: Run) -> None:
    Store(documents).edit_run(run.run_id, lambda _: run)


def test_no_host_is_needed_and_no_slice_is_asked_for(tmp_path: Path) -> None:
    several = tuple(dataclasses.replace(INVENTORY.slices[0], name=name) for name in ("a", "b"))
    file = tmp_path / "stack.json"
    storage = dataclasses.replace(INVENTORY.storage, bucket_url=str(tmp_path))
    file.write_text(inventory.to_json(dataclasses.replace(INVENTORY, slices=several, storage=storage)))
    assert stack_store.documents_for(targets.TargetRequest(stack=str(file))).url == f"{tmp_path}/control"


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
        name = "mine" if letter == "a" else None
        add(documents, kept(f"job-20261123-1{number}0000-{4 * letter}", name=name, added_s=float(number)))

    def unkept() -> list[str]:
        return [run.run_id for run in Store(documents).read().runs.values() if run.desired == "unmanaged"]

    if meant in Store(documents).read().runs:
        assert keep_commands.unkeep(documents, wanted) == 0
        assert unkept() == [meant]
        with pytest.raises(RequestError, match="is not kept"):
            keep_commands.unkeep(documents, meant)
    else:
        with pytest.raises(RequestError, match=meant):
            keep_commands.unkeep(documents, wanted)
        assert unkept() == []


def test_what_is_started_again_is_neither_removed_nor_missed_by_a_stop(tmp_path: Path) -> None:
    """A run that waits for capacity has no process, and its checkpoints are what it goes on from."""
    target = dataclasses.replace(on_this_machine(hosts=None, platform="cpu"), runs_url=str(tmp_path))
    assert keep_commands.resumed_by(target) == {} and not list(tmp_path.iterdir())
    documents = stack_store.stack_documents(target)
    add(documents, kept("kept"))
    add(documents, kept("unkept", desired="unmanaged"))
    add(documents, kept("ended", end=End(outcome="done", reason="", at_s=1.0)))
    add(documents, kept("queued", submission=QUEUED, slice=None, attempt=None))
    assert keep_commands.resumed_by(target) == {
        "kept": "the keeper resumes it; `fab unkeep kept` first",
        "queued": "the queue resumes it; `fab queue cancel 1` first",
    }
    assert [keep_commands.stop(target, run_id) for run_id in ("kept", "queued", "ended", "nobody's")] == [
        True, True, False, False,
    ]  # fmt: skip
    assert Store(documents).read().runs["kept"].desired == "stopped"


@pytest.mark.parametrize("has_keeper", [True, False])
def test_a_run_that_may_be_started_again_is_removed_once_that_is_over_and_nobody_keeps_it_meanwhile(
    tmp_path: Path, has_keeper: bool
) -> None:
    target = dataclasses.replace(on_this_machine(hosts=None, platform="cpu"), runs_url=str(tmp_path))
    target = dataclasses.replace(
        target, inventory=dataclasses.replace(target.inventory, has_keeper=has_keeper)
    )
    asked, documents = targets.TargetRequest(runs=str(tmp_path)), stack_store.stack_documents(target)
    store, checkpoint = Store(documents), tmp_path / "kept" / "checkpoints" / "5"
    checkpoint.mkdir(parents=True)
    assert keep_commands.remove(target, asked, "kept") is None, (
        "nobody starts it again, and it is the caller's"
    )
    waiting = kept("kept", project=None, runs_url=str(tmp_path), slices=("local",), slice="local")
    add(documents, dataclasses.replace(waiting, attempt=Attempt(number=0, starting_until_s=2e10)))
    run: Any = type("Of", (), {"run_id": "kept", "attempt": 0, "described": {}})()
    line = keep_commands.remove(target, asked, "kept")
    if has_keeper:
        assert line is not None and line.startswith(
            "kept is to be removed; the keeper does so at its next look"
        )
    else:
        assert line is not None and "is not yet: it is being started, and is stopped then; `fab queue" in line
    assert checkpoint.exists()
    with pytest.raises(RequestError, match="kept is being removed, and cannot be kept"):
        HandOver().keep(run, target)
    assert keep_commands.stop(target, "kept") and keep_commands.resumed_by(target) == {
        "kept": "it is being removed"
    }
    add(documents, dataclasses.replace(waiting, desired="removed"))
    keeper_main.reconcile(store, World(documents, print, program="a test", request=asked), print, asked)
    assert store.read().runs == {} and not checkpoint.exists()


def test_a_run_is_kept_with_new_limits_and_again_after_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = dataclasses.replace(on_this_machine(hosts="1", platform="cpu"), runs_url=str(tmp_path))
    described = {"version": 1, "run_id": "r", "job": "j", "attempts": [{"attempt": 2}], "max_usd": 9.0}
    run: Any = type("Of", (), {"run_id": "r", "attempt": 2, "described": described})()
    documents = stack_store.stack_documents(target)
    assert "r is kept: at most 20 more attempts; " in HandOver().keep(run, target)
    assert "at most 5 more attempts, until " in HandOver(attempts=5, hours=2.0).keep(run, target)
    one = Store(documents).read().runs["r"]
    assert (one.limits.attempts, one.limits.max_usd, one.slice) == (5, 9.0, target.slice.name)
    assert one.attempt is not None and (one.attempt.number, one.attempt.checkpoint) == (2, -2)
    keep_commands.stop(target, "r")
    assert "at most 5 more attempts, until " in HandOver().keep(run, target)
    assert Store(documents).read().runs["r"].desired == "running"
    add(documents, dataclasses.replace(one, end=End(outcome="failed", reason="no disk", at_s=1.0)))
    capsys.readouterr()
    assert keep_commands.status(documents) == 0
    assert "ended" in capsys.readouterr().out
    HandOver().keep(run, target)
    assert Store(documents).read().runs["r"].limits.attempts == 20


@pytest.mark.parametrize("looked_s", [None, 0.0, 3600.0])
def test_it_is_said_that_no_keeper_looks_at_what_is_wanted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    looked_s: float | None,
) -> None:
    """As where it was never installed."""
    clock_s: list[float] = [stack_store.NOTED_EVERY_S * 1_000_000]
    monkeypatch.setattr(Documents, "now_s", lambda _: clock_s[0])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    documents = Documents(str(tmp_path / "control"))
    add(documents, kept("kept", added_s=clock_s[0]))
    add(documents, kept("queued", submission=QUEUED, slice=None, attempt=None, added_s=clock_s[0]))

    def said() -> list[bool]:
        found = []
        for show in (
            keep_commands.status,
            lambda of: queue_commands.show(of, everything=False, as_json=False),
        ):
            show(documents)
            text = " ".join(capsys.readouterr().out.split())
            found.append("no keeper has looked for 1 h, and what is kept waits: `fab keeper install`" in text)
        return found

    assert said() == [False, False]
    clock_s[0] += 3600.0
    for _ in range(0 if looked_s is None else 2):
        stack_store.note_look(documents)
        clock_s[0] += 60.0
    assert documents.read(stack_store.LOOKED).value in (
        None,
        clock_s[0] - 120.0,
    )  # once in each quarter of an hour
    if looked_s:
        clock_s[0] += looked_s
    assert said() == [looked_s != 0.0] * 2
