"""Images are built by this machine's BuildKit: tried before they are named, and nothing is left of what failed."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import docker
import pytest

from contracts.errors import FAILED, UNAVAILABLE
from images import build, local_images
from images.build import Builder, build_command, failure
from images.docker_client import ImageError, buildkit, exit_code_of
from images.local_images import BuildResult
from images.recipe import Recipe
from launch.jobs import CHECKOUT

slow = pytest.mark.slow
FAILS = "def main():\n    print('FAIL step  loss is nan')\n    raise SystemExit(1)\n"
DIES = "def main():\n    import os\n    os._exit(134)\n"
SLEEPS = "def main():\n    import time\n    time.sleep(600)\n"
LOOKS = """\
def main():
    import os, socket
    assert os.getuid() not in (0,), os.getuid()
    open("/tmp/it-may", "w").close()
    try:
        open("/opt/it-may-not", "w")
    except OSError as error:
        print("root:", error.strerror)
    print("interfaces:", [name for _, name in socket.if_nameindex()])
    print("rights:", [line.split()[1] for line in open("/proc/self/status") if line.startswith("CapBnd")])
    print('{"ok": true}')
"""
LIMIT_S = 90
MakeLab = Callable[[str], Any]


def recipe_for(platform: Any) -> Recipe:
    return Recipe(framework="one", platform=platform, base="b", files={"requirements.txt": b""})


def test_docker_is_told_names_of_arguments_and_never_their_values() -> None:
    command = build_command(
        "docker", Path("/i"), {"a": "b c"}, {"HTTPS_PROXY": "http://me:word@p", "BASE_IMAGE": "b"}
    )
    assert command == [
        *("docker", "build", "--iidfile", "/i", "--label", "a=b c"),
        *("--build-arg", "HTTPS_PROXY", "--build-arg", "BASE_IMAGE", "-"),
    ]


def test_an_image_is_tried_as_a_job_runs_and_with_the_tpu_where_there_is_one() -> None:
    here = build.run_command(recipe_for("tpu"), "sha256:1", [], 1000, 1001)
    assert {"--network=none", "--read-only", "--cap-drop=ALL", "--user=1000:1001"} <= set(here)
    assert here[-4:] == ["sha256:1", build.PROGRAM, "--platform", "cpu"]
    there = build.run_command(recipe_for("tpu"), "sha256:1", ["/dev/vfio/0"], 0, 0)
    assert {"--network=host", "--device", "/dev/vfio/0", "--ulimit=memlock=-1"} <= set(there)
    assert not any(word.startswith("--user") for word in there)
    assert there[-1] == "tpu"
    of_os_login = build.run_command(recipe_for("cpu"), "sha256:1", ["/dev/vfio/0"], 2**31, 2**31)
    assert not any(word.startswith(("--user", "--device")) for word in of_os_login)


@pytest.mark.parametrize(
    ("said", "words", "code"),
    [
        ("write /x: no space left on device\n", r"\(/data\) is full; `fab images --prune`", FAILED),
        ("ERROR: failed to solve: x: pull access denied\n", "TPU_STACK_BASE_IMAGE", FAILED),
        (
            "#2 [internal] load metadata for x\nConnection refused\nHash mismatch for x\nexit code: 1\n",
            "exit code: 1\n.*`make lock`",
            FAILED,
        ),
        ("", "without a word\n.*HTTPS_PROXY", FAILED),
        (
            "#3 ERROR: lookup r.example: no such host\n > [internal] load metadata for r.example/python\n",
            "no such host\n.*TPU_STACK_BASE_IMAGE",
            UNAVAILABLE,
        ),
        (
            "Retrying: [Errno 111] Connection refused\nCould not find a version of uv\nexit code: 1\n",
            "Connection refused\n.*PIP_INDEX_URL",
            UNAVAILABLE,
        ),
        ("Retrying: Connection refused\n" + "went on\n" * 40 + "exit code: 1\n", "exit code: 1\n", FAILED),
        ("E: Temporary failure resolving 'd.example'\nexit code: 100\n", "HTTPS_PROXY", UNAVAILABLE),
    ],
)
def test_a_failure_says_what_to_do_and_whether_a_server_was_away(said: str, words: str, code: int) -> None:
    error = failure("tpu-stack/one:cpu-1", said, "/data")
    assert re.match(f"tpu-stack/one:cpu-1 was not built: (?s:.*){words}", str(error)), str(error)
    assert error.exit_code == code
    assert exit_code_of([error, ImageError()]) == FAILED and exit_code_of([]) == 0


@pytest.fixture
def environ(tmp_path: Path, base: str) -> Mapping[str, str]:
    places = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TPU_STACK_BASE_IMAGE": base}
    return MappingProxyType({**os.environ, **places})


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def builder(client: docker.DockerClient, environ: Mapping[str, str], notes: list[str]) -> Builder:
    return Builder(client=client, command=buildkit(client, environ), environ=environ, say=notes.append)


@slow
def test_an_image_is_built_tried_and_named_once_and_built_anew_only_when_its_recipe_changes(
    make_lab: MakeLab, builder: Builder, notes: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    lab = make_lab("once")
    recipe = lab.recipe()
    made = builder.make(recipe)
    assert (made.done, made.image.tags) == ("built", (recipe.tag,))
    assert "RUN echo once; true" in capfd.readouterr().err
    assert notes[-1] == "ok   imports  0.1 s"
    notes.clear()
    assert builder.make(recipe) == BuildResult(image=made.image, done="was there")
    assert notes == []
    second = builder.make(lab.recipe(smoke="# other\n" + recipe.files["smoke/framework.py"].decode()))
    assert second.image.id != made.image.id
    assert local_images.old([made.image, second.image], current=second.image.tags, used=[]) == [made.image]
    # One in use, or with a name that somebody gave it, is neither old nor removed.
    container = lab.client.containers.create(second.image.id)
    try:
        assert local_images.old([second.image], current=[], used=local_images.used(lab.client)) == []
        assert not local_images.remove(lab.client, second.image)
    finally:
        container.remove()
    lab.client.api.tag(second.image.id, "somebody/kept", "mine")
    (seen,) = [image for image in local_images.list_all(lab.client) if image.id == second.image.id]
    assert local_images.old([seen], current=[], used=[]) == []
    lab.client.api.remove_image("somebody/kept:mine")


@slow
def test_it_is_tried_as_somebody_without_rights_without_network_and_with_nothing_to_write_to(
    make_lab: MakeLab, builder: Builder, notes: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    lab = make_lab("bound")
    with pytest.raises(ImageError, match=r"was not built: .*exit code: 7"):
        builder.make(lab.recipe(body="echo the reason >&2; exit 7"))
    assert "the reason" in capfd.readouterr().err
    assert lab.left() == []
    builder.make(lab.recipe(smoke=LOOKS))
    assert notes[-3:] == [
        "root: Read-only file system",
        "interfaces: ['lo']",
        "rights: ['0000000000000000']",
    ]


@slow
def test_an_image_whose_smoke_test_fails_does_not_get_its_name_and_goes_when_one_passes(
    make_lab: MakeLab, builder: Builder, environ: Mapping[str, str], notes: list[str]
) -> None:
    lab = make_lab("unsound")
    for program, reason in ((FAILS, "loss is nan"), (DIES, "exit code 134: ended by signal 6")):
        bad = lab.recipe(smoke=program)
        with pytest.raises(ImageError, match=reason):
            builder.make(bad)
        assert local_images.find(lab.client, bad) is None
        assert bad.failed_tag in lab.named()
    endless = lab.recipe(smoke=SLEEPS)
    image = builder.build(endless, None)
    with pytest.raises(ImageError, match="not done after 1 s, and was ended"):
        build.attempt(lab.client, builder.command, endless, image, environ, notes.append, limit_s=1.0)
    local_images.discard(lab.client, image)
    good = builder.make(lab.recipe())
    assert lab.left() == [good.image.tags[0]]


# --- as a person types it, and as two persons do ------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path, environ: Mapping[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `fab build` in a copy of the checkout that has the images of a lab."""
    house, started = tmp_path / "house", list[subprocess.Popen[str]]()

    def start(framework: str) -> subprocess.Popen[str]:
        if not house.exists():
            for name in ("contracts", "fabfile", "launch", "jobs", "infra"):
                # infra/.venv is a link to gigabytes.
                shutil.copytree(
                    CHECKOUT / name, house / name, ignore=shutil.ignore_patterns("__pycache__", ".venv")
                )
            shutil.copytree(tmp_path / "images", house / "images")
            (house / "requirements").mkdir()
            (house / "requirements" / "uv.txt").touch()
        process = subprocess.Popen(
            [Path(sys.executable).with_name("fab"), "build", "--framework", framework, "--platform", "cpu"],
            cwd=house,
            env={**environ, "PYTHONPATH": str(house)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@slow
@pytest.mark.parametrize(
    ("number", "when"), [(signal.SIGINT, "ok   imports"), (signal.SIGTERM, "RUN echo cut; sleep")]
)
def test_a_build_that_is_interrupted_leaves_no_container_and_no_image(
    make_lab: MakeLab, start: Callable[..., subprocess.Popen[str]], number: int, when: str
) -> None:
    lab = make_lab("cut")
    lab.recipe(body="sleep 300" if when.startswith("RUN") else "true", smoke=SLEEPS)
    process = start("cut")
    assert process.stdout is not None
    said = until(process.stdout, when)
    process.send_signal(number)
    rest = process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == 130, said + rest
    assert lab.left() == []


def until(lines: Iterable[str], words: str) -> str:
    """All that is said until somebody says `words`."""
    said = ""
    for line in lines:
        said += line
        if words in line:
            break
    return said
