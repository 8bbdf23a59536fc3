"""Four hosts with agents, all of whose processes are ended after the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.host.lifeline.hosts import Hosts


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path, tmp_path / "run")
    yield made
    made.end_all()
