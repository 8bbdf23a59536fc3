"""What a host's agent cannot write into a bucket itself, a process of the job's own Python delivers for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from contracts.run_directory import RunDirectory
from jobs.runtime.bucket_files import BucketFiles, retry
from jobs.runtime.deliver import File, deliver, read_request


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    (tmp_path / "bucket" / "logs" / "0").mkdir(parents=True)
    return tmp_path / "bucket"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []
    monkeypatch.setattr("jobs.runtime.bucket_files.time.sleep", made.append)
    return made


def delivered(url: str, request: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "jobs.runtime.deliver", url],
        input=json.dumps(request),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


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
    unless_there = ["result.json", "stacks.txt"]
    done = delivered(f"file://{bucket}", {"files": files, "unless_there": unless_there})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (bucket / "heartbeat.json").read_text() == "{}"
    assert (bucket / "logs/0/host-1.log").read_text() == "one\ntwo\n"
    assert (bucket / "result.json").read_text() == "the job's own"
    assert (bucket / "stacks.txt").read_text() == "its stacks"


def test_of_a_long_file_the_last_whole_lines_are_delivered(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    content = File(name="log", path=str(log), limit_bytes=20).content()
    assert content == "line 98\nline 99\n"
    assert File(name="log", path=str(log), limit_bytes=10**6).content() == log.read_text()


def test_one_file_that_cannot_be_delivered_keeps_back_no_other(
    bucket: Path, tmp_path: Path, pauses: list[float]
) -> None:
    directory = RunDirectory(f"file://{bucket}", BucketFiles())
    files = [File(name="a", path=str(tmp_path / "missing")), File(name="b", text="arrived")]
    (problem,) = deliver(directory, files)
    assert problem.startswith(f"file://{bucket}/a not delivered: FileNotFoundError: ")
    assert (bucket / "b").read_text() == "arrived"


def test_what_could_not_be_delivered_is_said_with_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "bucket").write_text("a file, and no folder")
    done = delivered(f"file://{tmp_path}/bucket", {"files": [{"name": "a", "text": ""}]})
    assert done.returncode == 1
    assert f"file://{tmp_path}/bucket/a not delivered: " in done.stderr


def test_a_request_that_is_none_is_refused() -> None:
    for wrong in ("", "[]", "{}", '{"files": [{"text": "no name"}]}'):
        with pytest.raises((ValueError, TypeError, KeyError)):
            read_request(wrong)


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


def test_delivering_loads_nothing_heavy(bucket: Path) -> None:
    program = (
        "import sys\nfrom jobs.runtime import deliver\n"
        "print(sorted({'jax', 'numpy', 'fsspec', 'gcsfs', 'tyro'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
