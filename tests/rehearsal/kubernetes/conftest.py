"""An API server, etcd and JobSet's controller for a whole session of tests, as processes of this machine."""

import os
from collections.abc import Iterator

import pytest

from rehearsal.kubernetes.control_plane import TEST_PROGRAMS, find_or_build
from tests.control_plane import LocalControlPlane


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalControlPlane]:
    folder = tmp_path_factory.mktemp("kubernetes") / "control-plane"
    programs = find_or_build(os.environ, print, TEST_PROGRAMS)
    with LocalControlPlane(folder=folder, programs=programs, added=["jobset"]) as found:
        yield found
