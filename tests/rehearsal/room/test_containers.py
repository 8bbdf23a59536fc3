"""The image that was built here is pushed, pulled by digest on every host, and trains there."""

from __future__ import annotations

import json
import re

import pytest

from rehearsal import state
from tests.rehearsal.room.person import Person
from tests.rehearsal.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
]  # where the image has to be built, 10 minutes go there

BUILD_LIMIT_S = 1800.0
LAUNCH_LIMIT_S = 600.0  # with the pull of the image, on a computer that is shared with others
STEPS = 1500
# A model so small that compiling it is most of its start, and so many steps that it is caught in the midst of them.
SIZES = (
    "--layers 1 --width 32 --heads 2 --ff-width 64 --vocab-size 300 --max-positions 32 --sequence-length 16"
)
OPTIONS = f"--steps {STEPS} --checkpoint-every 50 --log-every 10 --eval-every {STEPS} --batch-size 12 {SIZES}"


def with_an_image(person: Person) -> str:
    """Brings up two hosts whose inventory names the image; its reference."""
    person.up(hosts=2, kind="docker")
    person.succeed("fab", "build", "--framework", "jax", "--platform", "cpu", limit_s=BUILD_LIMIT_S)
    pushed = person.succeed(
        *("fab", "push", "--stack", "rehearsal", "--framework", "jax", "--platform", "cpu"),
        limit_s=LAUNCH_LIMIT_S,
    )
    person.succeed("pulumi", "up", "--yes", "--stack", "rehearsal")
    person.succeed("fab", "deploy", "--stack", "rehearsal")
    (reference,) = json.loads(state.open_rehearsal(person.environ).inventory_json)["images"].values()
    assert reference in pushed
    return str(reference)


def status(person: Person) -> str:
    return person.type("fab", "status", "--stack", "rehearsal").stdout


def step_of(person: Person) -> int:
    """-1 before the first."""
    found = re.search(r" step (\d+)/", status(person))
    return int(found[1]) if found else -1


def has_joined(person: Person) -> bool:
    return status(person).count(" stepping ") == 2


def test_a_run_in_containers_is_stopped_resumed_and_outlives_a_killed_host(person: Person) -> None:
    reference = with_an_image(person)
    train = ("fab", "train", "--stack", "rehearsal", "--detach")
    said = person.succeed(*train, "--job", "flax_mlm", "--args", OPTIONS, limit_s=LAUNCH_LIMIT_S)
    assert reference in said, "the image was not pulled by its digest"
    until(lambda: step_of(person) >= 30, LAUNCH_LIMIT_S)

    person.succeed("fab", "stop", "--stack", "rehearsal")
    assert " stopped " in status(person)
    saved = step_of(person)
    assert 30 <= saved < STEPS
    for name in person.hosts():
        assert person.ssh(name, "docker ps --all --quiet").stdout == ""

    person.succeed(*train, "--resume", "latest", limit_s=LAUNCH_LIMIT_S)
    until(lambda: has_joined(person) and step_of(person) >= saved + 30, LAUNCH_LIMIT_S)
    person.act("kill", "1")
    until(lambda: " failed " in status(person), LAUNCH_LIMIT_S)
    said = person.succeed("fab", "recover", "latest", "--stack", "rehearsal", limit_s=LAUNCH_LIMIT_S)
    assert "is done" in said
    run = json.loads(person.ssh(next(iter(person.hosts())), "cat /mnt/share/runs/*/run.json").stdout)
    assert (run["runtime"], run["image"], len(run["attempts"])) == ("docker", reference, 3)
