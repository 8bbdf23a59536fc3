"""What a host can do, over SSH or this machine itself: commands, their input and output, and a port of it here."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import asyncssh
import pytest

from launch.hosts import Completed, HostError, LocalTransport, Stream, Transport
from launch.ssh import transport
from launch.ssh.connection import Ssh
from launch.ssh.transport import SshTransport
from tests.launch.processes import all_end, is_alive
from tests.launch.ssh.conftest import Server, stand_in


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


def test_words_and_input_arrive_as_themselves_and_the_answer_comes_back_whole(host: Transport) -> None:
    words = ["", " ", "a b", "line\nline\n", "ä€😀", "-n", "--", SHELLS_OWN, "'" * 20_000, "x" * 100_000]
    done = run(host, "printf", "%s\\0", *words)
    assert done.stdout.split("\0")[:-1] == words
    assert (done.exit_code, done.stderr) == (0, "")
    text = "ä\n\n" + "x" * 200_000 + "\n"
    done = run(host, "sh", "-c", "cat; echo e >&2; exit 3", stdin=text)
    assert done == Completed(exit_code=3, stdout=text, stderr="e\n")
    assert run(host, "true", stdin="x" * 300_000).exit_code == 0, "what is not read is no error"
    assert run(host, "cat").stdout == ""
    assert run(host, "printf", "a\\377b").stdout == "a\ufffdb"  # what is no text does not break the answer


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


def test_a_stream_that_is_not_taken_is_held_back_on_the_host_and_an_error_of_who_takes_it_ends_it(
    host: Transport, tmp_path: Path
) -> None:
    may_go_on, taken, said = threading.Event(), [0], tmp_path / "said"

    def take(stream: Stream, data: bytes) -> None:
        assert may_go_on.wait(60)
        taken[0] += len(data)

    future = host.stream(["sh", "-c", f"head -c 50000000 /dev/zero; touch {said}"], take, timeout_s=60)
    assert run(host, "sleep", "0.5").exit_code == 0
    assert not said.exists()
    may_go_on.set()
    assert future.result(60) == 0
    assert taken[0] == 50_000_000
    pids: list[int] = []

    def refuse(stream: Stream, data: bytes) -> None:
        pids.extend(int(word) for word in data.split())
        raise BrokenPipeError("the terminal is gone")

    with pytest.raises(BrokenPipeError, match="terminal"):
        host.stream(["sh", "-c", STARTS_A_CHILD], refuse, timeout_s=None).result(60)
    assert all_end(pids)


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


def test_a_stream_that_is_cancelled_or_whose_launcher_is_gone_leaves_nothing_on_the_host(
    serve: Callable[..., Server], user_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "KEEPER", transport.KEEPER.replace("sleep 5", "sleep 0.5"))
    access, stubborn = serve().access, f'trap "" TERM HUP; {STARTS_A_CHILD}'
    cancelled, lost = Shown(), Shown()
    with Ssh() as ssh:
        host = SshTransport(access, ssh)
        future = host.stream(["sh", "-c", stubborn], cancelled, timeout_s=None)
        host.stream(["sh", "-c", STARTS_A_CHILD], lost, timeout_s=None)
        pids = lost.pids()
        assert len(cancelled.pids()) == 2
        assert future.cancel()
    assert all_end([*cancelled.pids(), *pids])


def test_a_host_that_ends_a_command_before_it_has_come_is_heard_out(ssh: Ssh, user_home: Path) -> None:
    def refuse(process: asyncssh.SSHServerProcess[str]) -> None:
        process.stderr.write("this account is closed")
        process.exit(3)

    with stand_in(ssh, user_home, process_factory=refuse) as access:
        done = run(SshTransport(access, ssh), "true", stdin="x")
    assert done == Completed(exit_code=3, stdout="", stderr="this account is closed")


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
