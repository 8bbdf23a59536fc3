"""What goes wrong between the agent and Docker is repaired, or is told with what to do about it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.host.containers.conftest import docker

pytestmark = pytest.mark.slow
UP = 'say("up"); live()'


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("sha256:" + "a" * 64, "No such image: sha256:aaaa"),
        ("registry.invalid/jax@sha256:" + "b" * 64, "No such image: registry.invalid/jax@sha256:bbbb"),
    ],
)
def test_a_missing_image_starts_nothing_and_fetches_nothing(boxed: Any, wrong: str, said: str) -> None:
    status, answer = boxed.ask("start", **boxed.start_request(UP, boxed={"image": wrong}))
    assert (status, answer["ok"]) == (1, False)
    assert said.lower() in answer["error"]["message"].lower()
    assert "pull it" in answer["error"]["remedy"]
    assert boxed("status", run_id=boxed.run_id)["processes"] == []
    assert boxed.containers() == []
    assert boxed.start(UP)["already"] is False


def test_an_image_that_is_none_of_ours_is_told_by_its_missing_init(boxed: Any, base: str) -> None:
    plain = docker("image", "inspect", "--format", "{{.Id}}", base)
    boxed.start(UP, boxed={"image": plain})
    ended = boxed.ended()
    assert ended["code"] == 125
    assert "Docker could not start the container" in ended["reason"] and "tini" in ended["reason"]
    assert boxed.heartbeat()["message"] == ended["reason"]
    assert boxed.containers() == []


def test_a_program_that_the_image_lacks_is_the_job_s_own_failure(boxed: Any) -> None:
    boxed.start(UP, argv=["no-such-program"])
    ended = boxed.ended()
    assert ended["code"] == 127
    assert "no-such-program" in boxed.heartbeat()["message"]


def test_exit_codes_that_docker_uses_too_are_the_job_s_where_it_ran(boxed: Any) -> None:
    boxed.start('say("mine"); sys.exit(125)')
    assert boxed.ended()["reason"] == "exit code 125"


def test_an_old_container_of_the_same_name_makes_way(boxed: Any, image: str) -> None:
    docker("create", "--name", boxed.name(), "--label", "tpu-stack.run=earlier", image, "true")
    boxed.start('say("up"); sys.exit(0)')
    assert boxed.ended()["code"] == 0
    assert boxed.containers() == []


@pytest.mark.parametrize("label", ["tpu-stack.run=other", "of=somebody"])
def test_a_running_container_of_somebody_else_is_named_and_left_alone(
    boxed: Any, image: str, label: str
) -> None:
    command = ["run", "--detach", "--network", "none", "--name", boxed.name()]
    number = docker(*command, "--label", label, image, "sleep", "600")
    try:
        status, message = boxed.refusal("start", **boxed.start_request(UP))
        assert status == 1
        assert f"the name {boxed.name()} is taken by the container {number[:12]}, which runs" in message
        assert docker("inspect", "--format", "{{.State.Running}}", number) == "true"
    finally:
        docker("rm", "--force", number)


def test_what_ended_while_nobody_watched_is_cleared_away_by_the_next_start(boxed: Any, until: Any) -> None:
    started = boxed.start_and_hear(UP)
    for pid in (boxed.record()["supervisor_pid"], started["pid"]):
        os.kill(pid, signal.SIGKILL)
    until(lambda: boxed.status()["state"] == "lost")
    docker("kill", boxed.name())
    assert boxed.containers() == [boxed.name()]
    boxed.start_and_hear(UP, attempt=1)
    assert boxed.containers() == [f"tpu-stack-{boxed.run_id}-1-0"]


def test_a_start_that_was_killed_half_way_is_repaired_by_the_next(boxed: Any, until: Any) -> None:
    boxed.start_and_hear(UP)
    for name in ("process.json", "container.id"):
        (boxed.state_dir() / name).rename(boxed.scripts / name)  # as if neither had been written yet
    os.kill(
        int(boxed.scripts.joinpath("process.json").read_text().split('"supervisor_pid": ')[1].split(",")[0]),
        9,
    )
    first = docker("inspect", "--format", "{{.Id}}", boxed.name())
    assert boxed.start_and_hear(UP)["already"] is False
    assert docker("inspect", "--format", "{{.Id}}", boxed.name()) != first


def test_a_mount_that_is_not_there_is_named_and_not_made_by_docker(boxed: Any, tmp_path: Path) -> None:
    missing = tmp_path / "elsewhere" / "share"
    for mounts in ({"mounts": [str(tmp_path), "/no/share"]}, {"read_only_mounts": [str(missing)]}):
        assert "is not on this host" in boxed.refusal("start", **boxed.start_request(UP, boxed=mounts))[1]
    assert not missing.exists() and not Path("/no/share").exists()


def test_a_working_directory_that_the_container_does_not_see_is_refused(boxed: Any) -> None:
    assert (
        "in none of the container's mounts"
        in boxed.refusal("start", **boxed.start_request(UP, cwd="/usr"))[1]
    )


def test_what_would_steer_docker_s_client_is_refused(boxed: Any) -> None:
    request = boxed.start_request(UP)
    request["env"].update(DOCKER_HOST="tcp://elsewhere", PATH="/x")
    assert "env DOCKER_HOST, PATH is the image's to set" in boxed.refusal("start", **request)[1]


def test_paths_may_hold_commas_quotes_and_blanks(boxed: Any, tmp_path: Path) -> None:
    odd = tmp_path / 'a, "b" c'
    odd.mkdir()
    (odd / "file").write_text("seen")
    look = f"""
say(open({str(odd / "file")!r}).read())
try:
    open({str(odd / "new")!r}, "w")
except OSError as error:
    say(error.errno)
"""
    mounts = {"mounts": [str(boxed.run_dir), str(boxed.root)], "read_only_mounts": [str(tmp_path)]}
    boxed.start(look, boxed=mounts)
    boxed.ended()
    assert boxed.log().split() == ["seen", "30"]


def test_a_killed_daemon_ends_the_job_that_lives_on_without_it(
    engine: subprocess.Popen[bytes], boxed: Any, until: Any, is_running: Any
) -> None:
    boxed.start_and_hear(UP)
    pids = [int(line.split()[1]) for line in docker("top", boxed.name()).splitlines()[1:]]
    assert pids and all(map(is_running, pids))
    engine.kill()
    ended = boxed.ended()
    assert ended["code"] == 125
    assert "Docker went away while the job ran" in ended["reason"]
    until(lambda: not any(map(is_running, pids)))
    status, message = boxed.refusal("start", **boxed.start_request(UP, attempt=1))
    assert status == 1 and "Docker could not make the container: Cannot connect" in message


def test_a_frozen_daemon_keeps_no_job_from_being_stopped(
    engine: subprocess.Popen[bytes], boxed: Any, is_running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxed.start_and_hear(UP)
    pids = [int(line.split()[1]) for line in docker("top", boxed.name()).splitlines()[1:]]
    engine.send_signal(signal.SIGSTOP)
    try:
        stopped = boxed.stop(grace_s=0.5)
    finally:
        engine.send_signal(signal.SIGCONT)
    assert not any(map(is_running, pids))
    assert "Docker still has its container" in str(stopped["note"])
