"""A run goes on with its devices grouped otherwise, and through any number of kills, with the losses it would have."""

import os
import random
import signal
import time

import pytest

from launch.runs import Run
from tests.runs.lab import FAST, WAIT_LIMIT_S, Lab, Losses, losses, saved_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

KILLS = int(os.environ.get("TPU_STACK_KILLS", "3"))
"""How often the run of the last test is killed; with 50 it takes 20 minutes or more."""


@pytest.mark.parametrize(
    ("hosts", "fsdp"),
    [(4, 2), *(pytest.param(*mesh, marks=pytest.mark.nightly) for mesh in ((2, 2), (1, 1), (3, 1)))],
)
def test_a_run_resumes_on_another_number_of_processes_and_another_mesh_with_the_same_losses_to_rounding(
    lab: Lab, lost_run: Run, right_losses: Losses, hosts: int, fsdp: int
) -> None:
    resumed = lab.resume(lab.copy_of(lost_run), *FAST, "--fsdp", str(fsdp), hosts=hosts)
    assert (lab.state(resumed), resumed.processes) == ("done", hosts)
    assert losses(resumed) == pytest.approx(right_losses, abs=1e-4)


@pytest.mark.nightly
def test_a_run_whose_devices_shared_the_parameters_resumes_where_each_has_them_whole(
    lab: Lab, right_losses: Losses
) -> None:
    run = lab.launch("--fsdp", "2")
    lab.reach(run, 12)
    lab.until(lambda: bool(saved_steps(run)), "a checkpoint is complete")
    lab.signal(run, signal.SIGKILL, 1)
    lab.finish(run)
    resumed = lab.resume(run, "--fsdp", "1", hosts=1)
    assert lab.state(resumed) == "done"
    assert losses(resumed) == pytest.approx(right_losses, abs=1e-4)


@pytest.mark.nightly
def test_a_run_killed_at_random_points_has_the_very_losses_of_one_that_never_was(lab: Lab) -> None:
    """Any of its processes: half the kills at a random step, half at a random moment after it has joined, which may be
    while it compiles, restores, evaluates or saves."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    steps = 30 * KILLS
    options = ("--steps", str(steps), "--checkpoint-every", "3")
    limit_s = WAIT_LIMIT_S + steps  # every third step is saved, which takes longer than the steps
    undisturbed = losses(lab.finish(lab.launch(*options), limit_s))

    run = lab.launch(*options)
    for kill, step in enumerate(sorted(rng.sample(range(1, steps - 10), KILLS))):
        if kill % 2:
            time.sleep(rng.uniform(0.0, 3.0))
        else:
            lab.reach(run, step)
        assert lab.read(run).current_result() is None, f"it was done after {kill} kills"
        lab.signal(run, signal.SIGKILL, rng.randrange(2))
        lab.finish(run)
        run = lab.launch(*options, resume=run)
    finished = lab.finish(run, limit_s)
    assert (lab.state(finished), finished.attempt) == ("done", KILLS)
    assert losses(finished) == undisturbed
