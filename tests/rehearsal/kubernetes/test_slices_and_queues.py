"""Runs on several slices and in queues, by JobSet's and Kueue's own controllers: what strikes one of them ends with the
losses of an undisturbed one or with a reason, and nothing of it is left."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rehearsal.daemon import cli
from tests.rehearsal.daemon.conftest import LIMIT_S, Person, environ
from tests.rehearsal.daemon.test_keeper import losses_in_the_bucket
from tests.rehearsal.daemon.test_rehearsal_up import LAUNCH_LIMIT_S, run_started
from tests.rehearsal.kubernetes.lab import (
    LOOK_S,
    TRAIN,
    Cluster,
    begun,
    described,
    options,
    until_step,
    up,
)
from tests.waiting import until

__all__ = ["environ"]
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

QUEUED = f"{TRAIN} --queue team --args '{options(10_000)}'"
FAILS = """
import os, sys, time
time.sleep(3)
sys.exit("no such column: label" if os.environ["RANK"] == "1" else time.sleep(600))
"""
WAITS = "the queue team has not admitted it"


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory, environ: Mapping[str, str]) -> Iterator[Person]:
    folder = tmp_path_factory.mktemp("slices") / "rehearsal"
    with up(
        Person(folder, environ), cli.UpRequest(hosts=2, kind="kubernetes", slices=2, queue="team")
    ) as found:
        yield found


@pytest.fixture(scope="module")
def cluster(person: Person) -> Iterator[Cluster]:
    made = Cluster(person)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_left(cluster: Cluster) -> Iterator[None]:
    """Nothing of a run goes on after its end, nor holds chips of the queue."""
    yield
    until(lambda: cluster.left() == [], LIMIT_S, pause_s=LOOK_S)
    until(lambda: cluster.chips_in_use() == "0", LIMIT_S, pause_s=LOOK_S)


def test_a_run_on_two_slices_starts_again_whole_and_a_second_one_waits_in_the_queue(
    person: Person, cluster: Cluster, tmp_path: Path
) -> None:
    undisturbed = run_started(person.succeed(QUEUED, LAUNCH_LIMIT_S))
    right = losses_in_the_bucket(person, undisturbed)
    run = run_started(person.succeed(f"{QUEUED} --detach", LAUNCH_LIMIT_S))
    refused = person.type("bash", "-c", f"{QUEUED} --wait 3", limit_s=LAUNCH_LIMIT_S)
    assert refused.returncode == 2 and "2 of 2 pods could not be placed within 3 s" in refused.stderr
    assert WAITS in refused.stderr
    until_step(person, 200)
    log = tmp_path / "second.log"
    with begun(person, QUEUED, log) as second:
        until(lambda: WAITS in log.read_text(), LIMIT_S, pause_s=LOOK_S)
        person.act("kill-pod", "1")
        until(lambda: described(person, run)["state"] == "done", LAUNCH_LIMIT_S, pause_s=LOOK_S)
        assert described(person, run)["attempt"] > 0
        assert second.wait(LAUNCH_LIMIT_S) == 0, log.read_text()
    assert losses_in_the_bucket(person, run) == right
    assert losses_in_the_bucket(person, run_started(log.read_text())) == right


def test_a_program_error_in_any_slice_ends_the_run_with_its_reason(person: Person, tmp_path: Path) -> None:
    (tmp_path / "fails").mkdir()
    (tmp_path / "fails" / "fails.py").write_text(FAILS)
    line = f"fab train --stack rehearsal --queue team --workdir {tmp_path}/fails -- python fails.py"
    done = person.type(*line.split(), limit_s=LAUNCH_LIMIT_S)
    run = run_started(done.stdout)
    assert done.returncode == 1 and f"{run} failed" in done.stdout, done.stdout + done.stderr
    assert "no such column: label" in done.stdout
    assert described(person, run)["attempt"] <= 1, "it may have been started again once"


def test_a_run_on_two_slices_is_stopped_and_goes_on_where_it_was(person: Person) -> None:
    run = run_started(person.succeed(f"{QUEUED} --detach", LAUNCH_LIMIT_S))
    until_step(person, 400)
    stopped = person.succeed("fab stop --stack rehearsal", LAUNCH_LIMIT_S)
    assert f"{run} was stopped" in stopped and re.search(r"from step \d{3}", stopped), stopped
    assert f"{run} is done" in person.succeed(f"fab recover --stack rehearsal --run {run}", LAUNCH_LIMIT_S)
