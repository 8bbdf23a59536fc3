"""Runs that are told to stop: all processes save after the same step, and the run goes on from there."""

from __future__ import annotations

import signal

import pytest

from tests.runs.lab import FAST, SLOWLY, STEPS, Lab, Losses, losses, result, saved_steps

pytestmark = pytest.mark.timeout(300)


def test_sigterm_to_one_process_makes_all_save_after_the_same_step_and_no_step_is_lost(
    lab: Lab, right_losses: Losses
) -> None:
    run = lab.launch(*SLOWLY)
    lab.reach(run, 1)
    lab.signal(run, signal.SIGTERM, 1)

    preempted = lab.finish(run)
    assert [ended["code"] for ended in lab.exits(run)] == [75, 75]
    assert lab.state(run) == "preempted"
    step = result(preempted)["steps"]
    assert step < STEPS
    assert [(beat["state"], beat["step"]) for beat in preempted.heartbeats if beat] == [
        ("preempted", step)
    ] * 2
    assert saved_steps(preempted)[-1] == step
    assert losses(preempted) == {n: right_losses[n] for n in range(1, step + 1)}

    resumed = lab.resume(run, *FAST)
    assert f"resumed after step {step}\n" in lab.log(resumed)
    assert losses(resumed) == right_losses


def test_fab_stop_saves_the_run_which_can_then_be_resumed_but_not_stopped_again(
    lab: Lab, right_losses: Losses
) -> None:
    run = lab.launch(*SLOWLY)
    with lab.frozen(run):
        resume = lab.fab("train", "--resume", run.run_id).ended()
        assert (resume.code, "Traceback" in resume.said) == (2, False), resume.said
        assert f"the run is {lab.state(run)}; `fab stop --run {run.run_id}` stops it" in resume.said
        command = lab.fab("stop")
        lab.until(lambda: lab.was_told_to_stop(run), "fab stop has reached the processes")
    stop = command.ended()

    assert stop.code == 0, stop.said
    stopped = lab.read(run)
    assert (stopped.attempt, result(stopped)["outcome"], lab.state(run)) == (0, "stopped", "stopped")
    assert [beat["state"] for beat in stopped.heartbeats if beat] == ["stopped", "stopped"]
    assert saved_steps(stopped)[-1] == result(stopped)["steps"]
    assert f"fab train --resume {run.run_id}" in stop.said

    again = lab.fab("stop", "--run", run.run_id).ended()
    assert again.code == 0
    assert f"{run.run_id} is not running" in again.said

    assert losses(lab.resume(run, *FAST)) == right_losses


def test_ctrl_c_to_a_following_fab_train_saves_the_run_and_says_how_to_go_on(lab: Lab) -> None:
    command = lab.fab_train(*SLOWLY)
    run = lab.joined(command)
    command.interrupt()
    ended = command.ended()

    assert ended.code == 130, ended.said
    assert f"fab train --resume {run.run_id}" in ended.said
    assert "Traceback" not in ended.said
    stopped = lab.read(run)
    assert result(stopped)["outcome"] == "stopped"
    assert saved_steps(stopped)[-1] == result(stopped)["steps"] < STEPS
