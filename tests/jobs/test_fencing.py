"""Whatever a superseded process is about to commit, it changes nothing in the run directory, and it ends."""

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
import jax.numpy as jnp
import pytest

from contracts import fencing
from contracts.errors import SUPERSEDED, Superseded
from contracts.run_directory import RunDirectory
from jobs.runtime import process
from jobs.runtime.checkpoints import Checkpoints
from jobs.runtime.jax import checkpoints as orbax
from jobs.runtime.monitoring.metrics import Metrics
from jobs.runtime.preemption import watch
from jobs.runtime.process import Run
from jobs.runtime.storage.bucket_files import files_of
from tests.jobs.groups import Alone, environment_of, run_in


class OneFile:
    def write(self, folder: str) -> Callable[[], None]:
        def write() -> None:
            Path(folder, "state").write_text("state")

        return write

    def read(self, folder: str, *, model_only: bool) -> Callable[[], None]:
        return lambda: None


type Prepare = Callable[[Run], Callable[[], object]]


def the_third(checkpoints: Checkpoints | orbax.Checkpoints) -> Callable[[], object]:
    """What commits a third checkpoint, where only the last one is kept."""

    def commit(step: int = 3) -> None:
        checkpoints.save(step, {})
        checkpoints.wait()

    for step in (1, 2):
        commit(step)
    return commit


def a_checkpoint(run: Run) -> Callable[[], object]:
    return the_third(Checkpoints(run, OneFile(), Alone(), keep_last=1))


def a_checkpoint_of_orbax(run: Run) -> Callable[[], object]:
    return the_third(orbax.Checkpoints(run, orbax.Tree({"weights": jnp.arange(8.0)}), keep_last=1))


def a_line_of_metrics(run: Run) -> Callable[[], object]:
    metrics = Metrics(run.directory, 0)
    metrics.write(1, {"loss": 1.0})
    metrics.flush()

    def commit() -> None:
        metrics.write(2, {"loss": 2.0})
        metrics.flush()

    return commit


COMMITTERS: dict[str, Prepare] = {
    "a checkpoint": a_checkpoint,
    "a checkpoint of Orbax": a_checkpoint_of_orbax,
    "a line of metrics": a_line_of_metrics,
    "a heartbeat": lambda run: lambda: run.heartbeat.end("failed", "late"),
    "a result": lambda run: lambda: process.finish(run, "done", {"steps": 3}),
    "the end of a run that was told to stop": lambda run: lambda: process.finish_early(run, 3),
    "decided options": lambda run: lambda: run.decide({"late": True}),
}


@pytest.fixture(params=["disk", "bucket"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(watch, "_flushes", [])  # what is registered here is for no other test
    place = str(tmp_path / "run") if request.param == "disk" else f"memory://{uuid.uuid4().hex}/run"
    fencing.take(RunDirectory(place, files_of(place)), 0, launch=0)
    return run_in(environment_of("flax_mlm", "jax", place))


def committed(run: Run) -> dict[str, bytes]:
    """All files of the run but tokens, what has no name yet, and event files, whose names are their writer's."""
    files, root = fsspec.core.url_to_fs(run.directory.url)
    names = (name.removeprefix(root) for name in files.find(root) if files.isfile(name))
    aside = ("/attempts/", "/.unfinished/", "/tensorboard/")
    return {name: files.cat_file(root + name) for name in names if not name.startswith(aside)}


def newer_attempt(run: Run) -> None:
    """Begin the next attempt, which has written most of what an attempt writes."""
    newer = fencing.take(run.directory.unfenced(), 1, launch=1)
    newer.write_text("result.json", "newer")
    newer.write_text("heartbeats/host-0.json", "newer")
    newer.write_text("settings.json", "newer")


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("is_frozen", [False, True], ids=["before its check", "after its check"])
@pytest.mark.parametrize("committer", COMMITTERS)
def test_what_an_older_attempt_commits_after_a_newer_one_has_begun_changes_nothing(
    run: Run, committer: str, is_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if committer == "a checkpoint of Orbax" and run.directory.is_remote:
        pytest.skip("Orbax reaches buckets of Google only")
    commit, check = COMMITTERS[committer](run), RunDirectory.require_newest
    before: dict[str, bytes] = {}
    frozen: list[bool] = []

    def freeze(directory: RunDirectory) -> None:
        check(directory)
        if not frozen:
            frozen.append(True)
            newer_attempt(run)
            before.update(committed(run))

    if is_frozen:
        monkeypatch.setattr(RunDirectory, "require_newest", freeze)
    else:
        newer_attempt(run)
        before.update(committed(run))
    # A line that is appended late goes to a file without a name, of which its writer learns nothing.
    late_line = is_frozen and committer == "a line of metrics" and not run.directory.is_remote
    with contextlib.nullcontext() if late_line else pytest.raises(Exception) as raised:
        commit()
    assert committed(run) == before
    if raised is not None and not late_line:
        with pytest.raises(Superseded):
            run.directory.require_newest()


def started(run_dir: Path, *, module: str = "jobs.flax_mlm", **changed: object) -> subprocess.Popen[str]:
    environment = environment_of("flax_mlm", "jax", run_dir, **changed)
    return subprocess.Popen(
        [sys.executable, "-m", module],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.getcwd(), **environment.variables()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_process_that_is_started_late_says_which_attempt_has_begun_and_ends_with_a_code_of_its_own(
    tmp_path: Path,
) -> None:
    directory = RunDirectory(str(tmp_path))
    fencing.take(directory, 0, launch=0)
    fencing.take(directory, 1, launch=1)
    late = started(tmp_path)
    said, _ = late.communicate(timeout=60)
    assert (late.returncode, said) == (
        SUPERSEDED,
        "attempt 1 of this run has begun since; attempt 0 ends\n",
    )
    assert sorted(directory.list(".")) == ["attempts"] or directory.list("heartbeats") == []


def test_a_process_that_computes_or_waits_ends_within_seconds_of_the_beginning_of_another_attempt(
    tmp_path: Path,
) -> None:
    directory = RunDirectory(str(tmp_path))
    fencing.take(directory, 0, launch=0)
    waiting = started(tmp_path, num_processes=2, coordinator="127.0.0.1:9", process_id=1)
    beat = tmp_path / "heartbeats" / "host-1.json"
    while not beat.exists():
        assert waiting.poll() is None
    fencing.take(directory, 1, launch=1)
    before = json.loads(beat.read_text())
    said, _ = waiting.communicate(timeout=20)
    assert (waiting.returncode, said.splitlines()[-1]) == (
        SUPERSEDED,
        "attempt 1 of this run has begun since; attempt 0 ends",
    )
    assert json.loads(beat.read_text())["state"] == before["state"] == "starting"
