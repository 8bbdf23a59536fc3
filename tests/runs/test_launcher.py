"""The launcher may go: the run does not need it; and there is never more than one group of a run."""

from __future__ import annotations

import pytest

from contracts.run_directory import ACTIVE
from launch.runs import Run
from tests.runs.lab import Lab, Losses, losses, result

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


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


@pytest.mark.nightly
def test_a_detached_fab_train_returns_while_the_run_goes_on(lab: Lab, lost_run: Run) -> None:
    run = lab.copy_of(lost_run)
    ended = lab.fab("train", "--resume", run.run_id, "--detach").ended()
    assert ended.code == 0, ended.said
    assert f"fab stop --run {run.run_id}" in ended.said
    with lab.frozen(run):
        assert lab.state(run) in ACTIVE
        assert lab.read(run).result is None
    assert result(lab.finish(run))["outcome"] == "done"


@pytest.mark.nightly
def test_of_two_who_resume_a_run_at_once_one_is_refused(
    lab: Lab, lost_run: Run, right_losses: Losses
) -> None:
    run = lab.copy_of(lost_run)
    commands = [lab.fab("train", "--resume", run.run_id, "--detach") for _ in range(2)]
    refused, accepted = sorted((command.ended() for command in commands), key=lambda ended: -ended.code)
    assert (accepted.code, refused.code) == (0, 2), (accepted, refused)
    assert "being launched by another process" in refused.said or "the run is " in refused.said
    assert "Traceback" not in refused.said

    done = lab.finish(run)
    assert [attempt["attempt"] for attempt in done.described["attempts"]] == [0, 1]
    assert losses(done) == right_losses


@pytest.mark.nightly
def test_two_new_runs_at_once_share_a_cold_cache(cold_lab: Lab) -> None:
    commands = [cold_lab.fab_train("--steps", "6") for _ in range(2)]
    for command in commands:
        ended = command.ended()
        assert ended.code == 0, ended.said
    found = cold_lab.all_runs()
    assert [cold_lab.state(run) for run in found] == ["done", "done"]
    assert losses(found[0]) == losses(found[1])
