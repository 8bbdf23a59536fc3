"""A run whose numbers go wrong stops by itself on every host, says why, and keeps the batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs.lab import Lab, result, saved_steps

pytestmark = pytest.mark.timeout(300)

RUINOUS = ("--learning-rate", "1e30", "--warmup-share", "0.0")


def test_a_run_that_comes_apart_stops_with_a_diagnosis_and_the_batch_and_no_ruined_checkpoint(
    lab: Lab,
) -> None:
    run = lab.finish(lab.launch(*RUINOUS))
    found = result(run)
    assert found["outcome"] == "failed"
    assert "lower --learning-rate" in found["error"]
    assert "--on-trouble warn" in found["error"]
    (kept,) = Path(run.directory.path("trouble")).iterdir()
    batch = json.loads(kept.read_text())
    assert kept.name == f"step-{batch['step']}.json"
    assert f"step {batch['step']}" in found["error"]
    assert (len(batch["tokens"]), len(batch["texts"])) == (12, 12)
    assert all(step < batch["step"] for step in saved_steps(run))
    assert {end["code"] for end in lab.exits(run)} == {1}


def test_a_run_that_is_told_to_goes_on_whatever_its_numbers_say(lab: Lab) -> None:
    run = lab.finish(lab.launch(*RUINOUS, "--on-trouble", "warn", "--steps", "6"))
    assert result(run)["outcome"] == "done"
    assert "the loss is" in lab.log(run)
    assert run.directory.list("trouble") == []
