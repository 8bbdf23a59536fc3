"""What a host can do, over SSH or this machine itself: commands, their input and output, and a port of it here."""

import io
import os
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import asyncssh
import pytest

from backends.local.processes import LocalTransport
from backends.vm.connection import Ssh
from backends.vm.transport import SshTransport
from launch.hosts import Completed, HostError, Stream, Transport
from tests.backends.vm.conftest import Server, stand_in
from tests.processes import all_end, is_alive


def test_a_port_of_a_host_is_one_of_this_machines_loopback_while_it_is_wanted(
    serve: Callable[..., Server], ssh: Ssh
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:

        def echo() -> None:
            client, _ = there.accept()
            with client:
                client.sendall(client.recv(100).upper())

        thread = threading.Thread(target=echo)
        thread.start()
        with SshTransport(serve().access, ssh).forward("127.0.0.1", there.getsockname()[1]) as port:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
                client.sendall(b"words")
                assert client.recv(100) == b"WORDS"
            thread.join(30)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=30)


SHELLS_OWN = "'\"`$HOME !*?[a-z]{1,2}~#&;|<>(){}\\\t^=%-"
STARTS_A_CHILD = "sleep 600 & echo $$ $!; wait"


class Shown:
    def __init__(self) -> None:
        self.data: dict[Stream, bytes] = {"out": b"", "err": b""}
        self.line = threading.Event()

    def __call__(self, stream: Stream, data: bytes) -> None:
        self.data[stream] += data
        if b"\n" in self.data["out"]:
            self.line.set()

    def pids(self) -> list[int]:
        assert self.line.wait(30)
        return [int(word) for word in self.data["out"].split()]


@pytest.fixture(params=["local", "ssh"])
def host(
    request: pytest.FixtureRequest, serve: Callable[..., Server], ssh: Ssh
) -> SshTransport | LocalTransport:
    return LocalTransport() if request.param == "local" else SshTransport(serve().access, ssh)


def run(host: Transport, *argv: str, stdin: str = "", timeout_s: float = 60) -> Completed:
    return host.begin(argv, stdin, timeout_s=timeout_s).result(90)


def test_a_command_whose_time_is_over_or_that_is_cancelled_leaves_nothing_on_the_host(
    host: Transport, tmp_path: Path
) -> None:
    shown, cancelled, closed = Shown(), Shown(), Shown()
    future = host.stream(["sh", "-c", STARTS_A_CHILD], cancelled, timeout_s=None)
    silent, pids = ["sh", "-c", "echo $$; exec sleep 600 >&- 2>&-"], tmp_path / "pids"
    streams = [
        host.stream(["sh", "-c", STARTS_A_CHILD], shown, timeout_s=1.5),
        host.stream(silent, closed, timeout_s=1.5),
    ]
    assert run(host, "sh", "-c", f"exec >{pids}; {STARTS_A_CHILD}", timeout_s=1.5).exit_code is None
    assert [stream.result(60) for stream in streams] == [None, None]
    assert len(cancelled.pids()) == 2 and not future.done()
    assert future.cancel()
    assert all_end([*shown.pids(), *cancelled.pids(), *closed.pids(), *map(int, pids.read_text().split())])
    # What it has put into a session of its own stays.
    pid = int(run(host, "sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & sleep 0.2; echo $!").stdout)
    assert is_alive(pid)
    os.kill(pid, signal.SIGKILL)


def test_how_a_command_ended_is_told_as_this_machine_or_a_hosts_shell_tells_it(
    serve: Callable[..., Server], ssh: Ssh
) -> None:
    for way in ("begin", "stream"):
        with pytest.raises(OSError, match="No such file"):
            getattr(LocalTransport(), way)(
                ["/no/such"], Shown() if way == "stream" else "", timeout_s=60
            ).result(60)
    # The user's own login shell can't be another here, so sshd is told to run one in its place.
    shells = (f'ForceCommand {shell} -c "$SSH_ORIGINAL_COMMAND"' for shell in ("/bin/bash", "/bin/dash"))
    for host in (SshTransport(serve(line).access, ssh) for line in shells):
        assert run(host, "printf", "%s", SHELLS_OWN).stdout == SHELLS_OWN
    done = run(host, "no-such-command")
    assert done.exit_code == 127 and "no-such-command" in done.stderr
    assert run(host, "sh", "-c", "kill -KILL $$").exit_code == 137
    assert run(host, "sh", "-c", "kill -INT $$; echo not reached").stdout == ""


def test_a_connection_that_is_lost_in_the_middle_is_an_error_and_the_command_is_not_sent_again(
    serve: Callable[..., Server], ssh: Ssh
) -> None:
    server = serve()
    host, shown = SshTransport(server.access, ssh), Shown()
    future = host.stream(["sh", "-c", "echo $PPID >>$HOME/ran; echo $$ $$; sleep 600"], shown, timeout_s=None)
    pids = shown.pids()
    server.cut()
    with pytest.raises(
        HostError, match="host-0: the connection was lost while a command ran → .*not sent twice"
    ):
        future.result(30)
    assert all_end(pids)
    assert run(host, "wc", "-l", str(server.home / "ran")).stdout.split()[0] == "1"
    assert server.logins() == 2


# --- files to a host and back: whole or not there, links as links --------------------------------------------------


@pytest.fixture
def server(serve: Callable[..., Server]) -> Server:
    return serve()


@pytest.fixture
def remote(server: Server, ssh: Ssh) -> SshTransport:
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


def test_only_a_file_takes_the_place_of_a_file_and_what_cannot_be_copied_is_said(
    remote: SshTransport, server: Server, tree: Path, tmp_path: Path
) -> None:
    target, there = server.folder / "target", server.folder / "there"
    target.write_text("old")
    there.mkdir()
    remote.put(tree / "below" / "run.sh", str(target))
    assert (target.stat().st_size, target.stat().st_mode & 0o777) == (10_000_000, 0o750)
    os.mkfifo(server.home / "pipe")
    refused: list[tuple[Callable[[], None], str]] = [
        (lambda: remote.put(tree, str(there)), "there is a folder that is there already → name another"),
        (lambda: remote.put(tree, str(target)), "target is a file, and a folder would take its place"),
        (lambda: remote.get(str(server.home), tree), "tree is a folder that is there already; name another"),
        (lambda: remote.get("/no/such", tmp_path / "x"), "host-0: /no/such: No such file"),
        # sftp-server starts in the account's real home directory; only reading it is harmless in a test.
        (lambda: remote.get("~/no-such-file-of-this-test", tmp_path / "x"), "No such file"),
        (lambda: remote.put(tmp_path / "missing", str(server.folder / "x")), "No such file"),
        (
            lambda: remote.get(str(server.home), tmp_path / "x"),
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
    remote: SshTransport, small_disk: Path, tree: Path
) -> None:
    for source in (tree, tree / "below" / "run.sh"):
        with pytest.raises(HostError, match="target: no space is left on the disk → "):
            remote.put(source, str(small_disk / "target"))
        assert os.listdir(small_disk) == []


def test_a_connection_that_is_lost_in_the_middle_leaves_the_target_as_it_was(
    remote: SshTransport, server: Server, tree: Path, tmp_path: Path
) -> None:
    (server.folder / "target").write_text("old")
    with pytest.raises(HostError, match="the connection was lost while files were copied"):
        remote.put(tree / "below" / "run.sh", str(server.folder / "target"), lambda _: server.cut())
    assert (server.folder / "target").read_text() == "old"
    with pytest.raises(HostError, match="the connection was lost while files were copied"):
        remote.get(str(tree), tmp_path / "back", lambda _: server.cut())
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


def test_a_folder_is_the_same_there_and_back(
    remote: SshTransport, server: Server, tree: Path, tmp_path: Path
) -> None:
    sent, received = [0], [0]
    there = server.home / "a" / "b"
    remote.put(tree, str(there), lambda count: sent.__setitem__(0, sent[0] + count))
    assert listed(there) == listed(tree)
    remote.get(str(there), tmp_path / "back", lambda count: received.__setitem__(0, received[0] + count))
    assert listed(tmp_path / "back") == listed(tree)
    size = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    assert sent == received == [size]
    assert os.listdir(there.parent) == ["b"]
