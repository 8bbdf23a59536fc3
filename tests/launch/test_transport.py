"""This machine as a host: a command's output and exit code come back, and nothing outlives its time."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from launch.hosts import Completed, LocalTransport, Stream

HOST = LocalTransport()
SLEEPS_IN_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


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


def test_a_commands_words_reach_it_unchanged() -> None:
    words = ["a b", "'", '"', "$HOME", "é", "", "*", "a\nb"]
    done = HOST.begin([*python("import sys; print(sys.argv[1:])"), *words], "", timeout_s=60).result(60)
    assert done == Completed(exit_code=0, stdout=f"{words}\n", stderr="")


def test_input_output_errors_and_exit_code_come_back() -> None:
    done = run("import sys; print(input()); print('e', file=sys.stderr); sys.exit(3)", "in\n")
    assert done == Completed(exit_code=3, stdout="in\n", stderr="e\n")


def test_bytes_that_are_no_text_do_not_break_the_answer() -> None:
    assert run("import sys; sys.stdout.buffer.write(b'a\\xffb')").stdout == "a\ufffdb"


def test_input_that_a_command_does_not_read_is_no_error() -> None:
    assert run("", "x" * 1_000_000).exit_code == 0


def test_commands_are_begun_side_by_side() -> None:
    first = HOST.begin(python("import time; time.sleep(600)"), "", timeout_s=2)
    assert run("print(1)").stdout == "1\n"
    assert not first.done()
    assert first.result(30).exit_code is None


def test_a_command_that_does_not_end_in_time_has_no_exit_code_and_leaves_nothing(tmp_path: Path) -> None:
    program = SLEEPS_IN_A_CHILD.replace(
        "print(child.pid", f"print(child.pid, file=open({str(tmp_path / 'pid')!r}, 'w')"
    )
    assert run(program, timeout_s=2).exit_code is None
    assert ends_soon(int((tmp_path / "pid").read_text()))


def test_a_command_that_is_not_there_cannot_be_run() -> None:
    with pytest.raises(OSError, match="No such file"):
        HOST.begin(["/no/such/command"], "", timeout_s=60).result(60)
    with pytest.raises(OSError, match="No such file"):
        HOST.stream(["/no/such/command"], Shown(), timeout_s=60).result(60)


def test_a_command_is_out_of_reach_of_the_terminals_ctrl_c() -> None:
    assert run("import os; print(os.getsid(0) == os.getpid())").stdout == "True\n"


def test_a_stream_hands_out_both_outputs_before_the_command_ends() -> None:
    shown = Shown()
    program = "import sys; print('o', flush=True); print('e', file=sys.stderr); sys.exit(7)"
    assert HOST.stream(python(program), shown, timeout_s=60).result(60) == 7
    assert shown.data == {"out": b"o\n", "err": b"e\n"}
    shown = Shown()
    future = HOST.stream(python("import time; print('o', flush=True); time.sleep(600)"), shown, timeout_s=60)
    assert shown.came.wait(30)
    assert future.cancel()


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


def test_a_stream_that_is_cancelled_ends_the_command_and_what_it_started() -> None:
    shown = Shown()
    future = HOST.stream(python(SLEEPS_IN_A_CHILD), shown, timeout_s=60)
    assert shown.came.wait(30)
    assert future.cancel()
    assert ends_soon(int(shown.data["out"]))
    with pytest.raises(CancelledError):
        future.result()


def test_a_stream_whose_time_is_over_ends_the_command_also_when_its_output_is_closed() -> None:
    shown = Shown()
    assert HOST.stream(python(SLEEPS_IN_A_CHILD), shown, timeout_s=2).result(60) is None
    assert ends_soon(int(shown.data["out"]))
    program = "import os, time; print(os.getpid(), flush=True); os.close(1); os.close(2); time.sleep(600)"
    shown = Shown()
    assert HOST.stream(python(program), shown, timeout_s=2).result(60) is None
    assert ends_soon(int(shown.data["out"]))


def test_an_error_of_him_who_takes_a_stream_ends_it() -> None:
    pids: list[int] = []

    def refuse(stream: Stream, data: bytes) -> None:
        pids.append(int(data))
        raise ValueError("the terminal is gone")

    with pytest.raises(ValueError, match="terminal"):
        HOST.stream(python(SLEEPS_IN_A_CHILD), refuse, timeout_s=60).result(60)
    assert ends_soon(pids[0])


def test_a_file_is_copied_to_a_folder_that_is_made_for_it_and_replaces_one(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"\x00\xff")
    (tmp_path / "source").chmod(0o750)
    target = tmp_path / "a" / "b" / "target"
    HOST.put(tmp_path / "source", str(target))
    (tmp_path / "source").write_bytes(b"2")
    HOST.put(tmp_path / "source", str(target))
    assert (target.read_bytes(), target.stat().st_mode & 0o777) == (b"2", 0o750)
    assert os.listdir(target.parent) == ["target"]


def test_a_folder_comes_with_all_that_is_in_it_and_its_links_stay_links(tmp_path: Path) -> None:
    (tmp_path / "source" / "below").mkdir(parents=True)
    (tmp_path / "source" / "below" / "file").write_text("x")
    (tmp_path / "source" / "link").symlink_to("below/file")
    HOST.get(str(tmp_path / "source"), tmp_path / "target")
    assert (tmp_path / "target/below/file").read_text() == "x"
    assert os.readlink(tmp_path / "target/link") == "below/file"


def test_a_folder_is_not_mixed_with_one_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="target is a folder that is there already; name another"):
        HOST.put(tmp_path / "source", str(tmp_path / "target"))
    with pytest.raises(FileExistsError, match="file is a file, and a folder would take its place"):
        HOST.put(tmp_path / "source", str(tmp_path / "file"))
    assert sorted(os.listdir(tmp_path)) == ["file", "source", "target"]
    assert (tmp_path / "file").read_text() == "mine"


def test_a_copy_that_fails_leaves_nothing_and_keeps_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    with pytest.raises(FileNotFoundError):
        HOST.put(tmp_path / "missing", str(tmp_path / "target"))
    assert (tmp_path / "target").read_text() == "old"
    assert os.listdir(tmp_path) == ["target"]
