"""Runs that are told to stop: all processes save after the same step, and the run goes on from there. The launcher may
go, and there is never more than one group of a run."""

import signal

import pytest

from contracts.errors import RequestError
from launch.runs import Run
from tests.runs.lab import FAST, SLOWLY, STEPS, Lab, Losses, losses, result, saved_steps

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
def test_sigterm_before_the_first_step_and_after_the_last_one_loses_no_step_either(
    lab: Lab, lost_run: Run, right_losses: Losses, reference: Run
) -> None:
    run = lab.copy_of(lost_run)
    step = saved_steps(run)[-1]
    lab.signal(lab.launch(*FAST, resume=run), signal.SIGTERM, 1)
    again = lab.finish(run)
    assert [ended["code"] for ended in lab.exits(again)] == [75, 75]
    assert (lab.state(again), result(again)["steps"]) == ("preempted", step)
    assert f"preempted: saved after step {step}; resume with" in lab.log(again)
    assert saved_steps(again)[-1] == step

    # While it evaluates, looks and exports.
    last = lab.launch(*FAST, resume=run)
    lab.until(lambda: STEPS in saved_steps(last), "the last step is saved")
    lab.signal(last, signal.SIGTERM)
    last = lab.finish(last)
    assert [ended["code"] for ended in lab.exits(last)] == [75, 75]
    assert (lab.state(last), result(last)["steps"]) == ("preempted", STEPS)

    resumed = lab.resume(run, *FAST)
    assert f"resumed after step {STEPS}\n" in lab.log(resumed)
    assert losses(resumed) == right_losses
    assert result(resumed)["eval_loss"] == pytest.approx(result(reference)["eval_loss"], rel=1e-6)


@pytest.mark.slow
def test_fab_stop_saves_the_run_which_can_then_be_resumed_but_not_stopped_again(lab: Lab) -> None:
    run = lab.launch(*SLOWLY)
    lab.reach(run, 1)
    with lab.frozen(run):
        resume = lab.fab("train", "--resume", run.run_id).ended()
        assert (resume.code, "Traceback" in resume.said) == (2, False), resume.said
        assert f"the run is {lab.state(run)}; `fab stop {run.run_id}` stops it" in resume.said
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

    assert lab.launch(*FAST, resume=run).attempt == 1  # tests/runs/test_docker.py: with which losses


@pytest.mark.slow
def test_a_run_that_has_spent_its_budget_stops_by_itself_and_goes_on_only_with_a_larger_one(lab: Lab) -> None:
    run = lab.finish(lab.launch(*SLOWLY, max_usd=0.01))  # nine seconds
    assert lab.state(run) == "stopped"
    ended = result(run)
    assert (ended["out_of_budget"], ended["error"]) == (True, None)
    assert ended["reason"].startswith("its budget of 0.01 USD is spent, at 3.92 USD an hour")
    assert f"stopped because {ended['reason']}" in lab.log(run)
    assert ended["reason"] in (run.directory.read_text("report.html") or "")
    status = lab.fab("status").ended().said
    assert ended["reason"] in status and f"--resume {run.run_id} --max-usd 0.02" in status
    with pytest.raises(RequestError, match="has spent 0.01 of its 0.01 USD"):
        lab.launch(resume=run, max_usd=0.01)
    assert lab.launch(*FAST, resume=run, max_usd=5.0).attempt == 1


@pytest.mark.slow
def test_ctrl_c_to_a_following_fab_train_saves_the_run_and_says_how_to_go_on(lab: Lab) -> None:
    command = lab.fab_train(*SLOWLY)
    run = lab.joined(command)
    lab.reach(run, 1)
    command.interrupt()
    ended = command.ended()

    assert ended.code == 130, ended.said
    assert f"fab train --resume {run.run_id}" in ended.said
    assert "Traceback" not in ended.said
    stopped = lab.read(run)
    assert result(stopped)["outcome"] == "stopped"
    assert saved_steps(stopped)[-1] == result(stopped)["steps"] < STEPS


@pytest.mark.slow
def test_a_process_that_is_stopped_from_outside_before_its_first_step_is_a_hang_after_the_heartbeats_limit(
    lab: Lab,
) -> None:
    run = lab.launch(heartbeat_limit_s=10)
    lab.signal(run, signal.SIGSTOP, 1)
    hung = lab.finish(run)
    assert lab.state(run) == "hung"
    assert result(hung)["error"].startswith("host 1 had no heartbeat for ")
    assert "did not answer SIGUSR1" in (hung.directory.read_text("stacks/0/host-1.txt") or "")


@pytest.mark.nightly
def test_a_process_that_is_told_to_stop_while_the_group_forms_takes_the_others_along(lab: Lab) -> None:
    command = lab.fab_train()
    lab.until(lambda: command.has_said("started "), "the processes are started")
    run = lab.all_runs()[0]
    lab.signal(run, signal.SIGTERM, 1)  # at once: its interpreter has not come as far as the job
    ended = command.ended()
    assert ended.code == 130, ended.said
    assert f"{run.run_id} was preempted; resume with" in ended.said
    assert "(no checkpoint yet: from the start)" in ended.said
    assert result(lab.finish(run))["outcome"] == "preempted"
    codes = [(exit["code"], exit["signal_name"]) for exit in lab.exits(run)]
    assert all(code in ((75, None), (None, "SIGTERM")) for code in codes), codes


@pytest.mark.slow
def test_a_run_outlives_its_launcher_and_status_and_logs_pick_it_up(
    lab: Lab, lost_run: Run, right_losses: Losses
) -> None:
    command = lab.fab("train", "--resume", lab.copy_of(lost_run).run_id)
    run = lab.joined(command)
    with lab.frozen(run):
        command.kill()
        status = lab.fab("status").ended()
        logs = lab.fab("logs", "--follow", "--lines", "1")
    assert (status.code, run.run_id in status.said) == (0, True), status.said
    assert "running (pid" in status.said

    followed = logs.ended()
    assert followed.code == 0, followed.said
    assert "[0] step 60: eval loss" in followed.said
    done = lab.finish(run)
    assert lab.state(done) == "done"
    assert losses(done) == right_losses
    assert "done" in lab.fab("status", "--run", run.run_id).ended().said
