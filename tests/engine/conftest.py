"""The real Pulumi engine for tests. All of them are slow: each operation takes a second or two.

The command line is built, where it has to be, before the first test and outside of its time limit."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rehearsal.engine import Engine, Program
from rehearsal.simulated_cloud import Delays, SimulatedCloud
from tests.infra.bucket import served
from tools import pulumi_cli
from tools.pulumi_cli import PulumiCli, PulumiCliError

HERE = Path(__file__).parent
CLI: pytest.StashKey[PulumiCli | PulumiCliError] = pytest.StashKey()

# What the Automation API and the inline program's event loop leave where the engine was killed under them.
LEFT_BY_A_KILL = ("ignore:Error in event stream", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(300))  # a busy machine is three times slower at this
            for ignored in LEFT_BY_A_KILL:
                item.add_marker(pytest.mark.filterwarnings(ignored))


def pytest_collection_finish(session: pytest.Session) -> None:
    wanted = any(item.path.is_relative_to(HERE) for item in session.items)
    if wanted and not session.config.option.collectonly:
        try:
            found = pulumi_cli.find_or_build(
                os.environ, lambda line: print(line, file=sys.stderr, flush=True)
            )
        except pulumi_cli.PulumiCliError as problem:
            session.config.stash[CLI] = problem
        else:
            session.config.stash[CLI] = found


@pytest.fixture(scope="session")
def cli(pytestconfig: pytest.Config) -> PulumiCli:
    found = pytestconfig.stash[CLI]
    if isinstance(found, PulumiCliError):
        raise found
    return found


@pytest.fixture
def api() -> Iterator[SimulatedCloud]:
    """A simulated Cloud TPU API without end of capacity, a hundred times faster than its own pace."""
    with SimulatedCloud(delays=Delays().scaled(0.01)) as api:
        yield api


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Take the part of Google's, for what a stack keeps in its bucket; the URL."""
    with served() as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        yield url


EngineFactory = Callable[..., Engine]


@pytest.fixture
def new_engine(cli: PulumiCli, api: SimulatedCloud, tmp_path: Path) -> Iterator[EngineFactory]:
    """Make an engine for a program, with project and zone configured; `name` tells two stacks of one test apart."""
    with ExitStack() as engines:

        def make(
            program: Program,
            *,
            project_file: Path | None = None,
            name: str = "engine",
            plugins: Path | None = None,
        ) -> Engine:
            engine = Engine(
                folder=tmp_path / name,
                cli=cli,
                program=program,
                tpu_url=api.url,
                project_file=project_file,
                plugins=plugins,
            )
            engine.configure({"gcp:project": "my-project", "gcp:zone": "us-central1-a"})
            return engines.enter_context(engine)

        yield make
    # What a killed engine leaves of the program's event loop is collected here, where it is expected.
    gc.collect()
