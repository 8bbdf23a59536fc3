"""A run is looked at while it works: its stacks and its profile, and it goes on as if nothing had happened."""

import os
import re
import sys
import time
from pathlib import Path

import jax
import pytest

from tests.processes import run_program
from tests.runs.lab import CHECKOUT, Lab

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


def test_where_an_own_command_is_now_is_shown_and_kept_and_a_shell_opens_there_and_it_goes_on(
    lab: Lab, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "train.py").write_text(WAITS)
    options = ["--env", "SPEED=fast", "--secret", "TOKEN_A", "--processes-per-host", "2"]
    options += ["--workdir", str(folder), "--", "python", "train.py"]
    lab.environ["TOKEN_A"] = "t0p-secret"
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

    fab = Path(sys.executable).parent / "fab"
    typed = 'pwd; ls; echo "$RUN_ID,$RANK,$SPEED,$TOKEN_A,$RUN_CONTROL_DIR"; command -v python'
    environ = {**os.environ, **lab.environ}
    shell = run_program([fab, "ssh", "latest", "--host", "1"], environ, cwd=CHECKOUT, input=typed)
    assert shell.returncode == 0, shell.stderr
    place = lab.agent_root / "runs" / run.run_id
    expected = [str(place / "work-1"), "train.py", f"{run.run_id},2,fast,,", str(place / "venv-1/bin/python")]
    assert shell.stdout.splitlines() == expected
    assert "with the variables of rank 2, but for TOKEN_A" in shell.stderr
    (last,) = run.directory.read_metrics()[-1:]
    lab.reach(run, int(last["step"]) + 20)
    assert lab.fab("stop").ended().code == 0
    for command in ("stacks", "ssh", "profile"):
        late = lab.fab(command, "latest").ended()
        assert (late.code, "was stopped: it has no processes" in late.said) == (2, True), late.said


def test_a_live_profile_of_all_ranks_is_in_the_run_directory_and_a_run_without_steps_is_refused(
    lab: Lab,
) -> None:
    refused = lab.fab("profile", "latest").ended()
    assert (refused.code, "there is no run in" in refused.said) == (2, True), refused.said
    run = lab.launch("--steps", "100000", "--eval-every", "100000", "--checkpoint-every", "100000")
    lab.reach(run, 3)
    shown = lab.fab("profile", "latest", "--steps", "3").ended()
    assert shown.code == 0, shown.said
    (traced,) = re.findall(r"steps (\d+-\d+) of 2 ranks are traced in", shown.said)
    first, last = map(int, traced.split("-"))
    assert last - first == 2
    folder = Path(run.directory.path("profile"))
    for host in (0, 1):
        data = jax.profiler.ProfileData.from_file(
            str(folder / f"plugins/profile/steps-{traced}/host-{host}.xplane.pb")
        )
        events = [event for plane in data.planes for line in plane.lines for event in line.events]
        assert [event for event in events if event.name.startswith("train")]
    lab.reach(run, last + 20)
    with lab.frozen(run):
        late = lab.fab("profile", "latest", "--limit", "2").ended()
    assert (late.code, "is not traced within 2 s" in late.said) == (2, True), late.said
    lab.reach(run, last + 200)
    assert [path.name for path in folder.glob("plugins/profile/*")] == [f"steps-{traced}"]
