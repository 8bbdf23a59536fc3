"""A heartbeat says that a process lives and, apart from that, that it works."""

import dataclasses
import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from contracts.files import DiskFiles
from contracts.process_environment import ProcessEnvironment
from contracts.run_directory import RunDirectory
from jobs.runtime.monitoring import heartbeat as heartbeats
from jobs.runtime.monitoring.heartbeat import Heartbeat
from jobs.runtime.storage.bucket_files import BucketFiles
from tests.waiting import until


@pytest.fixture
def directory(environment: ProcessEnvironment) -> RunDirectory:
    return RunDirectory(environment.run_dir)


@pytest.fixture
def heartbeat(directory: RunDirectory, environment: ProcessEnvironment) -> Heartbeat:
    return Heartbeat(directory, environment)


def read(directory: RunDirectory) -> dict[str, Any]:
    beat = directory.read_json("heartbeats/host-1.json")
    assert beat is not None
    return beat


def test_of_several_ranks_on_a_host_the_first_speaks_and_the_last_words_of_another_are_kept_for_the_agent(
    directory: RunDirectory, environment: ProcessEnvironment, tmp_path: Path
) -> None:
    here = dataclasses.replace(environment, num_processes=4, ranks_per_host=2, control_dir=str(tmp_path))
    first = Heartbeat(directory, dataclasses.replace(here, process_id=2))
    second = Heartbeat(directory, dataclasses.replace(here, process_id=3, local_rank=1))
    for each in (first, second):
        each.start()
        each.state("joined")
    first.end("failed", "another host was lost")
    second.step(9)
    second.end("failed", "it broke", says_all=True)
    assert directory.list("heartbeats") == ["host-1.json"]
    assert (read(directory)["rank"], read(directory)["step"]) == (1, 0)
    said = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("heartbeat*.json")}
    assert {name: beat["message"] for name, beat in said.items()} == {
        "heartbeat.json": "rank 2: another host was lost",
        "heartbeat-1.json": "rank 3: it broke",
    }


def test_the_first_heartbeat_is_there_when_start_returns_and_nothing_is_written_after_the_last(
    directory: RunDirectory, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat.start()
    beat = read(directory)
    assert beat.pop("step_time") <= beat.pop("time") <= time.time()
    first = {"rank": 1, "attempt": 3, "state": "starting", "step": 0, "pid": os.getpid()}
    assert beat == {**first, "message": None, "says_all": False, "warnings": []}
    heartbeat.state("joined")
    heartbeat.step(1)  # of a process that has joined the first step says that it is stepping
    assert (read(directory)["state"], read(directory)["step"]) == ("stepping", 1)
    heartbeat.state("saving")
    heartbeat.step(2)
    assert read(directory)["state"] == "saving"
    heartbeat.end("failed", "the reason")
    until(lambda: not any(thread.name == "heartbeat" for thread in threading.enumerate()))
    assert (read(directory)["state"], read(directory)["message"]) == ("failed", "the reason")
    directory.remove("heartbeats/host-1.json")
    heartbeat._write(unless_ended=True)  # the thread's own call, come too late
    assert directory.list("heartbeats") == []


def test_a_run_directory_that_cannot_be_written_is_told_at_the_start(
    environment: ProcessEnvironment, tmp_path: Any
) -> None:
    (tmp_path / "file").write_text("")
    place = f"{tmp_path}/file/run"
    with pytest.raises(OSError, match="Not a directory"):
        Heartbeat(RunDirectory(place), dataclasses.replace(environment, run_dir=place)).start()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The control directory of a process under an agent."""
    (tmp_path / "control").mkdir()
    return tmp_path / "control"


@pytest.fixture
def supervised(environment: ProcessEnvironment, here: Path) -> ProcessEnvironment:
    return dataclasses.replace(environment, control_dir=str(here))


@pytest.fixture
def remote(environment: ProcessEnvironment, tmp_path: Path) -> RunDirectory:
    """A run directory behind a URL, as a bucket is."""
    (tmp_path / "run" / "heartbeats").mkdir(parents=True)
    return RunDirectory(f"file://{environment.run_dir}", BucketFiles())


def test_a_step_or_a_tick_is_written_by_a_thread_and_the_agent_finds_the_same_in_the_control_directory(
    directory: RunDirectory, supervised: ProcessEnvironment, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "DISK_PERIOD_S", 0.01)

    def local() -> Any:
        return json.loads((here / "heartbeat.json").read_text())

    beats = Heartbeat(directory, supervised)
    beats.start()
    assert local()["state"] == "starting"
    beats.state("stepping")
    assert local()["state"] == "stepping"
    beats.step(7)
    until(lambda: local()["step"] == read(directory)["step"] == 7)
    moved_s, written_s = read(directory)["step_time"], read(directory)["time"]
    until(lambda: read(directory)["time"] > written_s)  # it lives …
    assert read(directory)["step_time"] == moved_s  # … and does not work
    beats.tick()
    until(lambda: read(directory)["step_time"] > moved_s)
    assert read(directory)["step"] == 7
    beats.end("done")
    assert local()["state"] == "done"
    assert sorted(path.name for path in here.iterdir()) == ["heartbeat.json"]


def test_a_run_directory_that_hangs_does_not_keep_the_local_heartbeat_from_being_fresh(
    directory: RunDirectory, supervised: ProcessEnvironment, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "DISK_PERIOD_S", 0.01)
    beats = Heartbeat(directory, supervised)
    beats.start()
    goes_on, entered = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        entered.set()
        goes_on.wait(30)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "write_json", hang)
        assert entered.wait(30)
        beats.step(9)
        until(lambda: json.loads((here / "heartbeat.json").read_text())["step"] == 9)
        goes_on.set()
    beats.end("done")


def test_a_full_disk_does_not_end_the_thread_and_the_local_heartbeat_is_renewed_in_place(
    directory: RunDirectory,
    supervised: ProcessEnvironment,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(heartbeats, "DISK_PERIOD_S", 0.005)
    beats = Heartbeat(directory, supervised)
    beats.start()
    tried: list[str] = []

    def full(_: DiskFiles, path: str, _data: bytes) -> None:
        tried.append(path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(DiskFiles, "write", full)
        for step in (123456, 1):  # the second text is shorter than the first
            beats.step(step)
            beats._write_here()
            assert json.loads((here / "heartbeat.json").read_text())["step"] == step
        until(lambda: sum(path.endswith("host-1.json") for path in tried) > 3)
    beats.step(9)
    until(lambda: read(directory)["step"] == 9)
    beats.end("done")
    complaint = "heartbeat not written: [Errno 28] No space left on device\n"
    assert capsys.readouterr().out == complaint, "once, and not for each that was not written"


class Refused(Exception):
    """As a bucket's library raises: no OSError."""


def test_a_bucket_that_refuses_for_a_moment_does_not_end_the_run_and_one_that_always_does_is_told_at_once(
    remote: RunDirectory, environment: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name in ("BUCKET_PERIOD_S", "DISK_PERIOD_S"):
        monkeypatch.setattr(heartbeats, name, 0.01)
    monkeypatch.setattr("jobs.runtime.storage.bucket_files.time.sleep", lambda _: None)
    write, refusals, writers = RunDirectory.write_json, [1000], list[str]()

    def refuse(*arguments: Any) -> None:
        writers.append(threading.current_thread().name)
        refusals[0] -= 1
        if refusals[0] >= 0:
            raise Refused("503")
        write(*arguments)

    monkeypatch.setattr(RunDirectory, "write_json", refuse)
    with pytest.raises(Refused):
        Heartbeat(remote, environment).start()
    beats = Heartbeat(remote, environment)
    refusals[0] = 2
    beats.start()
    assert read(remote)["state"] == "starting"
    refusals[0] = 3
    del writers[:]
    beats.state("stepping")  # does not wait for the bucket: the thread writes it
    # A file behind a URL on a disk is not written whole, as an object in a bucket is.
    until(lambda: (remote.read_json("heartbeats/host-1.json") or {}).get("state") == "stepping")
    assert set(writers) == {"heartbeat"}
    refusals[0] = 1000
    beats.end("failed")  # what is refused is in the log
    assert "503" in capsys.readouterr().out
