"""What a supervisor says of a run arrives where the run directory is, or is noted and ends nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from host.agent import run_files
from host.agent.run_files import RunFiles
from tests.host.conftest import until

CHECKOUT = Path(__file__).parents[3]


def request(tmp_path: Path, **fields: Any) -> dict[str, Any]:
    """The part of a start request that says where the files of a run are: behind a URL, as in a bucket."""
    bucket = tmp_path / "bucket"
    (bucket / "logs" / "0").mkdir(parents=True)
    return {
        "run_dir": None,
        "env": {"RUN_DIR": f"file://{bucket}", "PYTHONPATH": str(CHECKOUT)},
        "argv": [sys.executable],
        "cwd": str(tmp_path),
        "log_path": str(tmp_path / "log"),
        "attempt": 0,
        "process_id": 1,
        "container": None,
        **fields,
    }


def test_a_log_is_delivered_to_a_bucket_as_long_as_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "LOG_PERIOD_S", 0.05)
    files = RunFiles(request(tmp_path))
    log, delivered = tmp_path / "log", tmp_path / "bucket/logs/0/host-1.log"
    log.write_text("one\n")
    files.keep_log()
    until(lambda: delivered.exists() and delivered.read_text() == "one\n")
    delivered.unlink()
    with log.open("a") as file:
        file.write("two\n")
    until(lambda: delivered.exists() and delivered.read_text() == "one\ntwo\n")
    files.end_log()


def test_all_that_is_left_to_say_goes_to_a_bucket_in_one_delivery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, starts = subprocess.run, []

    def counted(*given: Any, **more: Any) -> Any:
        starts.append(given)
        return run(*given, **more)

    monkeypatch.setattr(subprocess, "run", counted)
    (tmp_path / "log").write_text("one\n")
    asked = request(tmp_path)
    (tmp_path / "bucket" / "result.json").write_text("the job's own")
    RunFiles(asked).put({"beat.json": "{}"}, {"result.json": "the agent's", "first.json": "{}"})
    assert len(starts) == 1
    texts = {path.name: path.read_text() for path in (tmp_path / "bucket").rglob("*.*")}
    assert texts == {
        "beat.json": "{}",
        "result.json": "the job's own",
        "first.json": "{}",
        "host-1.log": "one\n",
    }


def test_on_a_disk_files_are_written_whole_and_what_is_there_once_stays(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    files = RunFiles(request(tmp_path, run_dir=str(run_dir)))
    files.put({"stacks/0/host-1.txt": "first"}, {"result.json": "first"})
    files.put({"stacks/0/host-1.txt": "second"}, {"result.json": "second"})
    assert (run_dir / "stacks/0/host-1.txt").read_text() == "second"
    assert (run_dir / "result.json").read_text() == "first"
    assert sorted(path.name for path in run_dir.rglob(".*")) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"argv": ["/no/such/python"]},
        {"env": {"RUN_DIR": "nowhere://x", "PYTHONPATH": str(CHECKOUT)}},
        {"run_dir": "/proc/no/such/place"},
    ],
)
def test_what_cannot_be_written_is_noted_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: dict[str, Any]
) -> None:
    RunFiles(request(tmp_path, **wrong)).put({"beat.json": "{}"}, {"result.json": "{}"})
    assert capsys.readouterr().err


def test_without_a_run_directory_nothing_is_written_and_nothing_is_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunFiles(request(tmp_path, env={})).put({"beat.json": "{}"}, {"result.json": "{}"})
    assert capsys.readouterr().err == ""
