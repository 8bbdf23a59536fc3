"""A simulator on a frozen clock with our provider in front of it, and a stack on top."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rehearsal.simulated_cloud import Clock, SimulatedCloud
from tests.infra.cloud_tpu.lab import Cloud, Stack

CloudFactory = Callable[..., Cloud]


@pytest.fixture
def new_cloud() -> Iterator[CloudFactory]:
    """Make a cloud whose simulator has these arguments."""
    made: list[Cloud] = []

    def make(**arguments: Any) -> Cloud:
        clock = Clock(frozen_at=1_800_000_000.0)
        api = SimulatedCloud(clock=clock, **arguments)
        api.__enter__()
        made.append(Cloud(api, clock))
        return made[-1]

    yield make
    for cloud in made:
        cloud.client.close()
        cloud.api.__exit__(None, None, None)


@pytest.fixture
def cloud(new_cloud: CloudFactory) -> Cloud:
    """One with no end of capacity."""
    return new_cloud()


@pytest.fixture
def stack(cloud: Cloud) -> Stack:
    return Stack(cloud=cloud)
