"""`fab run` as a person types it, on this machine as two hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch.jobs import CHECKOUT
from tests.launch.processes import all_end

Fab = Callable[..., Any]


def test_words_arrive_on_every_host_as_they_were_typed_and_one_word_is_a_line_of_shell(fab: Fab) -> None:
    typed = ["a b", "$HOME", "'", "*", "", "--", "-H"]
    shown = "".join(f"<{word}>" for word in typed)
    assert fab("run", "--group", "--", "printf", "<%s>", *typed) == (0, f"[0-1] {shown}\n", "")
    for line in (["--", "cd / && pwd; exit 3"], ["--command", "cd / && pwd; exit 3"]):
        done = fab("run", *line)
        assert sorted(done.out.splitlines()) == ["[0] /", "[1] /"]
        assert (done.err, done.code) == ("exit codes: [0-1] 3\n", 1)


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
    assert all_end(pids)
