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
from launch import follow, plan, recover, targets
from launch.deploy import deploy as deployment
from launch.hosts import Agent
from launch.runs import Run
from launch.target import Target

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
    decision = recover.decide(state, write_run(result=result))
    assert decision.resume is resume
    assert decision.reason.startswith(reason)


def test_a_run_goes_on_from_its_last_checkpoint(write_run: WriteRun) -> None:
    run = write_run()
    for step in (5, 20, 10):
        run.directory.write_text(f"checkpoints/{step}/state/_METADATA", "")
    assert recover.decide("lost", run).reason == "it was lost and goes on from the checkpoint of step 20"


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


def test_a_slice_whose_hosts_all_answer_is_left_as_it_is(
    make_agent: MakeAgent, pulumi: Callable[[int], Path]
) -> None:
    asked, whole = pulumi(0), target(make_agent(well))
    assert recover.repaired(whole, must_not_be_asked, lambda text: None) is whole
    assert not asked.exists()


def test_a_slice_that_lost_a_host_is_refreshed_and_brought_up_and_waited_for(
    make_agent: MakeAgent, pulumi: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recover, "BOOT_POLL_S", 0)
    prepared: list[Target] = []

    def deploy(given: Target, *, with_comforts: bool) -> int:
        prepared.append(given)
        return 0

    monkeypatch.setattr(deployment, "deploy", deploy)
    asked, said = pulumi(0), list[str]()
    answers = iter([gone, gone, well])
    fresh = target(make_agent(lambda verb, request: next(answers)(verb, request), host="w-new"))
    mended = recover.repaired(target(make_agent(gone, host="w-0")), lambda: fresh, said.append)
    assert (mended, prepared) == (fresh, [fresh])
    assert next(answers, None) is None
    assert asked.read_text() == "up --refresh --yes --skip-preview --stack dev\n"
    assert said[0] == "no answer from w-0: no route"
    assert said[-1] == "all 1 hosts of local answer"


def test_a_pulumi_that_fails_ends_the_recovery_with_its_command(
    make_agent: MakeAgent, pulumi: Callable[[int], Path]
) -> None:
    pulumi(3)
    with pytest.raises(
        RequestError, match=r"`pulumi up --refresh .*` failed \(exit code 3\); its last lines say why"
    ):
        recover.repaired(target(make_agent(gone)), must_not_be_asked, lambda text: None)


def test_hosts_that_never_come_are_listed_with_the_way_to_make_them_anew(
    make_agent: MakeAgent, pulumi: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pulumi(0)
    monkeypatch.setattr(recover, "BOOT_LIMIT_S", 0.0)
    dead = target(make_agent(gone, host="w-0"))
    with pytest.raises(RequestError, match="w-0: no route") as error:
        recover.repaired(dead, lambda: dead, lambda text: None)
    assert "pulumi up --stack dev --replace" in str(error.value)


def test_hosts_that_pulumi_did_not_make_are_the_users_to_bring_back(make_agent: MakeAgent) -> None:
    with pytest.raises(RequestError, match="1 of 1 hosts do not answer, and Pulumi did not make them"):
        recover.repaired(target(make_agent(gone), None), must_not_be_asked, lambda text: None)


def test_a_run_that_goes_on_keeps_the_limits_that_it_was_started_with(write_run: WriteRun) -> None:
    assert follow.resuming(write_run(hang_limit_s=900.0)).hang_floor_s == 900
    assert follow.resuming(write_run(heartbeat_limit_s=20.0)).heartbeat_limit_s == 20
    fresh = follow.resuming(write_run())
    assert (fresh.hang_floor_s, fresh.heartbeat_limit_s) == (plan.HANG_FLOOR_S, plan.HEARTBEAT_LIMIT_S)
