"""The base of all images, pinned by digest in one file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest

from contracts.errors import RequestError
from launch.images import base

OLD, NEW = "sha256:" + "a" * 64, "sha256:" + "b" * 64


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "base.txt"
    path.write_text(f"python:3.12-slim-bookworm@{OLD}\n")
    return path


def registry(answer: Any) -> Any:
    """A Docker whose registry has that digest, or refuses."""

    def ask(tag: str) -> Any:
        assert tag == "python:3.12-slim-bookworm"
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(id=answer)

    return SimpleNamespace(images=SimpleNamespace(get_registry_data=ask))


def test_the_base_is_what_the_file_pins_unless_the_environment_names_another(file: Path) -> None:
    assert base.read({}, file) == f"python:3.12-slim-bookworm@{OLD}"
    assert base.read({base.VARIABLE: "stand-in:1"}, file) == "stand-in:1"


@pytest.mark.parametrize("text", ["python:3.12", "", f"python@{OLD}", f"python:3@{OLD}\nmore"])
def test_a_base_that_is_not_pinned_is_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(RequestError, match="is no base by tag and digest"):
        base.read({}, file)


def test_a_base_that_moved_is_written_down_and_old_and_new_are_shown(file: Path) -> None:
    said: list[str] = []
    assert base.update(registry(NEW), said.append, file)
    assert file.read_text() == f"python:3.12-slim-bookworm@{NEW}\n"
    assert OLD in said[0]
    assert NEW in said[0]
    assert not base.update(registry(NEW), said.append, file)
    assert [path.name for path in file.parent.iterdir()] == ["base.txt"]


def test_where_the_registry_cannot_be_asked_the_file_stays_as_it_is(file: Path) -> None:
    with pytest.raises(RequestError, match="asking the registry for python:3.12-slim-bookworm: no such host"):
        base.update(registry(docker.errors.APIError("no such host")), print, file)
    assert OLD in file.read_text()
