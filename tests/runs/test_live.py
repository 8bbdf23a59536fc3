"""A run is looked at while it works: its stacks and its profile, and it goes on as if nothing had happened."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.runs.lab import Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WAITS = """
import json, os, signal, threading, time
signal.signal(signal.SIGUSR1, signal.SIG_DFL)
def fetches_a_batch():
    time.sleep(0.05)
step = 0
while True:
    fetches_a_batch()
    step += 1
    if os.environ["RANK"] == "0":
        with open(os.environ["RUN_DIR"] + "/metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step}) + "\\n")
"""


def test_the_stacks_of_an_own_command_are_shown_and_kept_and_it_goes_on(lab: Lab, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "train.py").write_text(WAITS)
    options = ("--processes-per-host", "2", "--workdir", str(folder), "--", "python", "train.py")
    begun = lab.fab("train", "--detach", *options).ended()
    assert begun.code == 0, begun.said
    run = lab.all_runs()[0]
    lab.reach(run, 20)
    began = time.time()
    shown = lab.fab("stacks", "latest").ended()
    assert shown.code == 0, shown.said
    assert "ranks 0-3: MainThread" in shown.said
    (line,) = [line for line in shown.said.splitlines() if "fetches_a_batch" in line]
    assert "train.py:5" in line
    saved = sorted(Path(run.directory.path("stacks")).glob("*/host-*.txt"))
    assert [path.name for path in saved] == ["host-0.txt", "host-1.txt"]
    assert all(path.stat().st_mtime >= began and "clock_nanosleep" in path.read_text() for path in saved)
    assert "rank 1, pid" in saved[0].read_text() and "rank 3, pid" in saved[1].read_text()
    (last,) = run.directory.read_metrics()[-1:]
    lab.reach(run, int(last["step"]) + 20)
