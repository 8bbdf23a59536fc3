"""What the tests of torch share. They run in PyTorch's environment only: see test_in_torch.py beside this folder."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contracts.process import ProcessEnvironment
from contracts.run_directory import RunDirectory

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture(scope="session")
def group() -> Iterator[None]:
    """A group of this process alone."""
    from jobs.runtime.torch import distributed

    distributed.start(environment(Path("/nowhere"), coordinator=_coordinator()))
    yield
    distributed.leave()


def _coordinator() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def environment(run_dir: Path, **changed: Any) -> ProcessEnvironment:
    fields: dict[str, Any] = {
        "run_id": "torch_glue-20261122-200000-abcd",
        "run_dir": str(run_dir),
        "job": "torch_glue",
        "framework": "pytorch",
        "attempt": 0,
        "num_processes": 1,
        "process_id": 0,
        "coordinator": "127.0.0.1:1",
        "platform": "cpu",
        "cache_dir": str(run_dir / "cache"),
        "local_devices": None,
        "peak_flops_per_s": None,
        "control_dir": None,
    }
    return ProcessEnvironment(**{**fields, **changed})


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Any]:
    """A run in a directory of its own, of one process."""
    from jobs.runtime.heartbeat import Heartbeat
    from jobs.runtime.process import Run

    def make(name: str = "run") -> Run:
        mine = environment(tmp_path / name)
        (tmp_path / name).mkdir(exist_ok=True)
        directory = RunDirectory(mine.run_dir)
        return Run(environment=mine, directory=directory, heartbeat=Heartbeat(directory, mine))

    return make


@pytest.fixture
def variables() -> Callable[..., list[dict[str, str]]]:
    """The environments of all processes of a group that shares a run directory."""

    def of_all(run_dir: Path, size: int) -> list[dict[str, str]]:
        run_dir.mkdir()
        coordinator = _coordinator()
        return [
            {
                **os.environ,
                "PYTHONPATH": os.getcwd(),
                "OMP_NUM_THREADS": "1",
                **environment(
                    run_dir, num_processes=size, process_id=rank, coordinator=coordinator
                ).variables(),
            }
            for rank in range(size)
        ]

    return of_all
