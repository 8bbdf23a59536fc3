"""Docker on a host: what it says of itself is told, and what is missing is mended by what is missing."""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.deploy import steps

CarryOut = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def host(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """A PATH with programs that answer as a test says, before this machine's own."""

    def make(**programs: str) -> dict[str, str]:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, text in programs.items():
            path = folder / name
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return {"PATH": f"{folder}:{os.environ['PATH']}", "DONE": str(tmp_path / "done")}

    return make


def looked_at(carry_out: CarryOut, environ: dict[str, str], change: str = "") -> dict[str, Any]:
    step = dataclasses.replace(
        steps.docker(), needs=(), root=False, change=change, limit_s=5 if change else 0
    )
    (answer,) = carry_out([step], environ=environ)
    return answer


def test_a_docker_that_answers_is_named_by_its_version(
    carry_out: CarryOut, host: Callable[..., dict[str, str]]
) -> None:
    answer = looked_at(carry_out, host(docker="echo 28.1.0"))
    assert (answer["state"], answer["message"]) == ("ok", "Docker 28.1.0")


def test_a_user_who_has_just_joined_the_group_counts_as_one_who_may(
    carry_out: CarryOut, host: Callable[..., dict[str, str]]
) -> None:
    environ = host(docker="echo 'permission denied'; exit 1", sg="echo 28.1.0")
    assert looked_at(carry_out, environ)["message"] == "Docker 28.1.0"


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ("permission denied while trying to connect", "may not use Docker"),
        (
            "Cannot connect to the Docker daemon",
            "Docker does not answer: Cannot connect to the Docker daemon",
        ),
    ],
)
def test_a_docker_that_does_not_answer_says_why(
    carry_out: CarryOut, host: Callable[..., dict[str, str]], said: str, part: str
) -> None:
    answer = looked_at(carry_out, host(docker=f"echo '{said}' >&2; exit 1", sg="exit 1"))
    assert answer["state"] == "failed"
    assert part in answer["message"]


def test_a_user_who_may_not_is_put_into_the_group(
    carry_out: CarryOut, host: Callable[..., dict[str, str]]
) -> None:
    environ = host(
        docker='[ -e "$DONE" ] && echo 28.1.0 || { echo permission denied; exit 1; }',
        sg="exit 1",
        systemctl="exit 0",
        getent="exit 0",
        usermod='echo "$*" >"$DONE"',
        id='[ "$1" = -u ] && echo 1000 || echo me',
        sudo="exit 1",
    )
    answer = looked_at(carry_out, {**environ, "SUDO_USER": "me"}, steps.DOCKER_CHANGE)
    assert answer["state"] == "changed", answer
    assert Path(environ["DONE"]).read_text() == "--append --groups docker me\n"
