"""Files to a host and back: whole or not there, links as links, and nothing beside the target."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import asyncssh
import pytest

from launch.hosts import HostError
from launch.ssh.connection import Ssh
from launch.ssh.transport import SshTransport
from tests.launch.ssh.conftest import Server, stand_in


@pytest.fixture
def server(serve: Callable[..., Server]) -> Server:
    return serve()


@pytest.fixture
def host(server: Server, ssh: Ssh) -> SshTransport:
    return SshTransport(server.access, ssh)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "below" / "empty").mkdir(parents=True)
    (tree / "below" / "run.sh").write_text("x" * 10_000_000)
    (tree / "below" / "run.sh").chmod(0o750)
    (tree / "ä \n*").write_bytes(b"\x00")
    os.symlink("below/run.sh", tree / "link")
    os.symlink("/nowhere", tree / "dangling")
    (tree / os.fsdecode(b"\xff")).write_text("no UTF-8")
    for number in range(40):
        (tree / "below" / f"{number}").write_text(str(number))
    (tree / "below" / "empty").chmod(0o555)
    return tree


def listed(folder: Path) -> str:
    program = 'cd "$1" && find . -printf "%p %y %m %l\\n" | LC_ALL=C sort && find . -type f -exec sha256sum {} + | sort'
    done = subprocess.run(["sh", "-c", program, "sh", str(folder)], check=True, capture_output=True)
    return done.stdout.decode(errors="surrogateescape")


def test_a_folder_is_the_same_there_and_back(
    host: SshTransport, server: Server, tree: Path, tmp_path: Path
) -> None:
    sent, received = [0], [0]
    there = server.home / "a" / "b"
    host.put(tree, str(there), lambda count: sent.__setitem__(0, sent[0] + count))
    assert listed(there) == listed(tree)
    host.get(str(there), tmp_path / "back", lambda count: received.__setitem__(0, received[0] + count))
    assert listed(tmp_path / "back") == listed(tree)
    size = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    assert sent == received == [size]
    assert os.listdir(there.parent) == ["b"]


def test_only_a_file_takes_the_place_of_a_file_and_what_cannot_be_copied_is_said(
    host: SshTransport, server: Server, tree: Path, tmp_path: Path
) -> None:
    target, there = server.folder / "target", server.folder / "there"
    target.write_text("old")
    there.mkdir()
    host.put(tree / "below" / "run.sh", str(target))
    assert (target.stat().st_size, target.stat().st_mode & 0o777) == (10_000_000, 0o750)
    os.mkfifo(server.home / "pipe")
    refused: list[tuple[Callable[[], None], str]] = [
        (lambda: host.put(tree, str(there)), "there is a folder that is there already → name another"),
        (lambda: host.put(tree, str(target)), "target is a file, and a folder would take its place"),
        (lambda: host.get(str(server.home), tree), "File exists"),
        (lambda: host.get("/no/such", tmp_path / "x"), "host-0: /no/such: No such file"),
        # sftp-server starts in the account's real home directory; only reading it is harmless in a test.
        (lambda: host.get("~/no-such-file-of-this-test", tmp_path / "x"), "No such file"),
        (lambda: host.put(tmp_path / "missing", str(server.folder / "x")), "No such file"),
        (
            lambda: host.get(str(server.home), tmp_path / "x"),
            "pipe is neither a file nor a folder nor a link",
        ),
    ]
    for copy, said in refused:
        with pytest.raises((HostError, FileNotFoundError, FileExistsError), match=said):
            copy()
    assert target.stat().st_size == 10_000_000 and list(there.iterdir()) == []
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".") or name == "x"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_said_and_nothing_is_left_there(
    host: SshTransport, small_disk: Path, tree: Path
) -> None:
    for source in (tree, tree / "below" / "run.sh"):
        with pytest.raises(HostError, match="target: no space is left on the disk → "):
            host.put(source, str(small_disk / "target"))
        assert os.listdir(small_disk) == []


def test_a_connection_that_is_lost_in_the_middle_leaves_the_target_as_it_was(
    host: SshTransport, server: Server, tree: Path, tmp_path: Path
) -> None:
    (server.folder / "target").write_text("old")
    with pytest.raises(HostError, match="the connection was lost while files were copied"):
        host.put(tree / "below" / "run.sh", str(server.folder / "target"), lambda _: server.cut())
    assert (server.folder / "target").read_text() == "old"
    with pytest.raises(HostError, match="the connection was lost while files were copied"):
        host.get(str(tree), tmp_path / "back", lambda _: server.cut())
    assert sorted(os.listdir(tmp_path)) == ["server-0", "tree", "user"]


class Hostile(asyncssh.SFTPServer):
    """Says of every folder that it holds what it does not."""

    names: tuple[tuple[str, int], ...] = ()

    def stat(self, path: bytes) -> asyncssh.SFTPAttrs:
        return asyncssh.SFTPAttrs(permissions=0o040755 if path == b"/folder" else 0o100644)

    async def scandir(self, path: bytes) -> AsyncIterator[asyncssh.SFTPName]:
        for name, mode in self.names:
            yield asyncssh.SFTPName(name.encode(), attrs=asyncssh.SFTPAttrs(permissions=mode))

    def readlink(self, path: bytes) -> bytes:
        return b"../victim"

    def open(self, path: bytes, pflags: int, attrs: asyncssh.SFTPAttrs) -> io.BytesIO:
        return io.BytesIO(b"evil")


@pytest.mark.parametrize(
    "names",
    [
        [("../evil", 0o100644)],
        [("", 0o100644)],
        [("link", 0o120777), ("link", 0o040755)],
        [("link", 0o120777), *((f"{number}", 0o100644) for number in range(40)), ("link", 0o100644)],
        [("nul\0", 0o100644)],
    ],
)
def test_a_host_that_lies_about_its_files_writes_nothing_outside_the_target(
    names: list[tuple[str, int]], ssh: Ssh, user_home: Path, tmp_path: Path
) -> None:
    (tmp_path / "victim").write_text("mine")
    before = sorted(os.listdir(tmp_path))
    lying = type("Lying", (Hostile,), {"names": tuple(names)})
    with stand_in(ssh, user_home, sftp_factory=lying) as access, pytest.raises((HostError, FileExistsError)):
        SshTransport(access, ssh).get("/folder", tmp_path / "target")
    assert (tmp_path / "victim").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == before
