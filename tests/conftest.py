"""What holds for every test: how hypothesis looks for examples, that Ctrl-C is heard, which devices JAX finds, in which
order files run, and where the caches are."""

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

# A shell starts its background jobs with Ctrl-C ignored, nohup its program with SIGHUP ignored, and what a test
# starts inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# No deadline: on a machine shared with others a slow example is no bug. The same examples every time, so that
# a red test is red for the next person too; `pytest --hypothesis-profile explore` looks for new ones.
settings.register_profile("house", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("house")


@pytest.fixture(scope="session")
def two_devices() -> None:
    """Asked for by every test that uses JAX, before its backend starts: the number of devices is fixed then."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    # Tests compile much and compute little. The runs that they start are compiled as a user's are.
    jax.config.update("jax_disable_most_optimizations", True)
    assert jax.device_count() == 2


GROUPS = {"test_readme.py": -2.0, "rehearsal": -1.0, "runs": 0.4}
"""What shares something expensive, so that one worker of pytest-xdist runs each of them, and its place among the files,
from 0 to 1: each takes all processors for minutes, and no three of them should at once. Elsewhere the tests of a file
stay together."""


def group_of(nodeid: str) -> str:
    path = nodeid.partition("::")[0]
    part = path.split("/")[1]
    return part if part in GROUPS else path


class Groups(LoadScopeScheduling):  # type: ignore[misc]  # its package says nothing of types
    """What pytest-xdist calls a scope, all of whose tests one worker runs, is a group."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    return Groups(config, log)


GO_BUILDS = {"cli", "control_plane", "plane"}
"""Fixtures that need a program which no package carries and Go builds in minutes: Pulumi's engine, Kubernetes."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if GO_BUILDS.intersection(getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.slow)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that compute with JAX take all processors and most others wait: both are spread evenly, JAX's a little
    earlier, as theirs are the longest."""
    starts_jax = {
        group_of(item.nodeid) for item in items if "two_devices" in getattr(item, "fixturenames", ())
    }
    files = [each for each in dict.fromkeys(group_of(item.nodeid) for item in items) if each not in GROUPS]
    place = dict(GROUPS)
    for length, several in (
        (0.8, [file for file in files if file in starts_jax]),
        (1.0, [file for file in files if file not in starts_jax]),
    ):
        place |= {file: length * index / len(several) for index, file in enumerate(several)}
    items.sort(key=lambda item: place[group_of(item.nodeid)])


def _cache_places() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in ("HOME", "XDG_CACHE_HOME")}


CACHE_PLACES = _cache_places()


@pytest.fixture(scope="module", autouse=True)
def _what_is_made_once_for_this_machine_is_found_by_all_modules() -> None:
    """A module that left another cache would have environments and programs made again, minutes each."""
    assert _cache_places() == CACHE_PLACES, (
        "a fixture of a whole session has changed these; let it end sooner"
    )


@pytest.fixture(scope="session")
def _started_in() -> list[str]:
    """The test after which JAX had been started."""
    return []


@pytest.fixture(autouse=True)
def _only_who_asks_starts_jax(request: pytest.FixtureRequest, _started_in: list[str]) -> Iterator[None]:
    yield
    # JAX has no public question that does not start it.
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge and bridge.backends_are_initialized() and not _started_in:
        _started_in.append(request.node.nodeid)
        if "two_devices" not in request.fixturenames:
            pytest.fail("this test starts JAX and does not ask for two_devices")
