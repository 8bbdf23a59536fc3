"""The smallest job, launched as any other: stopped and resumed it learns what it would have learned."""

from __future__ import annotations

import os
import signal
from unittest import mock

import pytest

from launch import launch as launching
from launch import targets
from launch.runs import Run
from tests.runs.lab import Lab, losses, result

STEPS = 40

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def launch(lab: Lab, resume: Run | None = None, hosts: str = "2") -> Run:
    # Saving after every step, it is not done before it has heard of a SIGTERM.
    arguments = () if resume else ("--steps", str(STEPS), "--save-every", "1")
    request = launching.Request(job="jax_hello", arguments=arguments, name=None, resume=resume)
    with mock.patch.dict(os.environ, lab.environ):
        return launching.launch(
            request, targets.on_this_machine(hosts=hosts, platform="cpu"), lab.said.append
        )


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
    alone = lab.finish(launch(lab, hosts="1"))
    assert losses(resumed) == pytest.approx(losses(alone), rel=1e-3)
