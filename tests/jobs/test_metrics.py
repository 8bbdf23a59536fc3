"""What a run measures, how fast it steps, and where its time goes."""

from __future__ import annotations

import contextlib
import json
import math
import uuid
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from contracts.process import ProcessEnvironment
from contracts.run_directory import METRICS, RunDirectory
from jobs.runtime import metrics as metrics_module
from jobs.runtime import preemption
from jobs.runtime.bucket_files import BucketFiles
from jobs.runtime.metrics import Metrics
from jobs.runtime.rates import Part, Rates, TimeSplit


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


def test_a_line_waits_until_it_is_decided_whether_its_step_is_kept(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, written_before = Metrics(directory, 0), list[str | None]()
    monkeypatch.setattr(
        preemption.watch, "about_to_record", lambda: written_before.append(directory.read_text(METRICS))
    )
    metrics.write(1, {"loss": 2.5})
    metrics.close()
    assert (written_before, steps_of(directory)) == ([""], [1])


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


class WallClock:
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
    clock = WallClock()
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


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_rates(**peak: float) -> tuple[Rates, TimeSplit, Clock]:
    clock = Clock()
    split = TimeSplit(clock)
    return Rates(split, name="tokens_per_s", per_step=10, flops_per_step=3 * 10**12, **peak), split, clock


def no() -> bool:
    return False


def yes() -> bool:
    return True


def test_the_first_step_which_compiles_is_not_counted() -> None:
    rates, split, clock = make_rates()
    clock.now_s += 60
    rates.step_done()
    assert rates.take() == {}
    rates.start()
    clock.now_s += 2
    rates.step_done()
    assert rates.take() == {"tokens_per_s": 5.0, "step_s": 2.0, "input_wait_s": 0.0}
    assert split.seconds() == {"start": 60.0, "compute": 2.0}


def test_waiting_for_input_is_counted_per_step_and_as_part_of_the_step() -> None:
    rates, split, clock = make_rates()
    rates.start()
    for _ in range(4):
        with rates.input(no):
            clock.now_s += 0.25
        clock.now_s += 0.75
        rates.step_done()
    assert rates.take() == {"tokens_per_s": 10.0, "step_s": 1.0, "input_wait_s": 0.25}
    assert split.seconds() == {"start": 0.0, "compute": 3.0, "input_wait": 1.0}


def test_input_that_is_made_while_the_devices_are_busy_is_part_of_the_step_and_no_waiting() -> None:
    rates, split, clock = make_rates()
    rates.start()
    with rates.input(yes):
        clock.now_s += 0.25
    clock.now_s += 0.75
    rates.step_done()
    assert rates.take() == {"tokens_per_s": 10.0, "step_s": 1.0, "input_wait_s": 0.0}
    assert split.seconds() == {"start": 0.0, "compute": 1.0, "input_wait": 0.0}


def test_whether_the_devices_are_busy_is_asked_when_the_batch_is_made() -> None:
    """They may have fallen idle in between."""
    rates, _, clock = make_rates()
    rates.start()
    with rates.input(lambda: clock.now_s < 100.1):
        clock.now_s += 0.25
    rates.step_done()
    assert rates.take()["input_wait_s"] == 0.25


@pytest.mark.parametrize("part", ["evaluation", "checkpoint", "profile"])
def test_what_is_no_stepping_is_not_counted(part: Part) -> None:
    rates, split, clock = make_rates()
    rates.start()
    clock.now_s += 1
    rates.step_done()
    with split.part(part):
        clock.now_s += 1000
    clock.now_s += 1
    rates.step_done()
    assert rates.take() == {"tokens_per_s": 10.0, "step_s": 1.0, "input_wait_s": 0.0}


def test_writing_metrics_is_part_of_the_step() -> None:
    rates, split, clock = make_rates()
    rates.start()
    with split.part("logging"):
        clock.now_s += 1
    rates.step_done()
    assert rates.take()["step_s"] == 1.0


def test_each_take_begins_anew_and_the_overall_rate_is_of_all_of_them() -> None:
    rates, _, clock = make_rates()
    assert rates.overall() is None
    rates.start()
    for step_s in (1.0, 4.0):
        clock.now_s += step_s
        rates.step_done()
        assert rates.take()["step_s"] == step_s
        assert rates.take() == {}
    assert rates.overall() == 2 * 10 / 5


def test_mfu_is_the_steps_operations_over_what_the_devices_could_do_in_that_time() -> None:
    rates, _, clock = make_rates(peak_flops_per_s=10**13)
    rates.start()
    for _ in range(4):
        clock.now_s += 0.5
        rates.step_done()
    assert rates.take()["mfu"] == 0.6


def test_there_is_no_mfu_where_nobody_knows_the_peak() -> None:
    rates, _, clock = make_rates()
    rates.start()
    clock.now_s += 1
    rates.step_done()
    assert "mfu" not in rates.take()


def make_split() -> tuple[TimeSplit, Clock]:
    clock = Clock()
    return TimeSplit(clock), clock


def test_time_is_the_start_s_until_a_part_is_entered() -> None:
    split, clock = make_split()
    clock.now_s += 3
    split.enter("compute")
    clock.now_s += 5
    assert split.seconds() == {"start": 3.0, "compute": 5.0}


def test_a_part_within_a_part_has_its_time_alone() -> None:
    split, clock = make_split()
    split.enter("compute")
    with split.part("evaluation"):
        clock.now_s += 1
        with split.part("logging"):
            clock.now_s += 2
        clock.now_s += 4
    clock.now_s += 8
    assert split.seconds() == {"start": 0.0, "evaluation": 5.0, "logging": 2.0, "compute": 8.0}


def test_a_part_that_was_none_in_the_end_is_told_as_0_and_its_time_is_that_of_the_one_around() -> None:
    split, clock = make_split()
    split.enter("compute")
    with split.part("input_wait", unless=lambda: True):
        clock.now_s += 1
    assert split.seconds() == {"start": 0.0, "compute": 1.0, "input_wait": 0.0}
    with split.part("input_wait", unless=lambda: False):
        clock.now_s += 2
    assert split.seconds() == {"start": 0.0, "compute": 1.0, "input_wait": 2.0}


def test_what_is_entered_within_a_part_begins_when_that_part_has_ended() -> None:
    split, clock = make_split()
    with split.part("evaluation"):
        split.enter("finish")
        clock.now_s += 1
    clock.now_s += 2
    assert split.seconds() == {"evaluation": 1.0, "start": 0.0, "finish": 2.0}


def test_a_part_that_ends_by_an_error_is_over() -> None:
    split, clock = make_split()
    with pytest.raises(OSError, match="full"), split.part("checkpoint"):
        clock.now_s += 1
        raise OSError("full")
    clock.now_s += 2
    assert split.seconds() == {"checkpoint": 1.0, "start": 2.0}


def test_a_part_that_is_open_is_told_so_far() -> None:
    split, clock = make_split()
    with split.part("checkpoint"):
        clock.now_s += 1
        assert split.spent_s("checkpoint", "start") == 1.0
        clock.now_s += 1
        assert split.spent_s("checkpoint") == 2.0
    assert split.spent_s("evaluation") == 0.0


PARTS: list[Part] = ["compute", "input_wait", "evaluation", "checkpoint", "logging", "profile", "finish"]
Events = list[tuple[str, Part, float]]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "open", "open unless", "close", "look"]),
            st.sampled_from(PARTS),
            st.floats(0, 10),
        )
    )
)
def test_whatever_is_done_in_whatever_order_the_parts_add_up_to_the_wall_time(events: Events) -> None:
    split, clock = make_split()
    began_s = clock.now_s
    with contextlib.ExitStack() as stack:
        opened: list[contextlib.ExitStack] = []
        for what, part, seconds in events:
            clock.now_s += seconds
            if what == "enter":
                split.enter(part)
            elif what.startswith("open"):
                inner = stack.enter_context(contextlib.ExitStack())
                inner.enter_context(split.part(part, unless=lambda what=what: what == "open unless"))  # type: ignore[misc]
                opened.append(inner)
            elif what == "close" and opened:
                opened.pop().close()
            else:
                split.seconds()
    assert split.wall_s() == pytest.approx(clock.now_s - began_s)
    assert sum(split.seconds().values()) == pytest.approx(clock.now_s - began_s, abs=0.01)
    assert all(seconds >= 0 for seconds in split.seconds().values())
