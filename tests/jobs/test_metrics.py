"""What a run measures, how fast it steps, and where its time goes."""

import json
import math
import uuid
from pathlib import Path

import fsspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from contracts.process_environment import ProcessEnvironment
from contracts.run_directory import METRICS, RunDirectory
from jobs.runtime import preemption
from jobs.runtime.monitoring import metrics as metrics_module
from jobs.runtime.monitoring.heartbeat import Heartbeat
from jobs.runtime.monitoring.metrics import Metrics, Part, Rates, TimeSplit
from jobs.runtime.process import Run
from jobs.runtime.storage.bucket_files import BucketFiles


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


def test_a_line_is_there_at_once_with_its_step_its_values_and_the_time(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1234.56789)
    metrics, written_before = Metrics(directory, 0), list[str | None]()
    monkeypatch.setattr(
        preemption.watch, "about_to_record", lambda: written_before.append(directory.read_text(METRICS))
    )
    metrics.write(20, {"loss": 2.5, "grad_norm": 0.5})
    line = '{"step": 20, "loss": 2.5, "grad_norm": 0.5, "time": 1234.568}\n'
    assert directory.read_text(METRICS) == line
    metrics.write(40, {"loss": math.nan, "grad_norm": math.inf})
    metrics.close()
    assert written_before == ["", line]  # it waits until it is decided whether its step is kept
    last = directory.read_metrics()[-1]
    assert (last["loss"], last["grad_norm"]) == (None, None)
    assert math.isnan(scalars(directory, "loss")[40])


def test_a_resumed_attempt_drops_the_steps_that_it_takes_again_for_programs_and_for_tensorboard(
    directory: RunDirectory,
) -> None:
    written(directory, 0, {10: 3.0, 20: 2.0, 30: 1.0, 45: 0.5})
    assert scalars(directory, "loss") == {10: 3.0, 20: 2.0, 30: 1.0, 45: 0.5}
    written(directory, 20, {30: 1.5, 40: 0.75})
    left = {10: 3.0, 20: 2.0, 30: 1.5, 40: 0.75}
    assert {line["step"]: line["loss"] for line in directory.read_metrics()} == left
    assert scalars(directory, "loss") == left
    written(directory, 0, {})  # it begins anew
    assert steps_of(directory) == []


@pytest.mark.parametrize("torn", ['{"step": 20, "lo', '{"step": 20}x', "\x00\x00"])
def test_a_torn_last_line_is_dropped_and_the_next_line_is_whole(directory: RunDirectory, torn: str) -> None:
    written(directory, 0, {10: 3.0})
    with open(directory.path(METRICS), "a") as file:
        file.write(torn)
    written(directory, 10, {20: 2.0})
    lines = (directory.read_text(METRICS) or "").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [10, 20]


class WallClock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s


@pytest.fixture
def bucket() -> RunDirectory:
    return RunDirectory(f"memory://bucket-{uuid.uuid4().hex}/run", BucketFiles())


def test_in_a_bucket_the_files_are_put_anew_now_and_then_and_whole_at_the_end(
    bucket: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = WallClock()
    monkeypatch.setattr(metrics_module, "time", clock)
    metrics = Metrics(bucket, 0)
    metrics.write(1, {"loss": 1.0})
    assert steps_of(bucket) == []
    clock.now_s = metrics_module.BUCKET_PERIOD_S + 1
    metrics.write(2, {"loss": 2.0})
    assert steps_of(bucket) == [1, 2]
    metrics.write(3, {"loss": 3.0})
    assert steps_of(bucket) == [1, 2]
    metrics.close()
    (name,) = bucket.list("tensorboard")
    (tmp_path / "tensorboard").mkdir()
    here = RunDirectory(str(tmp_path))
    fsspec.filesystem("memory").get_file(bucket.path(f"tensorboard/{name}"), here.path(f"tensorboard/{name}"))
    assert scalars(here, "loss") == {1: 1.0, 2: 2.0, 3: 3.0}
    written(bucket, 2, {3: 3.5})
    assert [line["loss"] for line in bucket.read_metrics()] == [1.0, 2.0, 3.5]


def test_a_checkpoint_in_a_bucket_has_no_step_whose_metrics_are_not_there(
    bucket: RunDirectory, environment: ProcessEnvironment
) -> None:
    """Who resumes from it takes those steps no more."""
    metrics = Metrics(bucket, 0)
    metrics.write(1, {"loss": 1.0})
    run = Run(environment=environment, directory=bucket, heartbeat=Heartbeat(bucket, environment))
    assert steps_of(bucket) == []
    run.begin_saving()
    assert steps_of(bucket) == [1]
    metrics.close()


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_rates(**peak: float) -> tuple[Rates, TimeSplit, Clock]:
    clock = Clock()
    split = TimeSplit(clock)
    return Rates(split, name="tokens_per_s", per_step=10, flops_per_step=3 * 10**12, **peak), split, clock


def test_rates_leave_out_the_first_step_which_compiles_and_each_take_begins_anew() -> None:
    rates, split, clock = make_rates(peak_flops_per_s=10**13)
    clock.now_s += 60
    rates.step_done()
    assert (rates.take(), rates.overall()) == ({}, None)
    rates.start()
    clock.now_s += 2
    rates.step_done()
    assert rates.take() == {"tokens_per_s": 5.0, "step_s": 2.0, "mfu": 0.15}
    assert rates.take() == {}
    clock.now_s += 8
    rates.step_done()
    assert rates.take()["step_s"] == 8.0
    assert rates.overall() == 2 * 10 / 10
    assert split.seconds() == {"start": 60.0, "compute": 10.0}


@pytest.mark.parametrize(("busy_until_s", "input_wait_s"), [(0.0, 0.25), (100.1, 0.25), (200.0, 0.0)])
def test_making_a_batch_is_part_of_the_step_and_waiting_unless_the_devices_are_busy_to_its_end(
    busy_until_s: float, input_wait_s: float
) -> None:
    rates, split, clock = make_rates()
    rates.start()
    with rates.input(lambda: clock.now_s < busy_until_s):
        clock.now_s += 0.25
    clock.now_s += 1.75
    rates.step_done()
    rates.step_done()
    assert rates.take() == {"tokens_per_s": 10.0, "step_s": 1.0, "input_wait_s": input_wait_s / 2}
    assert split.seconds() == {"start": 0.0, "compute": 2 - input_wait_s, "input_wait": input_wait_s}


@pytest.mark.parametrize(
    ("part", "step_s"), [("evaluation", 1.0), ("checkpoint", 1.0), ("profile", 1.0), ("logging", 11.0)]
)
def test_of_what_is_no_computing_only_writing_metrics_counts_as_stepping(part: Part, step_s: float) -> None:
    rates, split, clock = make_rates()
    rates.start()
    clock.now_s += 1
    with split.part(part):
        clock.now_s += 10
    rates.step_done()
    assert rates.take()["step_s"] == step_s


def test_of_parts_within_parts_the_inner_one_counts_and_one_that_ends_by_an_error_is_over() -> None:
    clock = Clock()
    split = TimeSplit(clock)
    clock.now_s += 3
    split.enter("compute")
    with split.part("evaluation"):
        clock.now_s += 1
        with split.part("logging"):
            clock.now_s += 2
            assert split.spent_s("evaluation", "logging") == 3.0  # so far
        clock.now_s += 4
    with pytest.raises(OSError, match="full"), split.part("checkpoint"):
        clock.now_s += 1
        raise OSError("full")
    with split.part("input_wait", unless=lambda: True):  # in the end it was none
        clock.now_s += 16
    with split.part("profile"):
        split.enter("finish")  # begins when that part has ended
        clock.now_s += 1
    clock.now_s += 8
    parts = {"start": 3.0, "compute": 16.0, "evaluation": 5.0, "logging": 2.0, "checkpoint": 1.0}
    assert split.seconds() == {**parts, "input_wait": 0.0, "profile": 1.0, "finish": 8.0}
    assert split.wall_s() == sum(split.seconds().values())
