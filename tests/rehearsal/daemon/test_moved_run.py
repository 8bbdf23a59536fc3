"""A run that moves to a slice of another API, in a rehearsal that has both: it goes on with the same losses."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rehearsal.daemon import cli
from rehearsal.rehearse import read_losses
from tests.rehearsal.daemon.conftest import LIMIT_S, Person
from tests.rehearsal.daemon.test_rehearsal_up import LAUNCH_LIMIT_S, SIZES, run_started
from tests.waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(1800)]

RUNS = "gs://my-rehearsal-runs/runs"
STEPS = 20_000  # of 2 ms or more: it is caught in the midst of them
OPTIONS = (
    f"--steps {STEPS} --checkpoint-every 500 --log-every 20 --eval-every {STEPS} --batch-size 12 {SIZES}"
    " --eval-fraction 0.01"
)
TRAIN = f"fab train --stack rehearsal --slice old --runs {RUNS} --job flax_mlm --args '{OPTIONS}'"
ON_COMPUTE = f"--stack rehearsal --slice main --runs {RUNS}"
OLD = {"name": "old", "accelerator": "v5p-16", "capacity": "spot", "wait": "10m", "provisioning": "queued"}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, environ: Mapping[str, str]) -> Iterator[Person]:
    """Whose rehearsal has the slice main, by Compute Engine, and the slice old, by the Cloud TPU API."""
    person = Person(tmp_path_factory.mktemp("both") / "rehearsal", environ)
    try:
        person.up(cli.UpRequest(hosts=2, provisioning="compute"))
        for key, value in OLD.items():
            person.succeed(f"pulumi config set --path tpu-stack:slices[1].{key} {value} --stack rehearsal")
        person.succeed("pulumi up --yes --stack rehearsal", LAUNCH_LIMIT_S)
        for name in ("main", "old"):
            person.succeed(f"fab deploy --stack rehearsal --slice {name}", LAUNCH_LIMIT_S)
        yield person
    finally:
        cli.down(person.folder, person.said.append)


def losses(person: Person, run: str, place: Path) -> dict[int, float]:
    place.write_bytes(person.object(f"{RUNS}/{run}/metrics.jsonl") or b"")
    return read_losses(place)


def eval_loss(person: Person, run: str) -> float:
    return float(json.loads(person.object(f"{RUNS}/{run}/result.json") or b"")["eval_loss"])


def test_a_run_of_a_queued_slice_goes_on_on_a_compute_slice_with_the_same_losses(
    both: Person, tmp_path: Path
) -> None:
    undisturbed = run_started(both.succeed(TRAIN, LAUNCH_LIMIT_S))
    run = run_started(both.succeed(f"{TRAIN} --detach", LAUNCH_LIMIT_S))

    def saved() -> bool:
        status = both.type(
            "fab", "status", "--stack", "rehearsal", "--slice", "old", "--runs", RUNS, run
        ).stdout
        found = re.search(r" step (\d+)/", status)
        return found is not None and int(found[1]) > 1000

    until(saved, LAUNCH_LIMIT_S)
    refused = both.type("fab", "train", *ON_COMPUTE.split(), "--resume", run)
    assert refused.returncode == 2 and "It is on the slice old (queued-resource" in refused.stderr, refused
    waits = both.succeed(f"fab recover {ON_COMPUTE} {run}")
    assert "there is nothing to recover. It is on the slice old (queued-resource" in waits

    both.succeed("pulumi config rm --path tpu-stack:slices[1] --stack rehearsal")
    both.succeed("pulumi up --yes --stack rehearsal", LAUNCH_LIMIT_S)
    recovered = ""

    def is_recovered() -> bool:
        nonlocal recovered
        recovered = both.succeed(f"fab recover {ON_COMPUTE} {run}", LAUNCH_LIMIT_S)
        return "nothing to recover" not in recovered

    until(is_recovered, LIMIT_S)
    assert "is done" in recovered, recovered

    described = json.loads(both.object(f"{RUNS}/{run}/run.json") or b"")
    assert [host["name"] for host in described["hosts"]] == [
        f"tpu-stack-rehearsal-main-w-00{number}" for number in (1, 2)
    ]
    assert len(described["attempts"]) == 2
    log = both.object(f"{RUNS}/{run}/logs/1/host-0.log") or b""
    assert b"resumed after step " in log
    right = losses(both, undisturbed, tmp_path / "undisturbed.jsonl")
    assert max(right) == STEPS and losses(both, run, tmp_path / "moved.jsonl") == right
    assert eval_loss(both, run) == eval_loss(both, undisturbed)
