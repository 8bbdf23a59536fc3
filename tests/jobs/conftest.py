"""What the tests of jobs share: the smallest model that has every part."""

from pathlib import Path

import pytest

from contracts.process_environment import ProcessEnvironment
from jobs.flax_mlm.config import Config
from jobs.flax_mlm.tokenizer import TokenizerFacts
from tests.jobs.groups import environment_of
from tests.jobs.samples import FACTS


@pytest.fixture(scope="session")
def facts() -> TokenizerFacts:
    return FACTS


@pytest.fixture(scope="session")
def config() -> Config:
    return Config(
        layers=2,
        width=16,
        heads=4,
        ff_width=24,
        max_positions=16,
        sequence_length=12,
        batch_size=4,
        steps=10,
        dtype="float32",
    )


@pytest.fixture
def environment(tmp_path: Path) -> ProcessEnvironment:
    second = {"attempt": 3, "num_processes": 2, "process_id": 1, "coordinator": "127.0.0.1:4000"}
    cache_dir = str(tmp_path / "cache")
    return environment_of("flax_mlm", "jax", tmp_path / "run", cache_dir=cache_dir, local_devices=1, **second)
