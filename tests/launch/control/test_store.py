import dataclasses
import json
from pathlib import Path

import pytest

from contracts.errors import RequestError
from infra.documents import ABSENT, Documents
from launch.control.control_documents import Limits, Run
from launch.control.store import Store
from tests.launch.reconciler_model import Clock, Memory

RUN = Run(run_id="r", stack="s", runs_url="/runs", slices=("a",), limits=Limits(attempts=3))


def counted_down(run: Run | None) -> Run | None:
    assert run is not None and run.limits.attempts is not None
    return dataclasses.replace(run, limits=Limits(attempts=run.limits.attempts - 1))


def test_a_change_whose_answer_was_lost_is_made_once_though_somebody_else_has_written_since() -> None:
    memory = Memory(Clock())
    store = Store(Documents("/nowhere", place=memory))
    store.edit_run("r", lambda _: RUN)

    class OtherWriter(Memory):
        def _answer(self, name: str) -> None:
            if self.answers_lost:
                self.answers_lost = 0
                Store(Documents("/nowhere", place=self)).edit_run(
                    "r", lambda run: run and dataclasses.replace(run, reason="another's")
                )
                self.answers_lost = 1
                super()._answer(name)

    other = OtherWriter(Clock(), data=memory.data, count=memory.count, answers_lost=1)
    changed = Store(Documents("/nowhere", place=other)).edit_run("r", counted_down)
    assert changed is not None and changed.limits.attempts == 2 and changed.reason == "another's"


@pytest.mark.parametrize("text", ["{", "[]", '{"run_id": "b"}', '{"run_id": 3}'])
def test_a_bad_document_is_named_and_the_others_go_on(tmp_path: Path, text: str) -> None:
    store = Store(Documents(str(tmp_path)))
    store.edit_run("r", lambda _: RUN)
    (tmp_path / "runs" / "bad.json").write_text(f"1\n{text}")
    content = store.read()
    assert [*content.runs] == ["r"]
    assert [*content.unreadable] == ["runs/bad.json"]
    with pytest.raises(RequestError, match="runs/bad.json"):
        store.edit_run("bad", lambda run: run)


def test_keys_of_a_newer_version_are_kept(tmp_path: Path) -> None:
    documents = Documents(str(tmp_path))
    store = Store(documents)
    store.edit_run("r", lambda _: RUN)
    found = documents.read("runs/r.json")
    documents.write("runs/r.json", {**found.value, "newer": {"a": 1}}, version=found.version)
    store.edit_run("r", counted_down)
    value = documents.read("runs/r.json").value
    assert value["newer"] == {"a": 1} and value["limits"]["attempts"] == 2


def test_a_look_reads_only_what_has_changed_also_in_another_process(tmp_path: Path) -> None:
    memory, cache = Memory(Clock()), tmp_path / "cache.json"
    store = Store(Documents("/nowhere", place=memory), cache)
    for number in range(50):
        run_id = f"r{number}"
        store.edit_run(run_id, lambda _, run_id=run_id: dataclasses.replace(RUN, run_id=run_id))  # type: ignore[misc]
    assert len(store.read().runs) == 50
    again = Store(Documents("/nowhere", place=memory), cache)
    memory.requests = 0
    assert len(again.read().runs) == 50
    assert memory.requests == 1
    again.edit_run("r7", counted_down)
    memory.requests = 0
    assert again.read().runs["r7"].limits.attempts == 2
    assert memory.requests == 2


def test_numbers_are_given_once_and_a_deleted_run_is_gone(tmp_path: Path) -> None:
    from tests.launch.test_policy import QUEUED

    store = Store(Documents(str(tmp_path)))
    several = [dataclasses.replace(RUN, run_id=name, submission=QUEUED) for name in ("x", "y")]
    assert [run.submission and run.submission.number for run in store.add_runs(several)] == [1, 2]
    assert [run.order for run in store.add_runs([dataclasses.replace(several[0], run_id="z")])] == [3.0]
    store.edit_run("x", lambda _: None)
    assert sorted(store.read().runs) == ["y", "z"]
    assert store.documents.read("runs/x.json").version == ABSENT
    assert json.loads(json.dumps(store.documents.read("runs/y.json").value))["run_id"] == "y"
