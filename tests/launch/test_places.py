"""Where a copy goes is what a user of `cp` expects, and nothing is replaced or mixed unasked."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.errors import RequestError
from launch.commands.copies import Copy, Kind, Place, decide, kind_of, size_of


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize(
    ("path", "there", "inside", "goes_to"),
    [
        ("/a/new", "nothing", "nothing", "/a/new"),
        ("/a/new/", "nothing", "nothing", "/a/new/source"),
        ("/a", "folder", "nothing", "/a/source"),
        ("/", "folder", "nothing", "/source"),
        ("rel", "nothing", "nothing", "rel"),
    ],
)
def test_a_copy_goes_into_a_folder_that_is_there_and_else_under_the_name_given(
    kind: Kind, path: str, there: Kind, inside: Kind, goes_to: str
) -> None:
    place = Place(path=path, kind=there, inside=inside)
    assert decide("source", kind, place, force=False) == Copy(path=goes_to, replaces=False)


def test_a_file_takes_the_place_of_a_file() -> None:
    assert not decide("f", "file", Place(path="/f", kind="file", inside="nothing"), force=False).replaces
    assert not decide("f", "file", Place(path="/d", kind="folder", inside="file"), force=False).replaces


def test_a_folder_takes_the_place_of_a_folder_by_force_alone() -> None:
    place = Place(path="/d", kind="folder", inside="folder")
    assert decide("s", "folder", place, force=True) == Copy(path="/d/s", replaces=True)
    with pytest.raises(RequestError, match="/d/s is there already; --force replaces"):
        decide("s", "folder", place, force=False)


@pytest.mark.parametrize(
    ("kind", "place", "said"),
    [
        (
            "folder",
            Place(path="/f", kind="file", inside="nothing"),
            "/f is a file and the source is a folder",
        ),
        (
            "file",
            Place(path="/d", kind="folder", inside="folder"),
            "/d/s is a folder and the source is a file",
        ),
        ("file", Place(path="/f/", kind="file", inside="nothing"), "/f/ is a file, not a folder"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_a_file_and_a_folder_never_take_each_others_place(
    kind: Kind, place: Place, said: str, force: bool
) -> None:
    with pytest.raises(RequestError, match=said):
        decide("s", kind, place, force=force)


def test_the_size_of_a_folder_is_that_of_its_files_and_links_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "d" / "a").write_bytes(b"12")
    (tmp_path / "d" / "e" / "b").write_bytes(b"345")
    (tmp_path / "d" / "loop").symlink_to(tmp_path / "d")
    (tmp_path / "dangling").symlink_to("/no/such")
    assert size_of(tmp_path / "d") == 5
    assert size_of(tmp_path / "d" / "a") == 2
    assert size_of(tmp_path / "none") == 0
    assert [kind_of(tmp_path / name) for name in ("d", "d/a", "none", "dangling")] == [
        "folder",
        "file",
        "nothing",
        "file",
    ]
