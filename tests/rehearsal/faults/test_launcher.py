"""The launcher is killed with SIGKILL in the middle of a launch: nothing stays half-started, and `fab` goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import runs
from rehearsal.machines import PYTHON
from tests.rehearsal.faults.faults import nightly_but
from tests.rehearsal.faults.pair import Pair, options
from tests.runs.lab import Losses, losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CHECKOUT = Path(__file__).resolve().parents[3]
LAUNCH_LIMIT_S = 120.0
HALF_STARTED_LIMIT_S = 60.0

# `fab` as it is, but for its death: at a phase, or when the processes on these hosts alone have been started.
DYING_FAB = """
import os, signal, sys
from launch import launch as rollout

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

phase, only = sys.argv.pop(1), sys.argv.pop(1)
if only:
    def start(plan, agents):
        agents[int(only)].ask("start", rollout.plans.start(plan, int(only)))
        die()
    rollout.start = start
else:
    setattr(rollout, phase, die)
from fabfile.program import main
main()
"""


def dying_fab(pair: Pair, phase: str, only: str = "") -> None:
    words = ["train", "--stack", str(pair.inventory_path), "--platform", "cpu", "--python", PYTHON]
    words += ["--job", "flax_mlm", "--args", " ".join(options())]
    done = subprocess.run(
        [sys.executable, "-c", DYING_FAB, phase, only, *words],
        cwd=CHECKOUT, env={**os.environ, "NO_COLOR": "1"}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=LAUNCH_LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("phase", ["preflight", "stage"])
def test_a_launcher_that_dies_before_it_starts_anything_leaves_nothing(pair: Pair, phase: str) -> None:
    before = pair.run_names()
    dying_fab(pair, phase)
    pair.until_clean(limit_s=10.0)
    with pair.target() as target:
        found = [run.run_id for run in runs.list_runs(target.runs)]
        assert set(found) <= set(before), "a run is listed that never was"


@pytest.mark.parametrize("only", nightly_but({"host-0"}, {"no-host": [""], "host-0": ["0"], "host-1": ["1"]}))
def test_what_a_dead_launcher_left_half_started_is_gone_within_a_minute_and_can_be_resumed(
    pair: Pair, right_losses: Losses, only: str
) -> None:
    dying_fab(pair, "start", only)
    began_s = time.monotonic()
    pair.until_clean(limit_s=HALF_STARTED_LIMIT_S)
    print(f"started on {only or 'no host'}: clean after {time.monotonic() - began_s:.1f} s")
    with pair.target() as target:
        run = runs.find(target.runs, "latest")
        state, run = pair.finish(target, run)
        print(f"{run.run_id}: {state}: {(run.current_result() or {}).get('error')}")
        assert state in ("failed", "lost")
        state, run = pair.finish(target, pair.launch(target, resume=run), pair.end_limit_s)
        assert (state, losses(run)) == ("done", right_losses)


def test_a_run_whose_launcher_dies_when_all_is_started_goes_on_by_itself(
    pair: Pair, right_losses: Losses
) -> None:
    dying_fab(pair, "join")
    with pair.target() as target:
        state, run = pair.finish(target, runs.find(target.runs, "latest"), pair.end_limit_s)
        assert (state, losses(run)) == ("done", right_losses)
