"""The smallest job, launched as any other: stopped and resumed it learns what it would have learned."""

from __future__ import annotations

import os
import signal
from unittest import mock

import jax
import pytest

from jobs.jax_hello.data import points
from jobs.jax_hello.train import first_state, take_step
from launch import launch as launching
from launch import targets
from launch.runs import Run
from tests.runs.lab import Lab, losses, result

STEPS = 40

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def launch(lab: Lab, resume: Run | None = None) -> Run:
    # Saving after every step, it is not done before it has heard of a SIGTERM.
    arguments = () if resume else ("--steps", str(STEPS), "--save-every", "1")
    request = launching.Request(job="jax_hello", arguments=arguments, name=None, resume=resume)
    with mock.patch.dict(os.environ, lab.environ):
        return launching.launch(request, targets.on_this_machine(hosts="2", platform="cpu"), lab.said.append)


@pytest.mark.usefixtures("two_devices")
def test_a_run_of_two_processes_that_is_preempted_and_resumed_has_the_losses_of_one_process(lab: Lab) -> None:
    run = launch(lab)
    lab.reach(run, 1)
    lab.signal(run, signal.SIGTERM, 1)
    preempted = lab.finish(run)
    assert lab.state(run) == "preempted"
    assert sorted(losses(preempted)) == list(range(1, result(preempted)["steps"] + 1))
    assert result(preempted)["steps"] < STEPS

    resumed = lab.finish(launch(lab, lab.read(run)))
    assert result(resumed)["outcome"] == "done"
    state, expected = first_state(), {}
    for step in range(1, STEPS + 1):
        state, error = jax.jit(take_step)(state, *points(step, 64))
        expected[step] = float(error)
    assert losses(resumed) == pytest.approx(expected, rel=1e-3)
