"""While all is well a pass reads what is wanted and the queue once, lists once, and writes nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.cloud_tpu.retry import Backoff, CloudTpuError
from infra.documents import Documents
from keeper import hosts, idle, passes, queue_commands, store
from keeper.__main__ import watch
from keeper.store import Wanted


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
        def queued_resources(self, parent: str) -> list[dict[str, Any]]:
            asked.append(parent)
            return [{"name": f"{parent}/queuedResources/dev-main", "state": {"state": "ACTIVE"}}]

    means = passes.Means(
        documents=Documents(str(tmp_path)),
        client=Client,  # type: ignore[arg-type]
        backoff=Backoff(sleep=lambda _: None),
        hosts=hosts.Hosts(print),
        say=print,
        lease_of=lambda name: pytest.fail(f"the lease of {name} was wanted"),
    )
    monkeypatch.setattr(passes, "means_of", lambda *_: means)
    monkeypatch.setattr(
        Documents, "now_s", lambda _: idle.WITHIN_S + 1
    )  # not one of the looks for idle slices
    assert watch(means.documents, print) == 0
    tpus = "projects/p/locations/-"
    assert asked == ["read wanted.json", "ages_s", tpus, tpus, "read queue.json"]


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
    monkeypatch.setattr(idle, "give_back", step("idle"))
    said: list[str] = []
    assert watch(Documents(str(tmp_path)), said.append) == 1
    assert done == ["look", "queue", "idle"] and said == [f"error: no {name}" for name in done]


def test_a_quiet_pass_does_without_what_logs_in_to_hosts() -> None:
    """Its import takes as long as all the others together, every minute."""
    code = "import keeper.__main__, sys; sys.exit('asyncssh' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
