"""What the tests of torch share. They run in PyTorch's environment only: see test_in_environments.py beside this
folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.groups import environment_of, free_address, run_in, variables_of

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
OF_RUNS = ("torch_glue", "pytorch")


@pytest.fixture(scope="session")
def group() -> Iterator[None]:
    """A group of this process alone."""
    from jobs.runtime.torch import distributed

    distributed.start(environment_of(*OF_RUNS, "/nowhere", coordinator=free_address()))
    yield
    distributed.leave()


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Any]:
    """A run in a directory of its own, of one process."""

    def make(name: str = "run") -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        return run_in(environment_of(*OF_RUNS, tmp_path / name))

    return make


@pytest.fixture
def variables() -> Callable[..., list[dict[str, str]]]:
    """The environments of all processes of a group that shares a run directory."""

    def of_all(run_dir: Path, size: int) -> list[dict[str, str]]:
        run_dir.mkdir()
        coordinator = free_address()
        return variables_of(
            [
                environment_of(
                    *OF_RUNS, run_dir, num_processes=size, process_id=rank, coordinator=coordinator
                )
                for rank in range(size)
            ]
        )

    return of_all
