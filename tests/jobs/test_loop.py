"""The loop that all jobs share: when it evaluates, saves and writes down, and how it is left."""

import contextlib
import dataclasses
import json
import math
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contracts import atomic
from contracts.errors import JobFailed
from contracts.host_interface import PROFILE_REQUEST, profile_answer
from contracts.run_directory import RunDirectory
from jobs.runtime import preemption, process
from jobs.runtime.loop import Loop
from jobs.runtime.preemption import Preempted
from jobs.runtime.process import Run
from jobs.runtime.storage.bucket_files import BucketFiles
from tests.jobs.groups import environment_of, run_in


class Saved:
    """Checkpoints of no state: which steps were saved, and what was noted."""

    def __init__(self) -> None:
        self.best: int | None = None
        self.notes: dict[int, Mapping[str, Any]] = {}

    def save(self, step: int, notes: Mapping[str, Any]) -> None:
        self.notes[step] = notes

    def restore_latest(self) -> tuple[int, dict[str, Any]] | None:
        return (max(self.notes), {**self.notes[max(self.notes)]}) if self.notes else None

    def restore_model(self, step: int) -> None:
        assert step in self.notes

    def wait(self) -> None: ...

    def close(self) -> None: ...


class Doubtful:
    """Of these steps the loss is one that nobody should resume from; of the last of `ends` training has to end."""

    def __init__(self, *doubtful: int, ends: int = 0) -> None:
        self._doubtful, self._ends = doubtful, ends
        self.holds_back, self.seen = False, 0

    def notes(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def restore(self, notes: Mapping[str, Any]) -> None:
        self.seen = notes.get("seen", 0)

    def judge(self, step: int, values: Mapping[str, float]) -> Mapping[str, float]:
        assert values == {"loss": 1 / step}
        self.holds_back = step in self._doubtful
        self.seen += self.holds_back
        return {"seen": self.seen} if self.holds_back else {}

    def respond(self, step: int, values: Mapping[str, float]) -> None:
        if step == self._ends:
            raise JobFailed(f"step {step}: enough")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return run_in(environment_of("jax_hello", "jax", tmp_path / "run"))


def loop_of(run: Run, saved: Saved, scores: Mapping[int, float], **options: Any) -> Loop:
    usual: dict[str, Any] = {
        "steps": 12,
        "unit": "rows",
        "per_step": 2,
        "checkpoint_every": 3,
        "log_every": 5,
        "score": lambda step: {"score": scores.get(step, 0.0)},
        "headline": "score",
        "eval_every": 4,
    }
    return Loop(run=run, checkpoints=saved, **{**usual, **options})


def take_steps(loop: Loop) -> Iterator[int]:
    loop.resume()
    for step in loop:
        with loop.input():
            yield step
        loop.record({"loss": 1 / step})


def lines(run: Run) -> list[tuple[Any, ...]]:
    """Of each line of metrics its step, and what is in it."""
    return [
        (line["step"], *(name for name in ("loss", "score", "seen") if name in line))
        for line in run.directory.read_metrics()
    ]


def test_what_is_due_is_done_once_and_the_best_model_is_put_in_place(run: Run) -> None:
    saved = Saved()
    loop = loop_of(run, saved, {4: 0.5, 8: 0.7, 12: 0.6})
    assert [*take_steps(loop)] == [*range(1, 13)]
    final = loop.finish(best=True)
    assert [*saved.notes] == [3, 4, 6, 8, 9, 12]
    assert lines(run) == [(4, "score"), (5, "loss"), (8, "score"), (10, "loss"), (12, "loss"), (12, "score")]
    assert (final["steps"], final["score"], loop.best_step, loop.exported_step, saved.best) == (
        12,
        0.7,
        8,
        8,
        8,
    )
    assert {
        "start",
        "compute",
        "input_wait",
        "evaluation",
        "checkpoint",
        "finish",
    } <= run.time.seconds().keys()


def test_who_leaves_saves_and_the_next_attempt_makes_up_the_evaluation(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Saved()
    monkeypatch.setattr(preemption, "notified", lambda step: step == 8)
    with pytest.raises(Preempted):
        list(take_steps(loop_of(run, saved, {4: 0.5, 8: 0.7})))
    assert ([*saved.notes], lines(run)[-1]) == ([3, 4, 6, 8], (5, "loss"))
    assert saved.notes[8]["best_step"] == 4
    resumed = Saved()
    resumed.notes = saved.notes
    again = loop_of(run, resumed, {4: 0.5, 8: 0.7})
    assert again.resume()["best_step"] == resumed.best == 4
    monkeypatch.setattr(preemption, "notified", lambda step: False)
    assert [*take_steps(again)] == [9, 10, 11, 12]
    assert lines(run)[2] == (8, "score") and again.best_step == 8


def test_a_doubtful_state_is_saved_by_who_leaves_only_and_never_is_the_best(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Saved()
    monkeypatch.setattr(preemption, "notified", lambda step: step == 11)
    with pytest.raises(Preempted):
        list(take_steps(loop_of(run, saved, {4: 0.9, 8: 0.5}, guard=Doubtful(3, 4, 10, 11))))
    assert [*saved.notes] == [5, 6, 8, 9, 11]  # what was due after 3 and 4 is saved after 5
    assert (saved.best, saved.notes[11]["best_step"], saved.notes[11]["seen"]) == (8, 8, 4)
    guard = Doubtful()
    loop_of(run, saved, {}, guard=guard).resume()
    assert guard.seen == 4
    assert [line for line in lines(run) if "seen" in line] == [
        (step, "loss", "seen") for step in (3, 4, 10, 11)
    ]


def test_where_the_guard_ends_the_run_its_last_step_is_written_down(run: Run) -> None:
    with pytest.raises(JobFailed, match="step 7: enough"):
        list(take_steps(loop_of(run, Saved(), {}, guard=Doubtful(7, ends=7))))
    assert lines(run)[-1] == (7, "loss", "seen")


def test_the_best_evaluation_is_known_after_a_resume_and_patience_counts_those_since(run: Run) -> None:
    saved, known = Saved(), []
    scores = dict(enumerate((math.nan, 0.25, 0.75, 0.75, math.nan, 1.0), 1))
    for step in range(1, 6):
        saved.notes = {
            kept: json.loads(json.dumps(notes, allow_nan=False)) for kept, notes in saved.notes.items()
        }
        loop = loop_of(run, saved, scores, eval_every=1, patience=2)
        steps = take_steps(loop)
        assert next(steps) == step
        with contextlib.suppress(StopIteration):
            next(steps)  # which does what is due after the first
        known.append((loop.best_step, loop.is_over))
    assert known == [(0, False), (2, False), (3, False), (3, False), (3, True)]
    resumed = loop_of(run, saved, scores, eval_every=1, patience=2)
    assert [*take_steps(resumed)] == []
    assert [line["step"] for line in run.directory.read_metrics() if "score" in line] == [1, 2, 3, 4, 5]
    assert resumed.finish()["steps"] == 5


class _Tracer:
    def __init__(self, problem: str | None = None) -> None:
        self._problem = problem

    def start(self, folder: str) -> None:
        if self._problem is not None:
            raise RuntimeError(self._problem)

    def step(self, step: int) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def stop(self) -> None: ...

    def files(self, *_: object) -> Iterator[tuple[Path, str]]:
        return iter(())


def test_a_call_of_several_steps_ends_where_something_is_due_and_a_traced_step_has_its_own(run: Run) -> None:
    loop = loop_of(run, Saved(), {}, steps=20, checkpoint_every=9, profile="14:15", tracer=_Tracer())
    taken = []
    for steps in loop.calls(3):
        loop.record({"loss": 0.0})
        taken.append([*steps])
    assert taken == [
        *([1, 2, 3], [4], [5], [6, 7, 8], [9], [10], [11, 12], [13], [14], [15]),
        *([16], [17, 18], [19, 20]),
    ]


@pytest.mark.parametrize(
    ("options", "requests", "answers"),
    [
        ({"tracer": _Tracer()}, {4: ("a", 2, 6), 9: ("b", 1, 3)}, {"a": "6-7", "b": "9-9"}),
        ({"tracer": _Tracer()}, {4: ("a", 9, 6)}, {"a": "6-12"}),  # the training ends before the trace
        ({"tracer": _Tracer()}, {3: ("a", 2, 11), 5: None}, {}),
        ({"tracer": _Tracer(), "profile": "8:9"}, {3: ("a", 2, 4)}, {"a": "the steps 8-9 are to be traced first"}),
        ({"tracer": _Tracer("in use")}, {3: ("a", 2, 4)}, {"a": "the profiler does not start: in use"}),
        ({}, {3: ("a", 2, 4)}, {"a": "this job has no profiler"}),
    ],
    ids=["two", "cut short", "withdrawn", "behind --profile", "in use", "none"],
)  # fmt: skip
def test_a_trace_that_is_requested_while_the_steps_are_taken_has_an_answer_and_never_ends_the_run(
    tmp_path: Path,
    options: dict[str, Any],
    requests: dict[int, tuple[str, int, int] | None],
    answers: dict[str, str],
) -> None:
    environment = environment_of("jax_hello", "jax", tmp_path / "run")
    run = run_in(dataclasses.replace(environment, control_dir=str(tmp_path)))
    asked, answered = tmp_path / PROFILE_REQUEST, tmp_path / profile_answer(0)
    seen: dict[str, str] = {}
    for step in take_steps(loop := loop_of(run, Saved(), {}, **options)):
        if (request := requests.get(step + 1, ...)) is None:
            asked.unlink()
        elif request is not ...:
            request_id, steps, first = request
            atomic.write_json(asked, {"id": request_id, "steps": steps, "first": first})
        seen |= _answer(answered)
    loop.finish()
    seen |= _answer(answered)
    assert (loop.done, seen) == (12, answers)


def _answer(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    answer = json.loads(path.read_text())
    assert answer["ranks"] == 1
    return {answer["id"]: answer.get("steps") or answer["problem"]}


def test_what_rank_0_recorded_is_there_however_the_loop_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(start=lambda _: None, leave=lambda: None)
    monkeypatch.setattr(process, "framework_module", lambda _: group)
    monkeypatch.setattr("jobs.runtime.monitoring.sampler.start", lambda _: None)
    monkeypatch.setattr(preemption.watch, "claim", lambda: None)
    monkeypatch.setattr(preemption.watch, "_flushes", [])

    def train(run: Run, _: object) -> dict[str, Any]:
        for step in take_steps(loop_of(run, Saved(), {}, log_every=1)):
            if step == 3:
                raise KeyError("the loop is left")
        return {}

    # In a bucket nothing is seen before it is flushed.
    directory = RunDirectory(f"memory://{uuid.uuid4()}", BucketFiles())
    for rank in (1, 0):
        run = run_in(environment_of("jax_hello", "jax", directory.url, num_processes=2, process_id=rank))
        assert process._carry_out(run, None, train) == 1
        assert [line["step"] for line in directory.read_metrics()] == ([] if rank else [1, 2])
