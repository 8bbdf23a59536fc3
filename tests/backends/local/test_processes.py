"""Files on this machine's own disk; its commands are tested in `vm/test_transport.py`, beside those over SSH."""

import os
from pathlib import Path

import pytest

from backends.local.processes import LocalTransport, copy_folder


def test_a_copy_is_whole_under_its_name_or_what_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\x00\xff")
    (tmp_path / "file").chmod(0o750)
    (tmp_path / "tree/below").mkdir(parents=True)
    (tmp_path / "tree/below/file").write_text("x")
    (tmp_path / "tree/link").symlink_to("below/file")
    there, host = tmp_path / "there", LocalTransport()
    host.put(tmp_path / "file", str(there / "file"))
    host.put(tmp_path / "tree/below/file", str(there / "file"))
    host.get(str(tmp_path / "tree"), there / "tree")
    assert ((there / "file").read_text(), os.readlink(there / "tree/link")) == ("x", "below/file")
    for source, target in (("tree", "tree"), ("tree", "file"), ("missing", "file")):
        with pytest.raises((FileExistsError, FileNotFoundError)):
            host.put(tmp_path / source, str(there / target))
    assert sorted(os.listdir(there)) == ["file", "tree"]
    assert ((there / "file").read_text(), sorted(os.listdir(there / "tree"))) == ("x", ["below", "link"])


def test_what_cannot_be_copied_is_named_and_neither_a_device_nor_a_circle_of_links_is_read_for_ever(
    tmp_path: Path,
) -> None:
    tree = tmp_path / "tree"
    (tree / "a").mkdir(parents=True)
    odd = os.fsdecode(b"caf\xe9\n")
    (tree / "a" / odd).write_text("x")
    (tree / "link").symlink_to("a")
    (tree / "dangling").symlink_to("nowhere")
    host = LocalTransport()
    host.put(tree, str(tmp_path / "there"))
    assert (tmp_path / "there" / "a" / odd).read_text() == "x"
    assert os.readlink(tmp_path / "there" / "dangling") == "nowhere"
    with pytest.raises(OSError, match=r"^\[Errno 2\] No such file or directory: '.*/dangling'$"):
        copy_folder(tree, tmp_path / "followed", follow_links=True)
    (tree / "dangling").unlink()
    copy_folder(tree, tmp_path / "followed", follow_links=True)
    assert (tmp_path / "followed" / "link" / odd).read_text() == "x"
    for name in ("x", "y"):
        (tree / "a" / name).symlink_to("..")
    with pytest.raises(OSError, match=r"tree/a/[xy] is a link that leads in a circle$"):
        copy_folder(tree, tmp_path / "circle", follow_links=True)
    os.mkfifo(tree / "pipe")
    for source in (tree, tree / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match=r"^[^\[]* is neither a file nor a folder nor a link$"):
            host.put(source, str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
