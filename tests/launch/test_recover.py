"""What is done about a run that stopped: nothing where nothing helps, the slice made whole first, then a resume."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import RequestError
from contracts.run_directory import State
from launch import follow, plan, targets
from launch.deploy import deploy as deployment
from launch.hosts import Agent
from launch.runs import Run
from launch.targets import Target

WriteRun = Callable[..., Run]
MakeAgent = Callable[..., Agent]


@pytest.mark.parametrize(
    ("state", "result", "resume", "reason"),
    [
        ("running", None, False, "it is running, there is nothing to mend"),
        ("starting", None, False, "it is starting, there is nothing to mend"),
        ("done", {"outcome": "done"}, False, "it is done, there is nothing left to do"),
        (
            "failed",
            {"outcome": "failed", "request": True, "error": "no text"},
            False,
            "it would fail again: no text",
        ),
        (
            "failed",
            {"outcome": "failed"},
            True,
            "it was failed and goes on from the start, as there is no checkpoint",
        ),
        ("lost", None, True, "it was lost and goes on from the start, as there is no checkpoint"),
        ("hung", {"outcome": "hung"}, True, "it was hung and goes on"),
        ("preempted", {"outcome": "preempted"}, True, "it was preempted and goes on"),
    ],
)
def test_only_what_may_go_better_is_tried_again(
    write_run: WriteRun, state: State, result: dict[str, Any] | None, resume: bool, reason: str
) -> None:
    run = write_run(result=result)
    decision = follow.decide(state, run)
    assert decision.resume is resume
    assert decision.reason.startswith(reason)
    for step in (5, 20, 10):
        run.directory.write_text(f"checkpoints/{step}/state/_METADATA", "")
    assert follow.decide("lost", run).reason.endswith("goes on from the checkpoint of step 20") == (
        not (result or {}).get("request")
    )


@pytest.fixture
def pulumi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """A `pulumi` that keeps what it was asked and ends with the exit code given."""

    def make(code: int) -> Path:
        folder, asked = tmp_path / "bin", tmp_path / "asked"
        folder.mkdir()
        (folder / "pulumi").write_text(f'#!/bin/sh\necho "$*" >>"{asked}"\nexit {code}\n')
        (folder / "pulumi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        return asked

    return make


def target(agent: Agent, pulumi_stack: str | None = "dev") -> Target:
    here = targets.on_this_machine(hosts="1", platform="cpu")
    return dataclasses.replace(here, name="dev", pulumi_stack=pulumi_stack, agents=(agent,))


def well(verb: str, request: dict[str, Any]) -> dict[str, Any]:
    return {"processes": []}


def gone(verb: str, request: dict[str, Any]) -> dict[str, Any]:
    return {"ok": False, "error": {"message": "no route"}}


def must_not_be_asked() -> Target:
    raise AssertionError("the target is whole: it is not asked for again")


def test_a_slice_that_lost_a_host_is_refreshed_and_brought_up_and_waited_for(
    make_agent: MakeAgent, pulumi: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "BOOT_POLL_S", 0)
    prepared: list[Target] = []

    def deploy(given: Target, *, with_comforts: bool) -> int:
        prepared.append(given)
        return 0

    monkeypatch.setattr(deployment, "deploy", deploy)
    asked, said = pulumi(0), list[str]()
    answers = iter([gone, gone, well])
    fresh = target(make_agent(lambda verb, request: next(answers)(verb, request), host="w-new"))
    mended = follow.repaired(target(make_agent(gone, host="w-0")), lambda: fresh, said.append)
    assert (mended, prepared) == (fresh, [fresh])
    assert next(answers, None) is None
    assert asked.read_text() == "up --refresh --yes --skip-preview --stack dev\n"
    assert said[0] == "no answer from w-0: no route"
    assert said[-1] == "all 1 hosts of local answer"


def test_what_cannot_be_made_whole_is_told_with_what_to_do(
    make_agent: MakeAgent, pulumi: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(broken: Target, reopen: Callable[[], Target] = must_not_be_asked) -> str:
        with pytest.raises(RequestError) as error:
            follow.repaired(broken, reopen, lambda text: None)
        return str(error.value)

    asked = pulumi(3)
    whole, dead = target(make_agent(well)), target(make_agent(gone, host="w-0"))
    assert follow.repaired(whole, must_not_be_asked, lambda text: None) is whole
    said = refused(target(make_agent(gone), None))
    assert said.startswith("1 of 1 hosts do not answer, and Pulumi did not make them")
    assert not asked.exists()
    said = refused(dead)
    assert said.startswith("`pulumi up --refresh ") and "failed (exit code 3); its last lines say why" in said
    (asked.parent / "bin/pulumi").write_text("#!/bin/sh\n")
    monkeypatch.setattr(follow, "BOOT_LIMIT_S", 0.0)
    said = refused(dead, lambda: dead)
    assert "w-0: no route" in said and "pulumi up --stack dev --replace" in said


def test_a_run_that_goes_on_keeps_the_limits_that_it_was_started_with(write_run: WriteRun) -> None:
    assert follow.resuming(write_run(hang_limit_s=900.0)).hang_floor_s == 900
    assert follow.resuming(write_run(heartbeat_limit_s=20.0)).heartbeat_limit_s == 20
    fresh = follow.resuming(write_run())
    assert (fresh.hang_floor_s, fresh.heartbeat_limit_s) == (plan.HANG_FLOOR_S, plan.HEARTBEAT_LIMIT_S)
