"""A rehearsal with real machines and the real engine, from outside as `fab rehearsal` lives it.

Two hosts with Docker stand for most tests, whole again after each. Slow: a start takes some ten seconds, and the first,
on a new computer, the minutes in which the hosts' image is built."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rehearsal import state
from rehearsal.daemon import cli
from rehearsal.machines import docker_engine
from rehearsal.rehearse import read_losses
from rehearsal.state import RehearsalError
from tests.rehearsal.daemon.conftest import LIMIT_S, Person
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BUILD_LIMIT_S = 1800.0
LAUNCH_LIMIT_S = 600.0  # with the pull of the image, on a computer that is shared with others
# A model so small that compiling it is most of its start, and so many steps that it is caught in the midst of them.
SIZES = (
    "--layers 1 --width 32 --heads 2 --ff-width 64 --vocab-size 300 --max-positions 32 --sequence-length 16"
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, environ: Mapping[str, str]) -> Iterator[Person]:
    """Whose rehearsal is up, with two hosts that have Docker, and a registry."""
    person = Person(tmp_path_factory.mktemp("shared") / "rehearsal", environ)
    try:
        person.up(cli.UpRequest(hosts=2, kind="docker"))
        yield person
    finally:
        cli.down(person.folder, person.said.append)


def test_an_image_that_the_configuration_names_is_in_the_inventory_and_its_registry_is_here_and_on_the_hosts(
    shared: Person,
) -> None:
    outputs = json.loads(shared.succeed("pulumi stack output --json --stack rehearsal"))
    repository = outputs["image_repository"]
    assert repository.startswith("127.0.0.1:")
    reference = f"{repository}/jax@sha256:{'0' * 64}"
    for words in (f"config set --path tpu-stack:images.references.jax {reference}", "up --yes"):
        shared.succeed(f"pulumi {words} --stack rehearsal")
    assert json.loads(state.open_rehearsal(shared.environ).inventory_json)["images"] == {"jax": reference}
    host = next(iter(shared.hosts()))
    for pulled in (
        shared.ssh(host, f"sudo docker pull {reference}"),
        shared.type("docker", "pull", reference),
    ):
        assert "manifest" in pulled.stderr and "unknown" in pulled.stderr
    assert shared.act("status").count(repository.partition("/")[0]) == 1


def test_a_daemon_that_is_killed_leaves_no_machine_and_down_removes_the_rest(person: Person) -> None:
    person.up()
    daemon = state.require(person.folder)
    assert person.left()
    os.kill(daemon.pid, signal.SIGKILL)
    until(lambda: person.left() == [], LIMIT_S)
    with pytest.raises(RehearsalError, match="without being taken down"):
        state.open_rehearsal(person.environ)
    assert cli.down(person.folder, person.said.append)
    assert not person.folder.exists() and not Path(daemon.socket).parent.exists()
    assert not cli.down(person.folder, person.said.append)


@pytest.mark.nightly
@pytest.mark.parametrize("lost", ["owner", "folder"])
def test_a_rehearsal_ends_with_its_owner_and_its_folder(person: Person, lost: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner:
        cli.up(person.folder, cli.UpRequest(), person.said.append, owner=owner.pid)
        daemon = state.require(person.folder)
        if lost == "owner":
            owner.kill()
            owner.wait()
        else:
            shutil.rmtree(person.folder)
        until(lambda: not Path(daemon.socket).parent.exists(), LIMIT_S)
        assert person.left() == []
        owner.kill()


def test_down_finds_what_a_rehearsal_without_its_folder_has_left_and_names_what_another_has(
    tmp_path: Path,
) -> None:
    mine, gone = tmp_path / "mine", tmp_path / "gone"
    client = docker_engine.connect()
    try:
        for folder in (mine, gone):
            name = state.rehearsal_name(folder)
            client.networks.create(f"tpu-stack-{name}", internal=True, labels=docker_engine.labels(name))
        said: list[str] = []
        assert cli.down(mine, said.append)
        assert said == [f"removed tpu-stack-{state.rehearsal_name(mine)}"]
        assert not cli.down(mine, said.append)
        (line,) = (line for line in cli.others(mine) if line.startswith(state.rehearsal_name(gone)))
        remedy = line.split("`")[1].removesuffix(" < /dev/null")
        subprocess.run(shlex.split(remedy), stdin=subprocess.DEVNULL, check=True, timeout=LIMIT_S)
        assert not cli.down(gone, said.append)
    finally:
        client.close()


def test_ctrl_c_while_it_comes_up_leaves_nothing_and_a_size_that_there_is_not_is_refused(
    person: Person,
) -> None:
    def say(line: str) -> None:
        person.said.append(line)
        if "pulumi up" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cli.up(person.folder, cli.UpRequest(), say)
    assert person.left() == [] and not person.folder.exists()
    with pytest.raises(RehearsalError, match="--hosts 3: .* choose one of 1, 2, 4"):
        person.up(cli.UpRequest(hosts=3))
    assert not person.folder.exists()


def with_an_image(shared: Person, framework: str) -> str:
    """Builds and pushes the framework's image, until the inventory names it; its reference."""
    image = f"--framework {framework} --platform cpu"
    shared.succeed(f"fab build {image}", BUILD_LIMIT_S)
    pushed = shared.succeed(f"fab push --stack rehearsal {image}", LAUNCH_LIMIT_S)
    shared.succeed("pulumi up --yes --stack rehearsal")
    shared.succeed("fab deploy --stack rehearsal")
    reference = str(json.loads(state.open_rehearsal(shared.environ).inventory_json)["images"][framework])
    assert reference in pushed
    return reference


def status(shared: Person) -> str:
    return shared.type("fab", "status", "--stack", "rehearsal").stdout


def step_of(shared: Person) -> int:
    """-1 before the first."""
    found = re.search(r" step (\d+)/", status(shared))
    return int(found[1]) if found else -1


def has_joined(shared: Person) -> bool:
    return status(shared).count(" stepping ") == 2


def fetched(shared: Person, run: str, place: Path) -> Path:
    """The run's directory, copied from the share."""
    shared.succeed(f"fab get --stack rehearsal --hosts 0 /mnt/share/runs/{run} {place}")
    (folder,) = (path.parent for path in place.rglob("run.json"))
    return folder


GLUE_ROWS = "/mnt/share/rows.jsonl"
GLUE = f"--data {GLUE_ROWS} --eval-fraction 0.2 --batch-size 64 --max-length 64"
JOBS = {
    "torch_glue": ("pytorch", 250, GLUE),
    "keras_glue": ("jax", 250, GLUE),
    "tf_images": ("tensorflow", 250, "--batch-per-core 32"),
    "tf_squad": ("tensorflow", 400, "--batch-size 8"),
}
"""The framework of each, steps for ten seconds or more, and options that make them short."""


def glue_rows() -> str:
    """Rows of a few words, one of which decides the label."""
    words = ("the", "film", "plot", "actor", "was")
    rows = (
        {"text": " ".join([*words * (number % 8), f"{number}", word, *words * 5]), "label": label}
        for number in range(200)
        for word, label in (("awful", "bad"), ("lovely", "good"))
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.nightly
@pytest.mark.timeout(3600)  # where the image has to be built, 10 minutes go there, and its push takes minutes
@pytest.mark.parametrize("job", JOBS)
def test_a_job_has_the_losses_of_an_undisturbed_run_after_a_killed_host_and_a_preempted_slice(
    shared: Person, tmp_path: Path, job: str
) -> None:
    framework, steps, options = JOBS[job]
    reference = with_an_image(shared, framework)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(glue_rows())
    shared.succeed(f"fab put --stack rehearsal --hosts 0 {rows} {GLUE_ROWS}")
    options += f" --steps {steps} --log-every 1 --checkpoint-every 25 --eval-every {steps}"
    train = f"fab train --stack rehearsal --job {job} --args '{options}'"
    said = shared.succeed(train, LAUNCH_LIMIT_S)
    undisturbed = fetched(shared, run_started(said), tmp_path / "undisturbed")
    assert json.loads((undisturbed / "run.json").read_text())["image"] == reference

    first = shared.hosts()
    run = run_started(shared.succeed(f"{train} --detach", LAUNCH_LIMIT_S))
    until(lambda: step_of(shared) >= 15, LAUNCH_LIMIT_S)
    shared.act("kill", "1")
    until(lambda: " failed " in status(shared), LAUNCH_LIMIT_S)
    killed_at = step_of(shared)
    shared.succeed(f"fab recover --stack rehearsal --run {run} --detach", LAUNCH_LIMIT_S)
    until(lambda: has_joined(shared) and step_of(shared) >= killed_at + 15, LAUNCH_LIMIT_S)
    shared.act("preempt")
    said = shared.succeed(f"fab recover --stack rehearsal --run {run}", LAUNCH_LIMIT_S)
    assert "is done" in said and not shared.hosts().keys() & first.keys()

    disturbed = fetched(shared, run, tmp_path / "disturbed")
    described = json.loads((disturbed / "run.json").read_text())
    assert (described["image"], len(described["attempts"])) == (reference, 3)
    assert killed_at < steps  # and the last attempt did not begin anew:
    assert "resumed after step " in (disturbed / "logs" / "2" / "host-0.log").read_text()
    right, found = (read_losses(folder / "metrics.jsonl") for folder in (undisturbed, disturbed))
    assert sorted(right) == list(range(1, steps + 1))
    assert found == right, "not equal to the last digit"
    scores = [
        json.loads((folder / "result.json").read_text())["eval_loss"] for folder in (undisturbed, disturbed)
    ]
    assert scores[0] == scores[1]


def run_started(said: str) -> str:
    """The id of the run that `fab train` says it has started."""
    found = re.search(r"^started (\S+) in ", said, re.MULTILINE)
    assert found, said
    return found[1]
