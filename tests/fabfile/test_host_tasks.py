"""`fab run`, `put`, `get` as a person types them, on this machine as two hosts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.jobs import CHECKOUT

Fab = Callable[..., Any]


def test_words_arrive_on_every_host_as_they_were_typed_and_one_word_is_a_line_of_shell(fab: Fab) -> None:
    typed = ["a b", "$HOME", "'", "*", "", "--", "-H"]
    shown = "".join(f"<{word}>" for word in typed)
    assert fab("run", "--group", "--", "printf", "<%s>", *typed) == (0, f"[0-1] {shown}\n", "")
    for line in (["--", "cd / && pwd; exit 3"], ["--command", "cd / && pwd; exit 3"]):
        done = fab("run", *line)
        assert sorted(done.out.splitlines()) == ["[0] /", "[1] /"]
        assert (done.err, done.code) == ("exit codes: [0-1] 3\n", 1)


def test_a_folder_is_put_and_got_and_replaced_only_by_force(fab: Fab, tmp_path: Path) -> None:
    (tmp_path / "a dir").mkdir()
    (tmp_path / "a dir/$file").write_text("x")
    assert fab("put", str(tmp_path / "a dir"), str(tmp_path / "there/new")).code == 0
    assert fab("get", "~/there/new", str(tmp_path / "back")).code == 0
    assert (tmp_path / "back/$file").read_text() == "x"
    again = ["put", str(tmp_path / "a dir"), str(tmp_path / "there/")]
    assert fab(*again).code == 0
    refused = fab(*again)
    assert (refused.code, "--force replaces the whole folder" in refused.err) == (2, True)
    assert fab(*again, "--force").code == 0


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_ctrl_c_ends_the_command_on_every_host(tmp_path: Path) -> None:
    line = f"echo $$ >> {tmp_path}/pids; echo begun; exec sleep 600"
    fab = [sys.executable, "-c", "from fabfile.program import main; main()"]
    environment = {key: value for key, value in os.environ.items() if key != "TPU_STACK"}
    with subprocess.Popen(
        [*fab, "run", "--", line], cwd=CHECKOUT, env=environment, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert [running.stdout.readline()[4:] for _ in range(2)] == ["begun\n"] * 2
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 130
    assert len(pids) == 2
    # Killed they are; whoever they are left to has yet to take note of it.
    deadline = time.monotonic() + 10
    while alive := [pid for pid in pids if is_alive(pid)]:
        for pid in alive if time.monotonic() > deadline else ():
            os.kill(pid, signal.SIGKILL)
            pytest.fail(f"{pid} was still there")
        time.sleep(0.02)
