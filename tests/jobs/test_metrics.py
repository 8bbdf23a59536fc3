"""Metrics hold every step once: what a resumed attempt will compute again is dropped, for programs and for people."""

from __future__ import annotations

import json
import math
import uuid
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from contracts.run_directory import METRICS, RunDirectory
from jobs.runtime import metrics as metrics_module
from jobs.runtime.bucket_files import BucketFiles
from jobs.runtime.environment import ProcessEnvironment
from jobs.runtime.metrics import Metrics


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(str(tmp_path / "run"))


def steps_of(directory: RunDirectory) -> list[int]:
    return [line["step"] for line in directory.read_metrics()]


def scalars(directory: RunDirectory, tag: str) -> dict[int, float]:
    """What TensorBoard shows of a tag."""
    events = EventAccumulator(directory.path("tensorboard"), purge_orphaned_data=True)
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def written(directory: RunDirectory, resumed_step: int, values: dict[int, float]) -> None:
    metrics = Metrics(directory, resumed_step)
    for step, loss in values.items():
        metrics.write(step, {"loss": loss})
    metrics.close()


def test_a_line_has_the_step_the_values_and_the_time(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1234.56789)
    metrics = Metrics(directory, 0)
    metrics.write(20, {"loss": 2.5, "grad_norm": 0.5})
    assert directory.read_text(METRICS) == '{"step": 20, "loss": 2.5, "grad_norm": 0.5, "time": 1234.568}\n'
    metrics.close()


def test_every_line_is_there_at_once_for_whoever_follows(directory: RunDirectory) -> None:
    metrics = Metrics(directory, 0)
    for step in (1, 2):
        metrics.write(step, {"loss": 1.0})
        assert steps_of(directory)[-1] == step
    metrics.close()


def test_a_resumed_attempt_drops_the_lines_of_the_steps_it_takes_again(directory: RunDirectory) -> None:
    written(directory, 0, {10: 3.0, 20: 2.0, 30: 1.0, 40: 0.5})
    written(directory, 20, {30: 1.5, 40: 0.75})
    assert [(line["step"], line["loss"]) for line in directory.read_metrics()] == [
        (10, 3.0),
        (20, 2.0),
        (30, 1.5),
        (40, 0.75),
    ]


def test_tensorboard_shows_the_resumed_attempts_values_and_not_the_lost_ones(directory: RunDirectory) -> None:
    written(directory, 0, {10: 3.0, 20: 2.0, 30: 1.0, 45: 0.5})
    assert scalars(directory, "loss") == {10: 3.0, 20: 2.0, 30: 1.0, 45: 0.5}
    written(directory, 20, {30: 1.5, 40: 0.75})
    assert scalars(directory, "loss") == {10: 3.0, 20: 2.0, 30: 1.5, 40: 0.75}


def test_a_run_that_begins_anew_keeps_nothing(directory: RunDirectory) -> None:
    written(directory, 0, {10: 3.0})
    written(directory, 0, {})
    assert steps_of(directory) == []


@pytest.mark.parametrize("torn", ['{"step": 20, "lo', "{", '{"step": 20}x', "\x00\x00"])
def test_a_torn_last_line_is_dropped_and_the_next_line_is_whole(directory: RunDirectory, torn: str) -> None:
    written(directory, 0, {10: 3.0})
    with open(directory.path(METRICS), "a") as file:
        file.write(torn)
    written(directory, 10, {20: 2.0})
    text = directory.read_text(METRICS)
    assert text is not None
    assert [json.loads(line)["step"] for line in text.splitlines()] == [10, 20]


def test_a_value_that_is_not_finite_is_null(directory: RunDirectory) -> None:
    metrics = Metrics(directory, 0)
    metrics.write(1, {"loss": math.nan, "grad_norm": math.inf})
    metrics.close()
    (line,) = directory.read_metrics()
    assert (line["loss"], line["grad_norm"]) == (None, None)
    assert math.isnan(scalars(directory, "loss")[1])


class Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s


@pytest.fixture
def bucket() -> RunDirectory:
    return RunDirectory(f"memory://bucket-{uuid.uuid4().hex}/run", BucketFiles())


def test_in_a_bucket_the_file_is_put_anew_now_and_then_and_whole_at_the_end(
    bucket: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(metrics_module, "time", clock)
    metrics = Metrics(bucket, 0)
    metrics.write(1, {"loss": 1.0})
    assert steps_of(bucket) == []
    clock.now_s = metrics_module.BUCKET_PERIOD_S + 1
    metrics.write(2, {"loss": 1.0})
    assert steps_of(bucket) == [1, 2]
    metrics.write(3, {"loss": 1.0})
    assert steps_of(bucket) == [1, 2]
    metrics.close()
    assert steps_of(bucket) == [1, 2, 3]


def test_in_a_bucket_too_a_resumed_attempt_drops_what_it_takes_again(bucket: RunDirectory) -> None:
    written(bucket, 0, {10: 3.0, 20: 2.0})
    written(bucket, 10, {20: 2.5})
    assert [(line["step"], line["loss"]) for line in bucket.read_metrics()] == [(10, 3.0), (20, 2.5)]


def test_tensorboards_file_in_a_bucket_has_everything_however_often_it_was_flushed(
    bucket: RunDirectory, tmp_path: Path
) -> None:
    metrics = Metrics(bucket, 0)
    for step in (1, 2, 3):
        metrics.write(step, {"loss": float(step)})
        metrics.flush()
    metrics.close()
    (name,) = bucket.list("tensorboard")
    here = RunDirectory(str(tmp_path))
    (tmp_path / "tensorboard").mkdir()
    fsspec.filesystem("memory").get_file(bucket.path(f"tensorboard/{name}"), here.path(f"tensorboard/{name}"))
    assert scalars(here, "loss") == {1: 1.0, 2: 2.0, 3: 3.0}


def test_every_rank_may_record_and_what_rank_0_recorded_is_complete_however_the_loop_is_left(
    environment: ProcessEnvironment,
) -> None:
    # As in a bucket, nothing is seen before it is flushed.
    directory = RunDirectory(f"memory://{uuid.uuid4()}", BucketFiles())
    for rank in (1, 0):
        mine = replace(environment, process_id=rank)
        with pytest.raises(KeyError), metrics_module.recording(directory, mine, 0) as record:
            record(1, {"loss": float(rank)})
            raise KeyError("the loop is left")
        assert [line["loss"] for line in directory.read_metrics()] == ([] if rank else [0.0])
