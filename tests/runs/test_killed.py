"""Processes that are killed, and checkpoints that are damaged: the run says so, and goes on as if nothing had been."""

import json
import signal

import pytest

from contracts.goodput import Category, title
from launch.runs import Run
from tests.runs.lab import FAST, SLOWLY, STEPS, Lab, Losses, evaluations, losses, result, saved_steps

pytestmark = pytest.mark.timeout(300)


def test_a_run_that_loses_its_power_and_is_preempted_goes_on_each_time_with_the_very_same_metrics(
    lab: Lab, shared_lab: Lab, lost_run: Run, reference: Run, right_losses: Losses
) -> None:
    assert lost_run.result is None
    assert shared_lab.state(lost_run) == "lost"
    before = losses(lost_run)
    assert before == {step: right_losses[step] for step in before}
    newest = saved_steps(lost_run)[-1]
    copied = lab.copy_of(lost_run)
    # As if it had been lost between the checkpoint and the evaluation after the same step.
    kept = [line for line in copied.directory.read_metrics() if "loss" in line or line["step"] != newest]
    copied.directory.write_text("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))
    run = lab.launch(*SLOWLY, resume=copied)
    lab.reach(run, max(before) + 1)
    lab.signal(run, signal.SIGTERM, 1)

    preempted = lab.finish(run)
    assert f"resumed after step {newest}\n" in lab.log(run)
    assert [ended["code"] for ended in lab.exits(run)] == [75, 75]
    assert lab.state(run) == "preempted"
    step = result(preempted)["steps"]
    assert newest < step < STEPS
    beats = [(beat["state"], beat["step"]) for beat in preempted.heartbeats if beat]
    assert beats == [("preempted", step)] * 2
    assert saved_steps(preempted)[-1] == step
    assert losses(preempted) == {n: right_losses[n] for n in range(1, step + 1)}

    resumed = lab.resume(run, *FAST)
    assert lab.state(resumed) == "done"
    assert f"resumed after step {step}\n" in lab.log(resumed)
    assert losses(resumed) == right_losses
    assert evaluations(resumed) == evaluations(reference)

    spent = resumed.goodput
    assert spent is not None
    walls_s = [attempt.get("wall_s", resumed.wall_s) for attempt in resumed.described["attempts"]]
    assert spent.total_s == pytest.approx(sum(walls_s), abs=0.002)
    told: set[Category] = {
        "productive",
        "lost",
        "starting",
        "restoring",
        "compiling",
        "evaluation",
        "saving",
        "finishing",
    }
    assert told <= spent.seconds.keys() and "unknown" not in spent.seconds
    report = resumed.directory.read_text("report.html") or ""
    assert all(f'"{title(category)}"' in report for category in told), "of all three attempts"


@pytest.mark.slow
@pytest.mark.parametrize(
    "killed",
    [pytest.param(0, id="host-0-the-coordinator"), pytest.param(1, id="host-1", marks=pytest.mark.nightly)],
)
def test_a_killed_process_is_named_by_fab_train_which_exits_with_1(lab: Lab, killed: int) -> None:
    command = lab.fab_train()
    run = lab.joined(command)
    lab.reach(run, 12)
    lab.signal(run, signal.SIGKILL, killed)

    ended = command.ended()
    assert ended.code == 1, ended.said
    assert f"{run.run_id} failed" in ended.said
    assert f"fab train --resume {run.run_id}" in ended.said
    check_that_the_run_names(lab, run, killed)


@pytest.mark.slow
def test_a_killed_process_takes_even_a_sibling_that_hangs_down_within_5_s_without_any_launcher(
    lab: Lab,
) -> None:
    run = lab.launch()
    lab.reach(run, 1)
    lab.signal(run, signal.SIGSTOP, 0)
    lab.signal(run, signal.SIGKILL, 1)

    # Looking is left to the agents: to follow the run would be to help.
    lab.exits(run)
    lab.finish(run)
    check_that_the_run_names(lab, run, 1)


def check_that_the_run_names(lab: Lab, run: Run, killed: int) -> None:
    exits = lab.exits(run)
    assert exits[killed]["signal_name"] == "SIGKILL"
    assert exits[1 - killed]["time"] - exits[killed]["time"] < 5
    failed = result(lab.read(run))
    assert (failed["outcome"], failed["failed_host"]) == ("failed", killed)
    assert "SIGKILL" in failed["error"]
    assert lab.log(run, killed).splitlines()[-1] in failed["error"]
