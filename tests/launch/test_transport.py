"""This machine as a host: a command's output and exit code come back, and nothing outlives its time."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from launch.transport import Completed, LocalTransport


def run(program: str, stdin: str = "", timeout_s: float = 60) -> Completed:
    return LocalTransport().run([sys.executable, "-c", program], stdin, timeout_s=timeout_s)


def test_a_commands_words_reach_it_unchanged() -> None:
    words = ["a b", "'", '"', "$HOME", "é", "", "*", "a\nb"]
    done = LocalTransport().run(
        [sys.executable, "-c", "import sys; print(sys.argv[1:])", *words], "", timeout_s=60
    )
    assert done == Completed(exit_code=0, stdout=f"{words}\n", stderr="")


def test_input_output_errors_and_exit_code_come_back() -> None:
    done = run("import sys; print(input()); print('e', file=sys.stderr); sys.exit(3)", "in\n")
    assert done == Completed(exit_code=3, stdout="in\n", stderr="e\n")


def test_bytes_that_are_no_text_do_not_break_the_answer() -> None:
    assert run("import sys; sys.stdout.buffer.write(b'a\\xffb')").stdout == "a\ufffdb"


def test_a_command_that_does_not_end_in_time_has_no_exit_code() -> None:
    before_s = time.monotonic()
    done = run("import time; print(1, flush=True); time.sleep(600)", timeout_s=0.5)
    assert done.exit_code is None
    assert time.monotonic() - before_s < 30


def test_a_command_that_is_not_there_cannot_be_run() -> None:
    with pytest.raises(OSError, match="No such file"):
        LocalTransport().run(["/no/such/command"], "", timeout_s=60)


def test_a_command_is_out_of_reach_of_the_terminals_ctrl_c() -> None:
    assert run("import os; print(os.getsid(0) == os.getpid())").stdout == "True\n"


def test_a_file_is_copied_to_a_folder_that_is_made_for_it(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"\x00\xff")
    LocalTransport().put(tmp_path / "source", str(tmp_path / "a" / "b" / "target"))
    assert (tmp_path / "a/b/target").read_bytes() == b"\x00\xff"
