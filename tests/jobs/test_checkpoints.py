"""Checkpoints that are not JAX's: which of them are complete, and what is restored."""

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from contracts.errors import RequestError
from contracts.run_directory import COMMITTED
from jobs.runtime.checkpoints import TORN, Checkpoints
from jobs.runtime.preemption import watch
from jobs.runtime.process import Run
from jobs.runtime.storage.bucket_files import BucketFiles
from tests.jobs.groups import Alone, environment_of, run_in


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


def test_whoever_may_read_the_run_may_read_its_checkpoints(run: Run) -> None:
    class Private(Number):
        def write(self, folder: str) -> Callable[[], None]:
            write = super().write(folder)

            def privately() -> None:
                write()
                Path(folder, "state.data").chmod(0o600)

            return privately

    checkpoints = Checkpoints(run, Private(), Alone(), keep_last=2)
    checkpoints.save(5, {})
    checkpoints.close()
    files = Path(run.directory.path("checkpoints/5")).iterdir()
    assert len({file.stat().st_mode for file in files}) == 1


def flip_a_byte(folder: Path) -> None:
    path = folder / "state.data"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]))  # of the same size: only a checksum tells


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a byte changed": flip_a_byte,
    "emptied": lambda folder: (folder / "state.index").write_bytes(b""),
    "a file deleted": lambda folder: (folder / "state.index").unlink(),
    "notes torn": lambda folder: (folder / "notes.json").write_text('{"sa'),
    "notes deleted": lambda folder: (folder / "notes.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_torn_checkpoint_is_put_aside_with_a_warning_and_the_one_before_it_is_used_if_there_is_one(
    run: Run, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "restored", lambda _: None)
    state = Number()
    checkpoints = Checkpoints(run, state, Alone(), keep_last=2)
    for state.value in (5, 7):
        checkpoints.save(state.value, {})
    checkpoints.wait()
    folder = Path(run.directory.path("checkpoints"))
    DAMAGES[damage](folder / "7")
    complete = run.directory.checkpoint_steps()
    assert (checkpoints.restore_latest(), state.value) == ((5, {}), 5)
    if 7 in complete:
        (warning,) = run.heartbeat.warnings
        assert warning.startswith("checkpoint 7 cannot be read (")
        assert [name.partition("-")[0] for name in run.directory.list(TORN)] == ["7"]
    assert run.directory.checkpoint_steps() == [5]

    flip_a_byte(folder / "5")
    with pytest.raises(RequestError, match="none of the run's 1 checkpoints can be read"):
        checkpoints.restore_latest()
    assert run.directory.checkpoint_steps() == [5]
    with pytest.raises(RequestError, match="checkpoint 5 cannot be read: ValueError: state.data is not what"):
        checkpoints.restore_model(5)
