"""A run that never ran, written as its directory tells it, and agents that answer what a test says."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from contracts.run_directory import RunDirectory
from jobs.flax_mlm import METRICS
from jobs.runtime.monitoring.metric_definitions import as_json
from jobs.runtime.storage.cache import user_cache_dir
from launch import runs
from launch.hosts import Agent, Completed
from launch.runs import Run

STARTED = "2020-11-20T21:45:00Z"
RUN_ID = "flax_mlm-20261120-214500-abcd"


@dataclass(frozen=True, eq=False)
class Answering:
    """A host whose agent answers with what `answer` makes of a verb and its request; what was asked is kept."""

    answer: Callable[[str, dict[str, Any]], Mapping[str, Any] | Completed]
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    knows_all: bool = False
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4))

    def ask(self, verb: str, request: str, *, timeout_s: float) -> Future[Completed]:
        return self.pool.submit(self._answered, verb, json.loads(request))

    def _answered(self, verb: str, request: dict[str, Any]) -> Completed:
        self.asked.append((verb, request))
        answer = self.answer(verb, request)
        if isinstance(answer, Completed):
            return answer
        return Completed(exit_code=0, stdout=json.dumps({"ok": True, **answer}), stderr="")


@pytest.fixture
def make_agent() -> Callable[..., Agent]:
    def make(answer: Callable[[str, dict[str, Any]], Any], host: str = "h", root: str = "/agent") -> Agent:
        return Agent(host=host, link=Answering(answer), root=root)

    return make


@pytest.fixture
def beat() -> Callable[..., dict[str, Any]]:
    """One heartbeat."""

    def make(state: str, *, rank: int = 0, attempt: int = 0, step: int = 0, **more: Any) -> dict[str, Any]:
        fresh = {"rank": rank, "attempt": attempt, "state": state, "step": step, "time": 0.0}
        return {**fresh, "step_time": 0.0, "pid": 1, "message": None, **more}

    return make


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's runs lie; its cache lies beside it."""
    monkeypatch.setenv("TPU_STACK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "runs"


@pytest.fixture
def write_run(runs_dir: Path) -> Callable[..., Run]:
    """Writes the directory of a run of two processes, and reads it as the launching side does."""

    def write(
        run_id: str = RUN_ID,
        *,
        result: Mapping[str, Any] | None = None,
        beats: Sequence[Mapping[str, Any] | None] = (),
        metrics: Sequence[Mapping[str, Any]] = (),
        **changed: Any,
    ) -> Run:
        directory = RunDirectory(str(runs_dir / run_id))
        attempt = {
            "attempt": 0,
            "started": STARTED,
            "processes": 2,
            "coordinator": "127.0.0.1:1",
            "outcome": None,
        }
        described = {
            "version": 1,
            "run_id": run_id,
            "name": None,
            "job": "flax_mlm",
            "platform": "cpu",
            "runtime": "bare",
            "image": None,
            "args": [],
            "config": {"steps": 100},
            "metric_definitions": as_json(METRICS),
            "hosts": [{"index": index, "name": f"h/{index}", "address": "127.0.0.1"} for index in range(2)],
            "created": STARTED,
            "cwd": "/",
            "cache_dir": str(user_cache_dir(os.environ)),
            "attempts": [attempt],
        }
        directory.write_json("run.json", {**described, **changed})
        if result is not None:
            directory.write_json("result.json", {"attempt": 0, **result})
        for rank, beat in enumerate(beats):
            if beat is not None:
                directory.write_json(f"heartbeats/host-{rank}.json", beat)
        if metrics:
            directory.write_text("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in metrics))
        run = runs.read(directory)
        assert run is not None
        return run

    return write


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Puts a program of a test's own first on PATH: its name, and its text for sh or with a first line of its own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    def write(name: str, text: str) -> Path:
        path = folder / name
        path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    return write
