"""A pull repeats what can get better and nothing else, makes room for itself, and says what would help."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from host.agent.containers import docker_command, image_pull
from host.agent.protocol import Failed
from tests.host.conftest import Host
from tests.host.containers.conftest import build, docker

REF = "region-docker.pkg.dev/project/images/jax@sha256:" + "a" * 64
ABSENT = (1, "", f"Error response from daemon: No such image: {REF}\n")
PRESENT = (0, json.dumps([{"Id": "sha256:" + "b" * 64, "Size": 123, "Config": {"Labels": {}}}]), "")
ROOM = {"info": [(0, "/\n", "")], "pull": [(0, REF, "")]}


class FakeDocker:
    """For what no engine can be made to do: a registry that refuses, a daemon that comes up late.

    Calls are answered by how they begin; of several answers each is given once, the last for ever.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def answers(self, rules: dict[str, list[tuple[int, str, str]]]) -> None:
        self.rules = {begins: list(answers) for begins, answers in rules.items()}

    def run(self, argv: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        self.lines.append(line := " ".join(argv[1:]))
        answers = next(self.rules[begins] for begins in self.rules if line.startswith(begins))
        code, out, complaint = answers.pop(0) if len(answers) > 1 else answers[0]
        return subprocess.CompletedProcess(argv, code, out.encode(), complaint.encode())

    def calls(self, begins: str) -> list[str]:
        return [line for line in self.lines if line.startswith(begins)]


@pytest.fixture
def fake_docker(monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    made = FakeDocker()
    monkeypatch.setattr(subprocess, "run", made.run)
    monkeypatch.setattr(docker_command, "program", lambda: "docker")
    monkeypatch.setattr(image_pull, "FIRST_PAUSE_S", 0.01)
    return made


def asked(**fields: Any) -> dict[str, Any]:
    return image_pull.pull({"image": REF, "attempts": 4, "min_free_bytes": 1, "limit_s": None, **fields})


def refused(**fields: Any) -> Failed:
    with pytest.raises(Failed) as caught:
        asked(**fields)
    return caught.value


DOWN = "Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?"
FROM = "Error response from daemon: "


def test_an_image_that_is_here_is_not_asked_for_and_one_by_its_id_cannot_be(fake_docker: FakeDocker) -> None:
    fake_docker.answers({"image inspect region": [PRESENT], "image inspect sha": [ABSENT]})
    answer = asked()
    assert (answer["pulled"], answer["size_bytes"], answer["retries"]) == (False, 123, [])
    assert "fab build" in refused(image="sha256:" + "c" * 64).remedy
    assert fake_docker.calls("pull") == []


@pytest.mark.parametrize(
    ("complaint", "remedy"),
    [
        (FROM + 'Get "https://x/v2/": net/http: TLS handshake timeout', None),
        (FROM + "received unexpected HTTP status: 503 Service Unavailable", None),
        (FROM + 'Get "https://x/v2/": dial tcp 1.2.3.4:443: connect: connection refused', None),
        (
            "error pulling image configuration: download failed after attempts=6: connection reset by peer",
            None,
        ),
        (DOWN, None),
        ('denied: Permission "artifactregistry.repositories.downloadArtifacts" denied', "registry.reader"),
        (FROM + "Head https://x: unauthorized: no basic auth credentials", "fab deploy"),
        (FROM + "manifest unknown: Failed to fetch", "fab push"),
        (FROM + "name unknown: Repository not found", "fab push"),
        ("manifest verification failed for digest sha256:aaaa", "fab push"),
        ("failed to register layer: write /opt/x: no space left on device", "larger disk"),
        ("permission denied while trying to connect to the Docker daemon socket", "usermod"),
    ],
)
def test_what_cannot_get_better_has_a_remedy(complaint: str, remedy: str | None) -> None:
    found = image_pull.final_remedy(complaint)
    assert found is None if remedy is None else remedy in str(found)


def test_a_pull_is_repeated_for_what_can_get_better_as_often_as_asked(fake_docker: FakeDocker) -> None:
    timeout = (1, "", "TLS handshake timeout")
    here = {"image inspect": [ABSENT, ABSENT, PRESENT], **ROOM}
    fake_docker.answers({**here, "pull": [timeout, (0, REF, "")]})
    answer = asked()
    assert (answer["pulled"], answer["attempts"], len(answer["retries"])) == (True, 2, 1)
    assert answer["retries"][0].startswith("attempt 1 of 4: ")
    fake_docker.answers({"image inspect": [(1, "", DOWN), (1, "", DOWN), ABSENT, PRESENT], **ROOM})
    assert asked()["attempts"] == 3
    for pulls, (complaint, said) in ((4, (timeout, "4 attempts")), (1, ((1, "", "denied"), "denied"))):
        fake_docker.lines.clear()
        fake_docker.answers({"image inspect": [ABSENT], **ROOM, "pull": [complaint]})
        assert said in refused().message
        assert len(fake_docker.calls("pull")) == pulls


def known(number: str, **fields: Any) -> dict[str, Any]:
    digest = f"sha256:{number * 64}"
    names = {"RepoTags": [f"tpu-stack/jax:{number}"], "RepoDigests": [f"r/jax@{digest}"]}
    labels = {"Labels": {"tpu-stack.platform": "cpu"}}
    return {"Id": digest, "Created": number, "Size": 5, **names, "Config": labels, **fields}


def test_images_that_are_used_kept_or_not_ours_stay() -> None:
    foreign = known("5", Config={"Labels": None})
    ours = [known(number) for number in "43210"] + [foreign]
    keep = ["tpu-stack/jax:1", "r/jax@sha256:" + "2" * 64, "sha256:" + "3" * 64]
    left = image_pull.unneeded(ours, {"sha256:" + "0" * 64}, keep)
    assert [each["Id"][-1] for each in left] == ["4"]
    assert [each["Id"][-1] for each in image_pull.unneeded(ours, set(), [])] == list("01234")


def test_a_short_disk_is_cleared_of_old_images(
    fake_docker: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_pull, "free_bytes", lambda place: 2_000_000_000)
    old = {"image ls": [(0, "sha256:" + "1" * 64, "")], "ps": [(0, "", "")], "image rm": [(0, "", "")]}
    found = {"image inspect region": [ABSENT], "image inspect sha256": [(0, json.dumps([known("1")]), "")]}
    fake_docker.answers({**found, **old, **ROOM})
    problem = refused(min_free_bytes=9_000_000_000)
    assert "/ has 2.0 GB free and the pull needs 9.0 GB; 1 old images were removed" in problem.message
    names = ["tpu-stack/jax:1", f"r/jax@sha256:{'1' * 64}"]
    assert fake_docker.calls("image rm") == [f"image rm {name}" for name in names]
    assert fake_docker.calls("pull") == []


@pytest.mark.slow
def test_pruning_removes_our_images_and_leaves_those_that_containers_have(base: str, tmp_path: Path) -> None:
    # Of a daemon that others use as well, so that what is theirs is all kept.
    others = docker("image", "ls", "--all", "--quiet", "--no-trunc").split()
    unused = build(base, "LABEL tpu-stack.platform=test-of-prune", f"LABEL of={tmp_path}/1")
    used = build(base, "LABEL tpu-stack.platform=test-of-prune", f"LABEL of={tmp_path}/2")
    name = docker("create", used, "true")
    try:
        steps = [
            each for each in docker("image", "ls", "-aq", "--no-trunc").split() if each not in (unused, used)
        ]
        removed = image_pull.remove_unneeded([*others, *steps])
        assert [each["id"] for each in removed] == [unused]
    finally:
        docker("rm", name)
        docker("image", "rm", used)


@pytest.mark.slow
def test_an_image_that_is_here_or_can_be_pulled_passes_and_a_wrong_one_does_not(boxed: Any) -> None:
    def container(image: str, **fields: Any) -> dict[str, Any]:
        return {"container": {"image": image, "mounts": [str(boxed.scripts)], **fields}}

    host = Host(boxed)
    # No Python of the host is needed.
    response = host.response(python="/no/python", alone=True, **container(boxed.image, size_bytes=None))
    assert [each for each in response["checks"] if not each["ok"]] == []
    assert {"docker", "image"} <= {each["name"] for each in response["checks"]}
    assert (response["facts"]["image_present"], response["facts"]["image_needs_bytes"]) == (True, None)
    ok, message = host.finding("image", platform="gpu", **container(boxed.image))
    assert not ok and "was built for cpu" in message
    ok, message = host.finding("image", **container("sha256:" + "a" * 64))
    assert not ok and "is not on this host" in message
    assert host.finding("image", **container(REF))[0]
    assert host.finding("docker_disk", **container(REF, size_bytes=1))[0]
    ok, message = host.finding("docker_disk", **container(REF, size_bytes=10**15))
    assert not ok and "needs 1400000.0 GB" in message


@pytest.mark.slow
def test_a_running_container_is_a_leftover_even_where_its_processes_are_hidden(boxed: Any) -> None:
    labels = {"run": boxed.run_id, "root": boxed.root, "host": os.uname().nodename}
    marks = [f"--label=tpu-stack.{name}={value}" for name, value in labels.items()]
    # Without the environment by which this host would know it, as where it is root's.
    docker("run", "--detach", "--network", "none", *marks, boxed.image, "sleep", "600")
    container = {"image": boxed.image, "mounts": []}
    ok, message = Host(boxed).finding("leftovers", container=container, alone=True)
    assert not ok and boxed.run_id in message


def checked(**fields: Any) -> list[dict[str, Any]]:
    container = {"image": REF, "mounts": [], "size_bytes": None, **fields}
    return image_pull.check_docker({"container": container, "platform": "cpu"})[0]


def test_a_missing_mount_and_docker_are_told(
    fake_docker: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_docker.answers({"version": [(1, "", DOWN)]})
    docker, mount = checked(mounts=["/no/share"])
    assert not docker["ok"] and "systemctl start" in docker["remedy"]
    assert "/no/share is a mount of the container" in mount["message"]
    monkeypatch.setattr(docker_command, "program", lambda: None)
    (found,) = checked()
    assert not found["ok"] and "fab deploy" in found["remedy"]


def test_a_docker_that_hangs_is_not_waited_for_longer_than_the_limit(tmp_path: Path) -> None:
    sleeper = tmp_path / "docker"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    answer = docker_command.ask(["version"], 0.3, docker=str(sleeper))
    assert answer.code is None and "no answer within 0.3 s" in answer.complaint


def test_the_client_gets_no_secrets_of_the_host_and_its_words_are_told_without_its_introduction() -> None:
    given = {"HOME": "/h", "PATH": "/p", "DOCKER_HOST": "d", "AWS_SECRET": "x", "RUN_ID": "y"}
    assert set(docker_command.client_environment(given)) == {"HOME", "PATH", "DOCKER_HOST"}
    said = f"docker: {FROM}bad device\n\nRun 'docker run --help' for more information\n"
    assert docker_command.core(said) == "bad device"


@pytest.mark.parametrize(
    ("free", "removable", "ok", "part"),
    [
        (20, 0, True, "has 0.0 GB free for the image"),
        (5, 20, True, "old images of ours will be removed"),
        (5, 4, False, "free and the image needs"),
    ],
)
def test_a_disk_full_of_old_images_keeps_no_run(free: int, removable: int, ok: bool, part: str) -> None:
    found = image_pull.check_docker_disk(free, 10, removable)
    assert (found["ok"], part in found["message"]) == (ok, True), found
