"""A trace holds the steps that were asked for, whole and no others, in files that TensorBoard and Perfetto open."""

from __future__ import annotations

import dataclasses
import gzip
import json
import uuid
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from contracts.errors import RequestError
from contracts.run_directory import RunDirectory
from jobs.runtime.bucket_files import files_of
from jobs.runtime.environment import ProcessEnvironment
from jobs.runtime.heartbeat import Heartbeat
from jobs.runtime.process import Run
from jobs.runtime.profile import Profile, Steps, read_steps

pytestmark = pytest.mark.usefixtures("two_devices")


def run_of(environment: ProcessEnvironment, url: str, rank: int = 0) -> Run:
    mine = dataclasses.replace(environment, process_id=rank)
    directory = RunDirectory(url)
    return Run(environment=mine, directory=directory, heartbeat=Heartbeat(directory, mine))


def take_steps(run: Run, wanted: Steps | None, *, first: int = 1, last: int = 8, done: int = 0) -> None:
    """Steps of one large product each, whose results nobody waits for but `settle`."""
    product = jax.jit(lambda x_DD: jnp.tanh(x_DD @ x_DD))
    latest = product(jnp.ones((700, 700)))
    jax.block_until_ready(latest)
    profile = Profile(run, wanted, done=done, settle=lambda: jax.block_until_ready(latest))
    for step in range(first, last + 1):
        with profile.step(step):
            latest = product(latest)
    profile.close()


def files(run: Run) -> list[str]:
    folders = ("profile", "profile/plugins/profile")
    sessions = run.directory.list(folders[1])
    names = [
        f"{session}/{name}" for session in sessions for name in run.directory.list(f"{folders[1]}/{session}")
    ]
    return sorted(name for name in run.directory.list(folders[0]) if name != "plugins") + names


def steps_in(run: Run, name: str) -> list[int]:
    """The steps that the file for Perfetto names."""
    (data,) = files_of(run.directory.url).read([run.directory.path(f"profile/{name}")])
    assert data is not None
    events = json.loads(gzip.decompress(data))["traceEvents"]
    return [int(event["args"]["step_num"]) for event in events if event.get("name") == "train"]


def products_in(run: Run, name: str) -> int:
    """How many products the file for TensorBoard holds, whole."""
    data = jax.profiler.ProfileData.from_file(run.directory.path(f"profile/plugins/profile/{name}"))
    names = Counter(event.name for plane in data.planes for line in plane.lines for event in line.events)
    begun = {name: count for name, count in names.items() if f"end: {name}" in names}
    assert begun == {name: names[f"end: {name}"] for name in begun}
    (count,) = set(begun.values())
    return count


def test_the_steps_that_were_asked_for_are_in_the_trace_and_their_work_is_whole(
    environment: ProcessEnvironment,
) -> None:
    run = run_of(environment, environment.run_dir)
    take_steps(run, Steps(first=3, last=5))
    assert files(run) == ["steps-3-5-host-0.perfetto.json.gz", "steps-3-5/host-0.xplane.pb"]
    assert steps_in(run, "steps-3-5-host-0.perfetto.json.gz") == [3, 4, 5]
    assert products_in(run, "steps-3-5/host-0.xplane.pb") == 3
    assert run.time.spent_s("profile") > 0


def test_the_traces_of_all_processes_lie_in_one_folder_as_tensorboard_wants_them(
    environment: ProcessEnvironment,
) -> None:
    for rank in (0, 1):
        take_steps(run_of(environment, environment.run_dir, rank), Steps(first=2, last=2))
    run = run_of(environment, environment.run_dir)
    assert files(run)[2:] == ["steps-2-2/host-0.xplane.pb", "steps-2-2/host-1.xplane.pb"]


def test_a_trace_goes_into_a_bucket_too(environment: ProcessEnvironment) -> None:
    run = run_of(environment, f"memory://{uuid.uuid4()}/run")
    take_steps(run, Steps(first=2, last=3))
    assert files(run) == ["steps-2-3-host-0.perfetto.json.gz", "steps-2-3/host-0.xplane.pb"]
    assert steps_in(run, "steps-2-3-host-0.perfetto.json.gz") == [2, 3]


def test_a_run_that_ends_early_keeps_what_was_traced_and_says_how_far(
    environment: ProcessEnvironment,
) -> None:
    run = run_of(environment, environment.run_dir)
    take_steps(run, Steps(first=3, last=9), last=4)
    assert files(run)[1] == "steps-3-4/host-0.xplane.pb"
    assert steps_in(run, "steps-3-4-host-0.perfetto.json.gz") == [3, 4]


def test_a_resumed_run_traces_what_it_has_not_taken_yet(
    environment: ProcessEnvironment, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(environment, environment.run_dir)
    take_steps(run, Steps(first=3, last=5), first=5, done=4)
    assert steps_in(run, "steps-5-5-host-0.perfetto.json.gz") == [5]
    assert "--profile: steps up to 4 were taken before this attempt" in capsys.readouterr().out


def test_a_run_resumed_after_the_steps_traces_nothing_and_says_so(
    environment: ProcessEnvironment, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(environment, environment.run_dir)
    take_steps(run, Steps(first=3, last=5), first=6, done=5)
    assert files(run) == []
    assert "--profile: step 5 was taken before this attempt; nothing is traced" in capsys.readouterr().out


def test_a_run_that_is_asked_for_no_trace_takes_none(environment: ProcessEnvironment) -> None:
    run = run_of(environment, environment.run_dir)
    take_steps(run, None)
    assert files(run) == []
    assert "profile" not in run.time.seconds()


def test_nothing_of_a_trace_is_left_beside_the_run(
    environment: ProcessEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    take_steps(run_of(environment, environment.run_dir), Steps(first=2, last=2))
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize(
    "said", ["3", "3:", ":5", "a:b", "3-5", "-1:5", "3:5:7", " 3:5", "3:5\n", "", "１:２"]
)
def test_what_is_not_two_numbers_is_refused_with_an_example(said: str) -> None:
    with pytest.raises(
        RequestError, match=r"is not A:B; give the first and the last step to trace, as 100:104"
    ):
        read_steps(said, steps=10)


@pytest.mark.parametrize("said", ["0:3", "5:4", "9:11", "11:12"])
def test_steps_that_the_run_does_not_have_are_refused_with_those_it_has(said: str) -> None:
    with pytest.raises(RequestError, match=rf"--profile {said}: .* 1 <= A <= B <= 10 \(--steps\)"):
        read_steps(said, steps=10)


def test_more_steps_than_a_trace_can_hold_are_refused() -> None:
    assert read_steps("10:109", steps=1000) == Steps(first=10, last=109)
    with pytest.raises(RequestError, match="are 101 steps, .* give 10:109 or fewer"):
        read_steps("10:110", steps=1000)


def test_nothing_said_is_nothing_traced_and_one_step_is_enough() -> None:
    assert read_steps(None, steps=10) is None
    assert read_steps("10:10", steps=10) == Steps(first=10, last=10)
