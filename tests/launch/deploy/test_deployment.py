"""One host's steps: told as they end, and every way in which a host can be lost is an error that says where."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from launch.deploy.deploy import Answer, Deployment
from launch.deploy.steps import Step
from launch.hosts import HostError, LocalTransport, Show


def test_steps_of_a_host_are_told_as_they_end(tmp_path: Path) -> None:
    told: list[Answer] = []
    make = Step(name="file", check=f"test -e {tmp_path}/f", change=f"touch {tmp_path}/f", limit_s=10)
    outcome = Deployment("w-0", [make], told.append).begin(LocalTransport()).outcome()
    assert [answer.state for answer in told] == ["doing", "changed"]
    assert outcome.changed and not outcome.failed
    assert not Deployment("w-0", [make], told.append).begin(LocalTransport()).outcome().changed


class Broken:
    """A host that ends before its time, after some lines."""

    def __init__(self, data: bytes, end: int | Exception | None) -> None:
        self.data, self.end = data, end

    def stream(self, argv: Sequence[str], show: Show, *, timeout_s: float | None) -> Future[int | None]:
        future: Future[int | None] = Future()
        show("out", self.data)
        if isinstance(self.end, Exception):
            future.set_exception(self.end)
        else:
            future.set_result(self.end)
        return future


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (HostError(host="w-0", reason="connection lost"), "connection lost"),
        (OSError("broken pipe"), "broken pipe"),
        (None, "was not done within 5 s, it ended after a"),
        (127, "ended after a with exit code 127: what is this"),
    ],
)
def test_a_host_that_ends_before_its_time_has_failed_and_says_where(
    end: int | Exception | None, reason: str
) -> None:
    line = {"step": "a", "state": "ok", "message": "m", "remedy": "", "took_s": 0}
    broken: Any = Broken(json.dumps(line).encode() + b"\nwhat is this\n", end)
    steps = [Step(name="a", check="true"), Step(name="b", check="true")]
    outcome = Deployment("w-0", steps, lambda answer: None, limit_s=5).begin(broken).outcome()
    assert outcome.failed and len(outcome.answers) == 1
    assert outcome.error is not None and outcome.error.reason == reason


def test_a_host_with_an_error_is_left_alone() -> None:
    known = HostError(host="w-0", reason="not reached")
    nothing: Any = None
    outcome = Deployment("w-0", [], lambda answer: None, known).begin(nothing).outcome()
    assert outcome.error is known


def test_breaking_off_ends_what_is_under_way_on_the_host(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    started = threading.Event()
    endless = Step(name="a", check="false", change=f"echo $$ >{pid}; say on; sleep 300", limit_s=300)

    def show(answer: Answer) -> None:
        if answer.message == "on":
            started.set()

    deployment = Deployment("w-0", [endless], show).begin(LocalTransport())
    assert started.wait(30)
    deployment.end()
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid.read_text().strip()}"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
