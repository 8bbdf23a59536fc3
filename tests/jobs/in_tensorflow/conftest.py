"""What the tests of TensorFlow share, in whose environment they run: see test_in_environments.py beside this folder."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.groups import environment_of, run_in

collect_ignore_glob = [] if importlib.util.find_spec("tf_keras") else ["test_*.py"]
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "1"}


@pytest.fixture(scope="session")
def group() -> None:
    """A group of this process alone."""
    from jobs.runtime.tensorflow import distributed

    distributed.start(environment_of("tf_images", "tensorflow", "/nowhere"))


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Any]:
    """A run of one process, in a directory of its own: a folder, or a URL such as memory://run."""

    def make(name: str = "run", *, job: str = "tf_images") -> Any:
        place: Path | str = name if "://" in name else tmp_path / name
        if isinstance(place, Path):
            place.mkdir(exist_ok=True)
        return run_in(environment_of(job, "tensorflow", place))

    return make
