"""A script of the user's own, launched on two hosts: preempted on one, resumed, and done."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from unittest import mock

import pytest

from launch import launch as launching
from launch import targets
from launch.own_command import asked_for
from launch.runs import Run
from tests.runs.lab import Lab, losses, result

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "jax"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def launch(lab: Lab, resume: Run | None = None) -> Run:
    options = {"framework": "", "processes_per_host": "2", "progress": "log", "python": ""}
    command = None if resume else asked_for(["python", "train.py"], workdir=str(EXAMPLE), **options)
    request = launching.Request(job="command", command=command, arguments=(), name=None, resume=resume)
    with mock.patch.dict(os.environ, lab.environ):
        return launching.launch(request, targets.on_this_machine(hosts="2", platform="cpu"), lab.said.append)


def test_a_script_that_looks_into_its_run_directory_resumes_after_a_preemption(lab: Lab) -> None:
    run = launch(lab)
    lab.reach(run, 20)
    lab.signal(run, signal.SIGTERM, 1)
    preempted = lab.finish(run)
    assert lab.state(run) == "preempted"
    assert 20 <= result(preempted)["steps"] < 200

    resumed = lab.finish(launch(lab, lab.read(run)))
    assert result(resumed)["outcome"] == "done"
    assert sorted(losses(resumed)) == list(range(20, 201, 20))
    assert result(resumed)["loss"] == losses(resumed)[200] < 0.01
    assert resumed.described["args"] == ["python", "train.py"]
    log = resumed.directory.read_text("logs/1/host-1.log") or ""
    assert "process 3 of 4: weight 2.9" in log
