"""What a host's agent cannot write into a bucket itself, a process of the job's own Python delivers for it."""

import io
import json
import os
import sys
from pathlib import Path
from unittest import mock

import pytest

from jobs.runtime.storage import deliver
from jobs.runtime.storage.bucket_files import retry
from jobs.runtime.storage.deliver import File
from tests.processes import run_program


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    (tmp_path / "bucket" / "logs" / "0").mkdir(parents=True)
    return tmp_path / "bucket"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []
    monkeypatch.setattr("jobs.runtime.storage.bucket_files.time.sleep", made.append)
    return made


def test_texts_and_files_of_this_host_arrive_under_their_names(bucket: Path, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("one\ntwo\n")
    (bucket / "result.json").write_text("the job's own")
    (bucket / "heartbeat.json").write_text("an older one")
    files = [
        {"name": "heartbeat.json", "text": "{}"},
        {"name": "logs/0/host-1.log", "path": str(tmp_path / "log")},
        {"name": "result.json", "text": "the agent's"},
        {"name": "stacks.txt", "text": "its stacks"},
    ]
    done = run_program(
        [sys.executable, "-P", "-m", "jobs.runtime.storage.deliver", f"file://{bucket}"],
        {"PATH": os.environ["PATH"], "PYTHONPATH": os.getcwd()},
        input=json.dumps({"files": files, "unless_there": ["result.json", "stacks.txt"]}),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    found = {str(path.relative_to(bucket)): path.read_text() for path in bucket.rglob("*") if path.is_file()}
    texts = {"heartbeat.json": "{}", "result.json": "the job's own", "stacks.txt": "its stacks"}
    assert found == {**texts, "logs/0/host-1.log": "one\ntwo\n"}


def test_of_a_long_file_the_last_whole_lines_are_delivered(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    content = File(name="log", path=str(log), limit_bytes=20).content()
    assert content == "line 98\nline 99\n"
    assert File(name="log", path=str(log), limit_bytes=10**6).content() == log.read_text()


@pytest.mark.usefixtures("pauses")
def test_one_file_that_cannot_be_delivered_keeps_back_no_other_and_is_said_with_exit_code_1(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [{"name": "a", "path": str(tmp_path / "missing")}, {"name": "b", "text": "arrived"}]
    monkeypatch.setattr(deliver, "signal", mock.Mock())
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"files": files})))
    assert deliver.main([f"file://{bucket}"]) == 1
    assert f"file://{bucket}/a not delivered: FileNotFoundError: " in capsys.readouterr().err
    assert (bucket / "b").read_text() == "arrived"


def test_what_is_refused_for_a_moment_is_tried_three_times_and_each_time_is_said(pauses: list[float]) -> None:
    said: list[str] = []
    answers = iter(["", "", "done", "", "", ""])

    def action() -> str:
        answer = next(answers)
        if not answer:
            raise RuntimeError("503")
        return answer

    assert retry(action, what="a file", say=said.append) == "done"
    assert pauses == [1.0, 4.0]
    assert said[0] == "a file: RuntimeError: 503; trying again in 1 s"
    with pytest.raises(RuntimeError, match="503"):
        retry(action, what="a file", say=said.append)
