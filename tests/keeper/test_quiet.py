"""A pass: while all is well it reads little and writes nothing, and nothing that it does keeps it from looking."""

from __future__ import annotations

import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.cloud_tpu.client import Listing
from infra.cloud_tpu.retry import Backoff, CloudTpuError
from infra.documents import Documents
from keeper import commands, hosts, passes, queue_commands, reclaim, store
from keeper.__main__ import watch
from keeper.queue import Queue
from keeper.store import Wanted
from tests.keeper import test_queue


def test_fifty_runs_that_are_well_cost_five_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs"
    for number in range(50):
        beats = folder / f"run-{number}" / "heartbeats"
        beats.mkdir(parents=True)
        (beats / "host-0.json").write_text("{}")
        entry = Wanted(
            run_id=f"run-{number}",
            stack="dev",
            slice="main",
            runs_url=str(folder),
            project="p",
            origin="queued-resource dev-main",
        )
        store.change_wanted(Documents(str(tmp_path)), entry.run_id, lambda _, entry=entry: entry)  # type: ignore[misc]
    asked: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            asked.append(name if name == "ages_s" else f"{name} {args[1]}")
            return function(*args, **more)

        return call

    for name in ("read", "write", "ages_s"):
        monkeypatch.setattr(Documents, name, noted(name, getattr(Documents, name)))

    class Client:
        def queued_resources(self, project: str) -> Listing:
            asked.append(project)
            name = f"projects/{project}/locations/z/queuedResources/dev-main"
            return Listing(found=[{"name": name, "state": {"state": "ACTIVE"}}])

    means = passes.Means(
        documents=Documents(str(tmp_path)),
        client=Client,  # type: ignore[arg-type]
        backoff=Backoff(sleep=lambda _: None),
        hosts=hosts.Hosts(print),
        say=print,
        hold=lambda name, **_: pytest.fail(f"the lease of {name} was wanted"),
    )
    monkeypatch.setattr(passes, "means_of", lambda *_: means)
    monkeypatch.setattr(
        Documents, "now_s", lambda _: store.NOTED_WITHIN_S + 1
    )  # not one of the looks for idle slices
    assert watch(means.documents, print) == 0
    tpus = "p"
    assert asked == ["read wanted.json", "ages_s", tpus, "read queue.json", tpus]


def test_what_one_step_cannot_do_does_not_keep_the_others_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def step(name: str) -> Callable[..., Any]:
        def fail(*_: Any, **__: Any) -> None:
            done.append(name)
            raise CloudTpuError(f"no {name}")

        return fail

    monkeypatch.setattr(passes, "run_pass", step("look"))
    monkeypatch.setattr(queue_commands, "attend", step("queue"))
    monkeypatch.setattr(reclaim, "give_back", step("idle"))
    said: list[str] = []
    assert watch(Documents(str(tmp_path)), said.append) == 1
    assert done == ["look", "queue", "idle"] and said == [f"error: no {name}" for name in done]


def test_a_quiet_pass_does_without_what_logs_in_to_hosts() -> None:
    """Its import takes as long as all the others together, every minute."""
    code = "import keeper.__main__, sys; sys.exit('asyncssh' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("busy", ["a slice", "the queue"])
def test_a_slice_that_is_lost_while_something_else_is_waited_for_is_seen_to_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: str
) -> None:
    documents, tended, lost = Documents(str(tmp_path)), threading.Event(), ["a"] if busy == "a slice" else []
    for name in ("a", "b"):
        of: dict[str, Any] = {"run_id": f"run-{name}", "slice": name, "origin": f"queued-resource {name}"}
        one = Wanted(**of, stack="dev", project="p", runs_url=str(tmp_path / "none"))
        store.change_wanted(documents, one.run_id, lambda _, one=one: one)  # type: ignore[misc]

    class Client:
        def queued_resources(self, project: str) -> Listing:
            there = [name for name in ("a", "b") if name not in lost]
            lost.append("b")  # from the second look on
            place = f"projects/{project}/locations/z/queuedResources"
            return Listing(
                found=[{"name": f"{place}/{each}", "state": {"state": "ACTIVE"}} for each in there]
            )

    def waits() -> None:
        assert tended.wait(20.0), "b waits for what is done about something else"

    def attend(attempt: passes.Attempt) -> None:
        waits() if attempt.name == "a" and "a" in lost else tended.set()

    monkeypatch.setattr(passes, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(passes.Attempt, "attend", attend)
    means = passes.Means(
        documents=documents,
        client=Client,  # type: ignore[arg-type]
        backoff=Backoff(),
        hosts=types.SimpleNamespace(signs=lambda _: {f"run-{each}": passes.WELL for each in "ab"}),  # type: ignore[arg-type]
        say=print,
        hold=lambda name, **_: pytest.fail(f"the lease of {name} was wanted"),
    )
    passes.run_pass(means, waits if busy == "the queue" else lambda: None)
    assert tended.is_set()


@pytest.mark.parametrize("looked_s", [None, 0.0, 3600.0])
def test_it_is_said_that_no_keeper_looks_at_what_is_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    looked_s: float | None,
) -> None:
    """As where it was never installed: a slice that is kept for a run is no slice for the queue."""
    clock_s: list[float] = [store.NOTED_EVERY_S * 1_000_000]
    monkeypatch.setattr(Documents, "now_s", lambda _: clock_s[0])
    documents = Documents(str(tmp_path))
    one = Wanted(run_id="run", slice="main", stack="dev", runs_url="", added_s=clock_s[0])
    store.change_wanted(documents, one.run_id, lambda _: one)
    Queue(documents).add([test_queue.entry(0)], [])

    def said() -> list[bool]:
        commands.status(documents), queue_commands.show(Queue(documents), everything=False, as_json=False)
        line = "no keeper has looked for 1 h, and what is kept waits: `fab keeper install`"
        return [line in " ".join(capsys.readouterr().out.split())]

    assert said() == [False]
    clock_s[0] += 3600.0
    for _ in range(0 if looked_s is None else 2):
        store.note_look(documents)
        clock_s[0] += 60.0
    assert documents.read(store.LOOKED).value in (None, clock_s[0] - 120.0)  # once in each quarter of an hour
    if looked_s:
        clock_s[0] += looked_s
    assert said() == [looked_s != 0.0]
