"""Files of a run are seen whole or not at all, on a disk and in a bucket alike."""

import errno
import os
import stat
import tempfile
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import atomic, run_directory
from contracts.run_directory import RunDirectory
from jobs.runtime.storage.bucket_files import files_of


@pytest.fixture(params=["disk", "bucket"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> RunDirectory:
    if request.param == "disk":
        return RunDirectory(f"{tmp_path}/runs/one/")
    url = f"memory://bucket-{uuid.uuid4().hex}/runs/one"
    return RunDirectory(url, files_of(url))


def test_what_is_written_is_read_back_listed_in_order_moved_and_removed(directory: RunDirectory) -> None:
    assert (directory.read_text("nothing"), directory.read_json("nothing")) == (None, None)
    assert (directory.list("nothing"), directory.read_metrics()) == ([], [])
    directory.remove("nothing")
    directory.write_text("notes/a.txt", "é\n")
    directory.write_json(run_directory.RUN, {"steps": [1, None]})
    assert directory.read_text("notes/a.txt") == "é\n"
    assert directory.read_json(run_directory.RUN) == {"steps": [1, None]}
    directory.write_text("notes/a.txt", "short")
    assert directory.read_text("notes/a.txt") == "short"
    for name in ("10", "9", "2"):
        directory.write_text(f"checkpoints/{name}/state", name)
    assert directory.list("checkpoints") == ["10", "2", "9"]
    directory.remove("checkpoints/9/state")
    assert directory.read_text("checkpoints/9/state") is None
    files_of(directory.url).move_folder(directory.path("checkpoints/2"), directory.path("torn/2-1"))
    assert directory.read_text("torn/2-1/state") == "2"
    assert directory.read_text("checkpoints/2/state") is None


def test_a_file_where_the_run_directory_should_be_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "flax_mlm-20261120-214500-abcd").write_text("not a directory")
    directory = RunDirectory(str(tmp_path / "flax_mlm-20261120-214500-abcd"))
    assert directory.read_json(run_directory.RUN) is None
    assert directory.list(run_directory.CHECKPOINTS) == []


def test_what_holds_no_json_object_is_none_and_a_torn_metric_is_left_out(directory: RunDirectory) -> None:
    for text in ("", '{"a": 1', "[1]", "null"):
        directory.write_text(run_directory.RESULT, text)
        assert directory.read_json(run_directory.RESULT) is None
    directory.write_text(run_directory.METRICS, '{"step": 1}\n{"step": 2, "lo\n\n7\n{"step": 3}\n{"step":')
    assert directory.read_metrics() == [{"step": 1}, {"step": 3}]


def test_a_follower_reads_each_metric_once_and_a_shorter_file_anew(directory: RunDirectory) -> None:
    assert directory.read_new_metrics(0) == ([], 0)
    first, second = '{"step": 1}\n', '{"step": 2}\n'
    directory.write_text(run_directory.METRICS, first + second[:5])
    lines, offset = directory.read_new_metrics(0)
    assert lines == [{"step": 1}]
    directory.write_text(run_directory.METRICS, first + second)
    lines, offset = directory.read_new_metrics(offset)
    assert lines == [{"step": 2}]
    assert directory.read_new_metrics(offset) == ([], offset)
    directory.write_text(run_directory.METRICS, first)  # by a resumed attempt
    assert directory.read_new_metrics(offset)[0] == [{"step": 1}]
    text = "".join(f'{{"step": {step}}}\n' for step in range(100))
    directory.write_text(run_directory.METRICS, text)
    # From the end, without the line in which that begins.
    assert directory.read_new_metrics(-30) == ([{"step": 98}, {"step": 99}], len(text))


def test_a_folder_that_is_put_replaces_the_one_before(directory: RunDirectory, tmp_path: Path) -> None:
    for attempt, names in enumerate((("a", "b"), ("b", "c"))):
        folder = tmp_path / f"export-{attempt}"
        (folder / "inner").mkdir(parents=True)
        for name in names:
            (folder / name).write_text(f"{name}{attempt}")
            (folder / "inner" / name).write_text(f"{name}{attempt}")
        files_of(directory.url).put_folder(str(folder), directory.path("export"))
    assert directory.list("export") == ["b", "c", "inner"]
    assert directory.list("export/inner") == ["b", "c"]
    assert directory.read_text("export/b") == "b1"


def test_whoever_may_read_a_run_may_read_a_folder_that_was_made_for_its_owner_only(tmp_path: Path) -> None:
    made = Path(tempfile.mkdtemp(dir=tmp_path))
    (made / "inner").mkdir(mode=0o700)
    (made / "inner" / "weights").touch(mode=0o600)
    before = os.umask(0o022)
    try:
        files_of("x").put_folder(str(made), f"{tmp_path}/run/export")
    finally:
        os.umask(before)
    export = tmp_path / "run" / "export"
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (export, *sorted(export.rglob("*")))]
    assert modes == [0o755, 0o755, 0o644]


def test_a_failed_write_leaves_the_old_file_and_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(str(tmp_path))
    directory.write_json(run_directory.RESULT, {"outcome": "done"})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        directory.write_json(run_directory.RESULT, {"outcome": "failed"})
    assert directory.read_json(run_directory.RESULT) == {"outcome": "done"}
    assert os.listdir(tmp_path) == ["result.json"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    directory, ended, seen = RunDirectory(str(tmp_path)), threading.Event(), []
    directory.write_json("beat", {"text": ""})

    def read() -> None:
        while not ended.is_set():
            seen.append(directory.read_json("beat"))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        directory.write_json("beat", {"text": str(number) * 20_000})
    ended.set()
    reader.join()
    assert seen
    assert None not in seen


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_who_may_read_what_a_run_wrote_is_what_the_umask_says(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        RunDirectory(str(tmp_path)).write_text("result.json", "{}")
        atomic.write(tmp_path / "exact", "", mode=0o664)
    finally:
        os.umask(before)
    assert (tmp_path / "result.json").stat().st_mode & 0o777 == mode
    assert (tmp_path / "exact").stat().st_mode & 0o777 == 0o664


BEAT = {
    "rank": st.integers(0, 9),
    "time": st.integers(0, 5),
    "state": st.sampled_from(["failed", "stepping"]),
    "exit_code": st.sampled_from([None, 1, 2, 76]),
}


@given(st.lists(st.fixed_dictionaries(BEAT), max_size=6))
def test_the_culprit_is_the_first_to_fail_by_itself(beats: list[dict[str, Any]]) -> None:
    blamed = run_directory.first_failure(beats)
    failed = [beat for beat in beats if beat["state"] == "failed"]
    assert (blamed is None) == (not failed)
    if blamed is not None:
        rivals = [beat for beat in failed if beat["exit_code"] != 76] or failed
        assert blamed in rivals
        assert all(blamed["time"] <= beat["time"] for beat in rivals)
