"""Checkpoints that are not JAX's: which of them are complete."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from contracts.run_directory import COMMITTED
from jobs.runtime.bucket_files import BucketFiles
from jobs.runtime.checkpoints import Checkpoints
from jobs.runtime.preemption import watch
from jobs.runtime.process import Run
from tests.jobs.groups import environment_of, run_in


class Alone:
    def rank(self) -> int:
        return 0

    def all_processes(self, here: bool) -> bool:
        return here


class Number:
    """A state in two files, as TensorFlow's."""

    value = 0

    def write(self, folder: str) -> Callable[[], None]:
        value = str(self.value)

        def write() -> None:
            Path(folder, "state.index").write_text(value)
            Path(folder, "state.data").write_text(value)

        return write

    def read(self, folder: str, *, model_only: bool) -> Callable[[], None]:
        value = int(Path(folder, "state.data").read_text())
        return lambda: setattr(self, "value", value)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return run_in(environment_of("torch_glue", "pytorch", tmp_path / "run"))


def test_a_checkpoint_that_was_copied_into_a_bucket_counts_from_its_last_file_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "restored", lambda _: None)
    state = Number()
    on_disk = Checkpoints(run, state, Alone(), keep_last=2)
    for state.value in (5, 10):
        on_disk.save(state.value, {"said": "so"})
    on_disk.close()
    in_bucket = run_in(environment_of("torch_glue", "pytorch", f"memory://{uuid.uuid4()}"))
    names = ["notes.json", "state.data", "state.index"]
    assert sorted(run.directory.list("checkpoints/10")) == names

    def copy(step: int, name: str) -> None:
        data = Path(run.directory.path(f"checkpoints/{step}/{name}")).read_bytes()
        BucketFiles().write(in_bucket.directory.path(f"checkpoints/{step}/{name}"), data)

    for name in names:  # a copy that goes on, file by file
        assert in_bucket.directory.checkpoint_steps() == []
        copy(5, name)
    for name in names[:2]:
        copy(10, name)
    assert in_bucket.directory.checkpoint_steps() == [5]
    again = Number()
    resumed = Checkpoints(in_bucket, again, Alone(), keep_last=2)
    assert (resumed.restore_latest(), again.value) == ((5, {"said": "so"}), 5)

    copy(10, names[2])
    assert (resumed.restore_latest(), again.value) == ((10, {"said": "so"}), 10)
    resumed.save(15, {})
    resumed.close()
    assert in_bucket.directory.checkpoint_steps() == [
        10,
        15,
    ]  # and older ones go, as those that were written there
    assert in_bucket.directory.list("checkpoints/5") == []

    back = run_in(environment_of("torch_glue", "pytorch", run.directory.url))
    for name in (*names, COMMITTED):
        text = in_bucket.directory.read_text(f"checkpoints/15/{name}")
        assert text is not None
        back.directory.write_text(f"checkpoints/15/{name}", text)
    assert Checkpoints(back, again, Alone(), keep_last=2).restore_latest() == (15, {})
