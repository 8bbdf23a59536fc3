"""Files of a host are read in pieces that fit together, written whole, and removed without surprises."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host.agent.files import slice_of as piece_of


def test_several_files_are_read_in_one_journey(agent: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("first")
    (tmp_path / "b").write_text("second")
    paths = [str(tmp_path / name) for name in ("a", "no", "b", "a/below")]
    texts = [file["text"] for file in agent("read", paths=paths, limit_bytes=100)["files"]]
    assert texts == ["first", None, "second", None]
    files = agent("read", paths=paths[:1], offsets=[-3], limit_bytes=100)["files"]
    assert files == [{"text": "rst", "offset": 2, "next_offset": 5, "size": 5}]


@given(text=st.text(max_size=200), limit=st.integers(4, 50))
def test_the_pieces_of_a_text_are_the_text(
    tmp_path_factory: pytest.TempPathFactory, text: str, limit: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "pieces"
    path.write_bytes(text.encode(errors="ignore"))
    found, offset = "", 0
    while (piece := piece_of(str(path), offset, limit))["text"]:
        found += piece["text"]
        offset = piece["next_offset"]
    assert found == text.encode(errors="ignore").decode()
    assert offset == piece["size"]


def test_the_end_of_a_text_begins_with_a_whole_character(agent: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("xää€")
    (file,) = agent("read", paths=[str(tmp_path / "a")], offsets=[-4], limit_bytes=100)["files"]
    assert (file["text"], file["offset"], file["next_offset"]) == ("€", 5, 8)


def test_a_character_whose_rest_is_not_written_yet_waits(agent: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("loss é".encode()[:-1])
    (file,) = agent("read", paths=[str(tmp_path / "a")], limit_bytes=100)["files"]
    assert (file["text"], file["next_offset"], file["size"]) == ("loss ", 5, 6)


def test_an_offset_past_the_end_reads_nothing_and_tells_the_size(agent: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abc")
    (file,) = agent("read", paths=[str(tmp_path / "a")], offsets=[9], limit_bytes=100)["files"]
    assert file == {"text": "", "offset": 3, "next_offset": 3, "size": 3}


def test_many_large_files_do_not_make_an_endless_answer(agent: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * (9 << 20))
    files = agent("read", paths=[str(tmp_path / "a")] * 3, limit_bytes=16 << 20)["files"]
    assert [len(file["text"]) >> 20 for file in files] == [9, 7, 0]


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_refused_and_not_waited_for(agent: Any, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    status, message = agent.refusal("read", paths=[str(path)], limit_bytes=100)
    assert (status, f"{path} is not a file" in message) == (1, True)


def test_offsets_that_do_not_go_with_the_paths_are_refused(agent: Any) -> None:
    assert agent.refusal("read", paths=["/a", "/b"], offsets=[0], limit_bytes=100)[0] == 2
    assert agent.refusal("read", paths=["/a", "b"], limit_bytes=100)[0] == 2


def test_what_is_written_is_there_as_it_was_said_with_nothing_beside_it(
    any_agent: Any, tmp_path: Path
) -> None:
    path, text = tmp_path / "new" / "deeper" / "file", "a\r\n\0 $(ls) '\" ä\n"
    any_agent("write", path=str(path), text="before")
    any_agent("write", path=str(path), text=text)
    assert path.read_bytes() == text.encode()
    assert any_agent("list", path=str(path.parent))["names"] == ["file"]
    (file,) = any_agent("read", paths=[str(path)], limit_bytes=100)["files"]
    assert file["text"] == text


def test_a_write_that_finds_no_room_leaves_the_old_file(agent: Any, small_disk: Path) -> None:
    agent("write", path=str(small_disk / "a"), text="old")
    status, message = agent.refusal("write", path=str(small_disk / "a"), text="x" * (1 << 20))
    assert (status, "No space left" in message) == (1, True)
    assert [path.name for path in small_disk.iterdir()] == ["a"]
    assert (small_disk / "a").read_text() == "old"


def test_a_removed_file_is_gone_and_may_be_removed_again(agent: Any, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    agent("write", path=str(folder / "a"), text="")
    (folder / "link").symlink_to("/etc")
    status, message = agent.refusal("remove", path=str(folder))
    assert (status, "not empty" in message) == (1, True)
    for path in [folder / "a", folder / "link", folder, folder, folder / "a"]:
        agent("remove", path=str(path))
    assert not folder.exists() and Path("/etc").is_dir()
    assert agent("list", path=str(folder))["names"] == []
