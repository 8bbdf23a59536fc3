"""A user's command runs as it was typed, on every host, and no host's end is hidden."""

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from backends.local.local_backend import local
from backends.local.processes import LocalTransport
from console.hosts import execute
from console.hosts.execute import Output
from contracts.errors import RequestError
from launch.hosts import HostError, Show, Transport
from launch.jobs import CHECKOUT
from launch.targets import Target
from tests.processes import all_end

Captured = pytest.CaptureFixture[str]


class Gone(LocalTransport):
    """A host that cannot be reached."""

    def stream(self, argv: Sequence[str], show: Show, *, timeout_s: float | None) -> Future[int | None]:
        raise HostError(host="", reason="connection refused\x07", remedy="start sshd")


def target_of(*transports: Transport) -> Target:
    hosts = local(len(transports), "cpu", [0])
    return dataclasses.replace(hosts, transports=transports)


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", program, *arguments]


@pytest.mark.parametrize(
    ("words", "line", "argv"),
    [
        (["ls", "-l", "a b", "$HOME;"], "", ("ls", "-l", "a b", "$HOME;")),
        (["cd /tmp && ls"], "", ("sh", "-c", "cd /tmp && ls")),
        (["nproc"], "", ("sh", "-c", "nproc")),
        ([], "ls | wc", ("sh", "-c", "ls | wc")),
    ],
)
def test_several_words_are_a_command_and_one_is_a_line_of_shell(
    words: list[str], line: str, argv: tuple[str, ...]
) -> None:
    assert execute.parse_command(words, line) == argv
    for none_or_two in (([], ""), (["ls"], "ls")):
        with pytest.raises(RequestError, match="say one command"):
            execute.parse_command(*none_or_two)


def test_words_arrive_as_themselves_on_every_host_and_its_exit_code_is_told(
    capsys: Captured, tmp_path: Path
) -> None:
    words = ["a b", "'", '"', "$HOME", "`id`", "é", "", "*", "a\nb", "\\", "--", "|;&<>"]
    argv = python("import sys; print(ascii(sys.argv[1:]))", *words)
    two = target_of(LocalTransport(), LocalTransport())
    assert execute.run(two, argv, grouped=True, timeout_s=60) == 0
    assert capsys.readouterr() == (f"[0-1] {words!a}\n", "")
    argv = ["sh", "-c", 'mkdir "$0" 2>/dev/null', str(tmp_path / "once")]
    assert execute.run(two, argv, grouped=False, timeout_s=60) == 1
    assert capsys.readouterr().err in ("exit codes: [0] 0  [1] 1\n", "exit codes: [0] 1  [1] 0\n")
    argv = ["sh", "-c", "echo begun; sleep 600"]
    assert execute.run(target_of(LocalTransport()), argv, grouped=False, timeout_s=0.5) == 1
    assert capsys.readouterr() == ("begun\n", "exit codes: [0] not done within 0.5 s, ended\n")
    some = target_of(LocalTransport(), Gone(), LocalTransport())
    assert execute.run(some, ["echo", "x"], grouped=False, timeout_s=60) == 1
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[0] x", "[2] x"]
    assert err == (
        f"[1] {some.hosts[1].name}: connection refused\\x07 → start sshd\n"
        "1 of 3 hosts did not run it to its end: 1\n"
    )
    assert execute.run(target_of(Gone(), Gone()), ["echo"], grouped=False, timeout_s=60) == 2
    assert execute.run(target_of(LocalTransport()), ["/no/such"], grouped=False, timeout_s=60) == 2
    assert "/no/such: No such file or directory" in capsys.readouterr().err


LOST = HostError(host="h", reason="connection lost")


@pytest.mark.parametrize(
    ("endings", "heard", "code", "said"),
    [
        ({0: 0, 1: 0}, set(), 0, []),
        ({0: 0, 2: -9, 1: 0, 3: -99}, {1}, 1, ["exit codes: [0-1] 0  [2] killed by SIGKILL  [3] killed by signal 99"]),
        ({0: 0, 2: 0, 4: 1}, set(), 1, ["exit codes: [0,2] 0  [4] 1"]),
        ({0: 0, 1: LOST}, set(), 1, ["1 of 2 hosts did not run it to its end: 1"]),
        ({0: LOST}, set(), 2, ["1 of 1 hosts did not run it to its end: 0"]),
        ({0: LOST}, {0}, 1, ["1 of 1 hosts did not run it to its end: 0"]),  # it broke off in the middle
    ],
)  # fmt: skip
def test_what_it_came_to_is_a_line_and_an_exit_code(
    endings: dict[int, execute.Ending], heard: set[int], code: int, said: list[str]
) -> None:
    assert (execute.exit_code(endings, heard), execute.verdict(endings, None)) == (code, said)


def test_an_interrupt_while_hosts_still_begin_ends_the_command_on_those_that_have(tmp_path: Path) -> None:
    begun, pid_file = threading.Event(), tmp_path / "pid"

    class Telling(LocalTransport):
        def stream(self, argv: Sequence[str], show: Show, *, timeout_s: float | None) -> Future[int | None]:
            return super().stream([*argv, str(pid_file)], lambda *_: begun.set(), timeout_s=timeout_s)

    class Interrupted(LocalTransport):
        def stream(self, argv: Sequence[str], show: Show, *, timeout_s: float | None) -> Future[int | None]:
            assert begun.wait(30)
            raise KeyboardInterrupt

    argv = ["sh", "-c", 'echo $$ > "$0"; echo begun; exec sleep 600']
    with pytest.raises(KeyboardInterrupt):
        execute.run(target_of(Telling(), Interrupted()), argv, grouped=False, timeout_s=None)
    assert all_end([int(pid_file.read_text())])


def test_a_reader_that_goes_away_ends_the_command(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    read, write = os.pipe()
    os.close(read)
    program = (
        "import sys; from console.hosts import execute; from backends.local.local_backend import local\n"
        "try: execute.run(local(1, 'cpu', [0]), ['sh', '-c', sys.argv[1]], grouped=False, timeout_s=None)\n"
        "except BrokenPipeError: sys.stderr.write('gone')\n"
        "import os; os._exit(0)"
    )
    line = f"echo $$ > {pid_file}; while :; do echo y; done"
    done = subprocess.run(
        python(program, line), stdout=write, stderr=subprocess.PIPE, timeout=60, check=False, cwd=CHECKOUT
    )
    os.close(write)
    assert done.stderr == b"gone"
    assert all_end([int(pid_file.read_text())])


def test_lines_come_behind_their_hosts_index_each_on_its_own_stream(capsys: Captured) -> None:
    shown = Output([0, 3])
    shown.show(0)("out", b"a\nb")
    shown.show(3)("err", b"bad\n")
    assert capsys.readouterr() == ("[0] a\n", "[3] bad\n")
    shown.show(0)("out", b"c\n")
    shown.show(3)("out", b"\x1b[2J no newline")
    shown.end()
    assert capsys.readouterr() == ("[0] bc\n[3] ␛[2J no newline\n", "")
    Output([3]).show(3)("out", b"a\n")  # of a single host as it is
    assert capsys.readouterr().out == "a\n"
