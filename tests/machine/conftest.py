"""The machine that all tests of this folder share: booting it takes longer than any of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.machine.gateway import Gateway, running


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    # A short name, as the path of a socket may have 107 characters at most.
    with running(tmp_path_factory.mktemp("vm")) as gateway:
        yield gateway
