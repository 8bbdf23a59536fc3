"""Images are built by the Docker of this machine: tried before they are named, and nothing is left of what failed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import docker
import pytest

from launch.images import builder, here, smoke
from launch.images.builder import Made
from launch.images.errors import ImageError
from launch.images.recipe import Recipe
from launch.jobs import CHECKOUT

pytestmark = pytest.mark.slow

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


class Notes:
    """A watch that keeps what it is told."""

    def __init__(self) -> None:
        self.states: list[str] = []
        self.notes: list[str] = []

    def state(self, text: str) -> None:
        self.states.append(text)

    def progress(self, text: str) -> None:
        self.states.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def environ(tmp_path: Path) -> Mapping[str, str]:
    return MappingProxyType({**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")})


@pytest.fixture
def make(client: docker.DockerClient, environ: Mapping[str, str]) -> Callable[..., Made]:
    def make(recipe: Recipe, notes: Notes | None = None) -> Made:
        return builder.make(client, recipe, environ=environ, commit="abc", watch=notes or Notes())

    return make


def test_an_image_is_built_tried_and_named_once_and_then_found(
    make_lab: MakeLab, make: Callable[..., Made]
) -> None:
    lab = make_lab("once")
    recipe, notes = lab.recipe(), Notes()
    made = make(recipe, notes)
    assert (made.done, made.image.tags) == ("built", (recipe.tag,))
    assert "step 4/15  RUN echo once; true" in notes.states
    assert notes.notes == ["ok   imports  0.1 s"]
    again = Notes()
    found = make(recipe, again)
    assert (found.done, found.image, again.states) == ("was there", made.image, [])


def test_code_that_is_in_no_image_rebuilds_nothing_and_another_smoke_test_does(
    make_lab: MakeLab, make: Callable[..., Made]
) -> None:
    lab = make_lab("changes")
    first = make(lab.recipe())
    second = make(lab.recipe(smoke="# other\n" + lab.recipe().files["smoke/stack.py"].decode()))
    assert second.done == "built"
    assert second.image.id != first.image.id
    assert here.old([first.image, second.image], current=second.image.tags, used=[]) == [first.image]


def test_it_is_tried_as_somebody_without_rights_without_network_and_with_nothing_to_write_to(
    make_lab: MakeLab, make: Callable[..., Made]
) -> None:
    notes = Notes()
    make(make_lab("bound").recipe(smoke=LOOKS), notes)
    assert notes.notes[1:] == [
        "root: Read-only file system",
        "interfaces: ['lo']",
        "rights: ['0000000000000000']",
    ]


def test_a_step_that_fails_shows_its_last_lines_and_leaves_nothing(
    make_lab: MakeLab, make: Callable[..., Made]
) -> None:
    lab = make_lab("fails")
    with pytest.raises(
        ImageError, match=r"was not built at step 4/15, RUN echo fails; echo the reason"
    ) as caught:
        make(lab.recipe(body="echo the reason >&2; exit 7"))
    assert "\n  the reason\n" in str(caught.value)
    assert lab.left() == []


@pytest.mark.parametrize(
    ("program", "reason"), [(FAILS, "loss is nan"), (DIES, r"exit code 134: ended by signal 6")]
)
def test_an_image_whose_smoke_test_fails_does_not_get_its_name_and_goes_when_one_passes(
    make_lab: MakeLab, make: Callable[..., Made], program: str, reason: str
) -> None:
    lab = make_lab("unsound")
    bad = lab.recipe(smoke=program)
    with pytest.raises(ImageError, match=reason):
        make(bad)
    assert here.of_recipe(lab.client, bad) is None
    assert lab.named() == [bad.failed_tag]
    good = make(lab.recipe())
    assert lab.named() == [good.image.tags[0]]


def test_a_smoke_test_that_never_ends_is_ended_and_its_container_is_gone(
    make_lab: MakeLab, make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = make_lab("endless")
    recipe = lab.recipe()
    image = make(recipe).image
    slow = lab.recipe(smoke=SLEEPS)
    answers = builder.build(lab.client, slow, {"BASE_IMAGE": lab.base}, {}, Notes())
    with pytest.raises(ImageError, match="not done after 1 s, and was ended"):
        smoke.attempt(lab.client, slow, answers, Notes().note, limit_s=1.0)
    builder.clean_up(lab.client, answers, None)
    assert lab.named() == list(image.tags)


def test_an_image_with_a_name_that_somebody_gave_it_or_in_use_is_not_removed(
    make_lab: MakeLab, make: Callable[..., Made]
) -> None:
    lab = make_lab("kept")
    made = make(lab.recipe()).image
    container = lab.client.containers.create(made.id)
    try:
        assert here.old([made], current=[], used=here.used(lab.client)) == []
        assert not here.remove(lab.client, made)
    finally:
        container.remove()
    lab.client.api.tag(made.id, "somebody/kept", "mine")
    (seen,) = [image for image in here.list_all(lab.client) if image.id == made.id]
    assert here.old([seen], current=[], used=[]) == []
    lab.client.api.remove_image("somebody/kept:mine")


def test_an_image_whose_container_goes_a_moment_later_is_removed_then(make_lab: MakeLab) -> None:
    lab = make_lab("late")
    image = builder.build(lab.client, lab.recipe(), {"BASE_IMAGE": lab.base}, {}, Notes())
    container = lab.client.containers.create(image, "true")
    later = threading.Timer(1.0, container.remove)
    later.start()
    builder.clean_up(lab.client, image, None)
    later.join()
    assert lab.left() == []


# --- as a person types it, and as two persons do ------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path, base: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `fab build` in a copy of the checkout that has the images of a lab."""
    house, started = tmp_path / "house", list[subprocess.Popen[str]]()

    def start(stack: str) -> subprocess.Popen[str]:
        if not house.exists():
            for name in ("fabfile", "launch", "jobs", "infra"):
                # infra/.venv is a link to gigabytes.
                shutil.copytree(
                    CHECKOUT / name, house / name, ignore=shutil.ignore_patterns("__pycache__", ".venv")
                )
            shutil.copytree(tmp_path / "images", house / "images")
            (house / "requirements").mkdir()
            (house / "requirements" / "uv.txt").touch()
        process = subprocess.Popen(
            [Path(sys.executable).with_name("fab"), "build", "--stack", stack, "--platform", "cpu"],
            cwd=house,
            env={
                **os.environ,
                "PYTHONPATH": str(house),
                "XDG_CACHE_HOME": str(tmp_path / "cache"),
                "TPU_STACK_BASE_IMAGE": base,
            },
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


def test_of_two_builds_of_the_same_image_at_once_one_builds_and_both_have_it(
    make_lab: MakeLab, start: Callable[..., subprocess.Popen[str]]
) -> None:
    make_lab("twice").recipe(body="sleep 3")
    both = [start("twice"), start("twice")]
    said = [each.communicate(timeout=LIMIT_S)[0] for each in both]
    assert [each.returncode for each in both] == [0, 0], said
    assert sum("RUN echo twice; sleep" in text for text in said) == 1
    assert any("another process builds it; waits" in text for text in said)
    assert all("tpu-stack/twice:cpu-" in text for text in said)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["RUN echo cut; sleep", "ok   imports"])
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
