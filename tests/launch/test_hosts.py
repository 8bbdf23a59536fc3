"""This machine as a host: a command's output and exit code come back, and nothing outlives its time."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from launch.hosts import (
    Agent,
    Completed,
    HostError,
    HostsError,
    LocalTransport,
    Stream,
    all_or_error,
    ask_all,
)

HOST = LocalTransport()
SLEEPS_IN_A_CHILD = ["sh", "-c", "sleep 600 & echo $!; wait"]
SHORT_S = 1.0
"""The time of what is to run out of it: long enough for a shell to start on a busy machine."""


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def run(program: str, stdin: str = "", timeout_s: float = 60) -> Completed:
    return HOST.begin(python(program), stdin, timeout_s=timeout_s).result(60)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends_soon(pid: int) -> bool:
    until_s = time.monotonic() + 30
    while is_alive(pid):
        if time.monotonic() > until_s:
            os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.02)
    return True


class Shown:
    """What a command said, as it came."""

    def __init__(self) -> None:
        self.data: dict[Stream, bytes] = {"out": b"", "err": b""}
        self.came = threading.Event()

    def __call__(self, stream: Stream, data: bytes) -> None:
        self.data[stream] += data
        self.came.set()


def test_a_command_gets_its_words_and_input_as_they_are_and_its_answer_comes_back_whole() -> None:
    words = ["a b", "'", '"', "$HOME", "é", "", "*", "a\nb"]
    program = (
        "import os, sys; print(sys.argv[1:], input(), os.getsid(0) == os.getpid()); sys.stdout.flush();"
        "sys.stdout.buffer.write(b'a\\xffb'); print('e', file=sys.stderr); sys.exit(3)"
    )
    done = HOST.begin([*python(program), *words], "in\n", timeout_s=60).result(60)
    # In a session of its own, so out of reach of the terminal's Ctrl-C; a byte that is no text breaks nothing.
    assert done == Completed(exit_code=3, stdout=f"{words} in True\na\ufffdb", stderr="e\n")
    assert run("", "x" * 1_000_000).exit_code == 0, "input that a command does not read is no error"


def test_commands_run_side_by_side_and_one_that_does_not_end_in_time_leaves_nothing(tmp_path: Path) -> None:
    program = ["sh", "-c", 'sleep 600 & echo $! > "$0"; wait', str(tmp_path / "pid")]
    first = HOST.begin(program, "", timeout_s=SHORT_S)
    assert HOST.begin(["echo", "1"], "", timeout_s=60).result(60).stdout == "1\n"
    assert not first.done()
    assert first.result(30).exit_code is None
    assert ends_soon(int((tmp_path / "pid").read_text()))


def test_a_command_that_is_not_there_cannot_be_run() -> None:
    with pytest.raises(OSError, match="No such file"):
        HOST.begin(["/no/such/command"], "", timeout_s=60).result(60)
    with pytest.raises(OSError, match="No such file"):
        HOST.stream(["/no/such/command"], Shown(), timeout_s=60).result(60)


def test_a_stream_hands_out_both_outputs_as_they_come_and_one_that_is_cancelled_ends_all_that_it_started() -> (
    None
):
    shown = Shown()
    program = "import sys; print('o', flush=True); print('e', file=sys.stderr); sys.exit(7)"
    assert HOST.stream(python(program), shown, timeout_s=60).result(60) == 7
    assert shown.data == {"out": b"o\n", "err": b"e\n"}
    shown = Shown()
    future = HOST.stream(SLEEPS_IN_A_CHILD, shown, timeout_s=60)
    assert shown.came.wait(30)
    assert future.cancel()
    assert ends_soon(int(shown.data["out"]))
    with pytest.raises(CancelledError):
        future.result()


def test_a_stream_that_is_not_taken_is_not_read_from_the_command(tmp_path: Path) -> None:
    mark, may_go_on = tmp_path / "written", threading.Event()
    program = f"import sys\nsys.stdout.buffer.write(bytes(50_000_000))\nsys.stdout.flush()\nopen({str(mark)!r}, 'w')"
    taken = [0]

    def take(stream: Stream, data: bytes) -> None:
        assert may_go_on.wait(60)
        taken[0] += len(data)

    future = HOST.stream(python(program), take, timeout_s=60)
    assert run("import time; time.sleep(0.5)").exit_code == 0
    assert not mark.exists()
    may_go_on.set()
    assert future.result(60) == 0
    assert (taken[0], mark.exists()) == (50_000_000, True)


def test_a_stream_whose_time_is_over_ends_the_command_also_when_its_output_is_closed() -> None:
    shown = Shown()
    assert HOST.stream(SLEEPS_IN_A_CHILD, shown, timeout_s=SHORT_S).result(60) is None
    assert ends_soon(int(shown.data["out"]))
    closed = ["sh", "-c", "echo $$; exec sleep 600 >&- 2>&-"]
    shown = Shown()
    assert HOST.stream(closed, shown, timeout_s=SHORT_S).result(60) is None
    assert ends_soon(int(shown.data["out"]))


def test_an_error_of_him_who_takes_a_stream_ends_it() -> None:
    pids: list[int] = []

    def refuse(stream: Stream, data: bytes) -> None:
        pids.append(int(data))
        raise ValueError("the terminal is gone")

    with pytest.raises(ValueError, match="terminal"):
        HOST.stream(SLEEPS_IN_A_CHILD, refuse, timeout_s=60).result(60)
    assert ends_soon(pids[0])


def test_a_copy_is_whole_under_its_name_or_what_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\x00\xff")
    (tmp_path / "file").chmod(0o750)
    (tmp_path / "tree/below").mkdir(parents=True)
    (tmp_path / "tree/below/file").write_text("x")
    (tmp_path / "tree/link").symlink_to("below/file")
    there = tmp_path / "there"
    HOST.put(tmp_path / "file", str(there / "file"))
    HOST.put(tmp_path / "tree/below/file", str(there / "file"))
    HOST.get(str(tmp_path / "tree"), there / "tree")
    assert ((there / "file").read_text(), os.readlink(there / "tree/link")) == ("x", "below/file")
    for source, target in (("tree", "tree"), ("tree", "file"), ("missing", "file")):
        with pytest.raises((FileExistsError, FileNotFoundError)):
            HOST.put(tmp_path / source, str(there / target))
    assert sorted(os.listdir(there)) == ["file", "tree"]
    assert ((there / "file").read_text(), sorted(os.listdir(there / "tree"))) == ("x", ["below", "link"])


MakeAgent = Callable[..., Agent]


def answered(make_agent: MakeAgent, answer: Any) -> str:
    def give(verb: str, request: dict[str, Any]) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(HostError) as error:
        make_agent(give, host="w-3").ask("start", {}, timeout_s=7)
    return str(error.value)


def said(stdout: str, stderr: str = "", exit_code: int | None = 1) -> Completed:
    return Completed(exit_code=exit_code, stdout=stdout, stderr=stderr)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (OSError(2, "No such file"), "w-3: cannot run the agent: [Errno 2] No such file"),
        (said("", exit_code=None), "w-3: no answer to start within 7 s"),
        (said("", "a\nbash: python3: not found\n", 127), "(exit code 127): bash: python3: not found"),
        (said(""), "w-3: start was not answered by an agent (exit code 1): "),
        (said("5"), "w-3: start was not answered by an agent (exit code 1): 5"),
        (said("[]"), "w-3: start was not answered by an agent (exit code 1): []"),
        (said("welcome\n{}"), "w-3: start was not answered by an agent (exit code 1): {}"),
        ({"ok": False, "error": {"message": "m", "remedy": "r"}}, "w-3: m → r"),
        ({"ok": False, "error": {"message": "m", "remedy": None}}, "w-3: m"),
        ({"ok": False}, "w-3: unknown error"),
    ],
)
def test_what_is_no_good_answer_is_an_error_that_names_the_host(
    make_agent: MakeAgent, answer: Any, message: str
) -> None:
    assert message in answered(make_agent, answer)


def test_hosts_are_asked_all_at_once_and_answer_in_their_own_order(make_agent: MakeAgent) -> None:
    everyone = threading.Barrier(5)

    def give(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        everyone.wait(timeout=30)  # would break if one were asked after another
        return {"asked": (verb, request)}

    agents = [make_agent(give, host=f"w-{index}", root="/var/agent") for index in range(5)]
    answers = ask_all(agents, "status", [{"index": index} for index in range(5)])
    assert [answer["asked"] for answer in all_or_error("all:", answers)] == [
        ["status", {"version": 1, "root": "/var/agent", "index": index}] for index in range(5)
    ]


def test_one_hosts_error_hides_no_others(make_agent: MakeAgent) -> None:
    def give(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        return {
            "ok": request["index"] == 1,
            "error": {"message": f"reason {request['index']}", "remedy": "mend it"},
        }

    agents = [make_agent(give, host=f"w-{index}") for index in range(3)]
    answers = ask_all(agents, "start", [{"index": index} for index in range(3)])
    with pytest.raises(HostsError) as error:
        all_or_error("not started:", answers)
    assert str(error.value).splitlines() == [
        "not started:",
        "  w-0: reason 0 → mend it",
        "  w-2: reason 2 → mend it",
    ]
