"""The runs that the tests here share, and a place for each test's own."""

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.runs import Run
from tests.runs.lab import CHECKOUT, CHECKPOINT_EVERY, STEPS, Lab, Losses, losses, saved_steps

DOCUMENTS = 60


def write_corpus(path: Path) -> None:
    """Documents in which each word tells the next: something to learn, the same on every machine."""
    rng = random.Random(7)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(40)]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(DOCUMENTS):
            place, text = rng.randrange(40), []
            for _ in range(120):
                text.append(words[place])
                place = (place * 7 + rng.choice((1, 1, 1, 5))) % 40
            file.write(json.dumps({"text": " ".join(text)}) + "\n")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus and the cache of all tests here: it is tokenised once."""
    folder = tmp_path_factory.mktemp("shared")
    write_corpus(folder / "corpus.jsonl")
    return folder


@pytest.fixture
def lab(shared: Path, tmp_path: Path) -> Iterator[Lab]:
    """A place for runs of its own; what was started there is gone afterwards."""
    made = Lab(tmp_path / "runs", shared / "cache", shared / "corpus.jsonl")
    try:
        yield made
    finally:
        made.end_all()


@pytest.fixture(scope="session")
def shared_lab(shared: Path) -> Iterator[Lab]:
    made = Lab(shared / "runs", shared / "cache", shared / "corpus.jsonl")
    try:
        yield made
    finally:
        made.end_all()


def git_status() -> str:
    """But for the caches of `make check`, which CI runs beside the tests."""
    caches = [f":!.{tool}_cache" for tool in ("mypy", "ruff", "import_linter")]
    command = ["git", "-C", str(CHECKOUT), "status", "--porcelain", "--ignored", "--", ".", *caches]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this is no git checkout: {error}")


@pytest.fixture(scope="session")
def undisturbed(shared_lab: Lab) -> tuple[Run, str, str]:
    """A run of 2 processes, and what git said of the checkout before and after it."""
    before = git_status()
    run = shared_lab.finish(shared_lab.launch())
    return run, before, git_status()


@pytest.fixture(scope="session")
def checkout(undisturbed: tuple[Run, str, str]) -> tuple[str, str]:
    """What git said of the checkout before and after a run."""
    return undisturbed[1:]


@pytest.fixture(scope="session")
def reference(undisturbed: tuple[Run, str, str]) -> Run:
    """A run that nobody disturbed, which all others are to equal."""
    return undisturbed[0]


@pytest.fixture(scope="session")
def right_losses(reference: Run) -> Losses:
    """What every step's loss is to be, whatever happens on the way."""
    return losses(reference)


@pytest.fixture(scope="session")
def lost_run(shared_lab: Lab) -> Run:
    """A run of 2 processes whose machine lost its power at some step; to be copied, not to be resumed."""
    seed = random.randrange(10**6)
    step = random.Random(seed).randrange(2 * CHECKPOINT_EVERY + 3, STEPS // 2)
    print(f"seed {seed}: the power goes at step {step}")
    run = shared_lab.launch()
    shared_lab.reach(run, step)
    shared_lab.until(lambda: len(saved_steps(run)) >= 2, "two checkpoints are complete")
    shared_lab.cut_power(run)
    return shared_lab.finish(run)
