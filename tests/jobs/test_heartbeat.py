"""A heartbeat says that a process lives and, apart from that, that it works."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from jobs.runtime import heartbeat as heartbeats
from jobs.runtime.environment import ProcessEnvironment
from jobs.runtime.heartbeat import Heartbeat
from jobs.runtime.run_directory import RunDirectory


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


def until(condition: Callable[[], bool], limit_s: float = 30) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.005)


def test_the_first_heartbeat_is_there_when_start_returns(
    directory: RunDirectory, heartbeat: Heartbeat
) -> None:
    heartbeat.start()
    beat = read(directory)
    heartbeat.end("done")
    assert beat.pop("step_time") <= beat.pop("time") <= time.time()
    assert beat == {
        "rank": 1,
        "attempt": 3,
        "state": "starting",
        "step": 0,
        "pid": os.getpid(),
        "message": None,
    }


def test_a_change_of_state_is_written_at_once_and_the_same_state_not_again(
    directory: RunDirectory, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[tuple[str, str | None]] = []
    monkeypatch.setattr(
        RunDirectory, "write_json", lambda _, name, value: states.append((value["state"], value["message"]))
    )
    for state in ("joined", "joined", "stepping"):
        heartbeat.state(state)
    heartbeat.say("tokenising")
    heartbeat.say("tokenising")
    heartbeat.state("stepping")
    assert states == [("joined", None), ("stepping", None), ("stepping", "tokenising"), ("stepping", None)]


def test_a_step_is_written_by_the_thread_and_its_time_is_when_the_step_moved(
    directory: RunDirectory, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "DISK_PERIOD_S", 0.01)
    heartbeat.start()
    heartbeat.step(7)
    until(lambda: read(directory)["step"] == 7)
    moved_s, written_s = read(directory)["step_time"], read(directory)["time"]
    until(lambda: read(directory)["time"] > written_s)  # it lives …
    assert read(directory)["step_time"] == moved_s  # … and does not work
    heartbeat.end("done")


def test_nothing_is_written_after_the_end(
    directory: RunDirectory, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "DISK_PERIOD_S", 0.001)
    heartbeat.start()
    heartbeat.end("failed", "the reason")
    until(lambda: not any(thread.name == "heartbeat" for thread in threading.enumerate()))
    assert (read(directory)["state"], read(directory)["message"]) == ("failed", "the reason")
    directory.remove("heartbeats/host-1.json")
    heartbeat._write(unless_ended=True)  # the thread's own call, come too late
    assert directory.list("heartbeats") == []


def test_a_full_disk_does_not_end_the_thread(
    directory: RunDirectory,
    heartbeat: Heartbeat,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(heartbeats, "DISK_PERIOD_S", 0.005)
    heartbeat.start()
    tried: list[str] = []
    write_json = RunDirectory.write_json

    def full(_: RunDirectory, name: str, value: Mapping[str, Any]) -> None:
        tried.append(name)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "write_json", full)
        until(lambda: len(tried) > 2)
    assert RunDirectory.write_json is write_json
    heartbeat.step(9)
    until(lambda: read(directory)["step"] == 9)
    heartbeat.end("done")
    assert "heartbeat not written: [Errno 28] No space left on device" in capsys.readouterr().out


def test_a_run_directory_that_cannot_be_written_is_told_at_the_start(
    environment: ProcessEnvironment, tmp_path: Any
) -> None:
    (tmp_path / "file").write_text("")
    place = f"{tmp_path}/file/run"
    with pytest.raises(OSError, match="Not a directory"):
        Heartbeat(RunDirectory(place), dataclasses.replace(environment, run_dir=place)).start()
