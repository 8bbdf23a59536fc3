"""What a host does with steps: only what is missing, never twice, and never for longer than it may."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends.vm import runner
from backends.vm.steps import Step
from tests.processes import all_end

CarryOut = Callable[..., list[dict[str, Any]]]


def states(answers: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(answer["step"], answer["state"], answer["message"]) for answer in answers]


def making(path: Path, **changed: Any) -> Step:
    """A step that makes a file, and would be seen to have been carried out twice."""
    given = {
        "name": "file",
        "check": f"[ -e '{path}' ] || {{ echo none; exit 1; }}; echo there",
        "change": f"echo made >>'{path}'",
        "limit_s": 10.0,
        "remedy": "make it",
        **changed,
    }
    return Step(**given)


def test_what_is_missing_is_made_and_the_second_time_there_is_nothing_to_do(
    carry_out: CarryOut, tmp_path: Path
) -> None:
    step = making(tmp_path / "made")
    assert states(carry_out([step])) == [("file", "changed", "there")]
    assert states(carry_out([step])) == [("file", "ok", "there")]
    assert (tmp_path / "made").read_text() == "made\n"


def test_a_change_that_fails_or_changes_nothing_is_said_and_the_steps_after_it_are_carried_out(
    carry_out: CarryOut, tmp_path: Path
) -> None:
    idle = making(tmp_path / "none", name="idle", change="true")
    failing = making(tmp_path / "none", change="echo first; echo the disk is full >&2; exit 3")
    answers = carry_out([idle, failing, making(tmp_path / "made", name="other")])
    assert states(answers) == [
        ("idle", "failed", "changed, and yet: none"),
        ("file", "failed", "first | the disk is full"),
        ("other", "changed", "there"),
    ]
    assert answers[0]["remedy"] == "make it"


def test_what_needs_a_failed_step_is_not_tried_and_one_that_does_not_apply_holds_nothing_up(
    carry_out: CarryOut, tmp_path: Path
) -> None:
    failing = making(tmp_path / "none", change="exit 1")
    second = making(tmp_path / "second", name="second", needs=("file",))
    third = making(tmp_path / "third", name="third", needs=("second",))
    absent = making(tmp_path / "none", name="absent", when="echo no such thing here; exit 1")
    after = making(tmp_path / "made", name="after", needs=("absent",))
    answers = carry_out([failing, second, third, absent, after])
    assert states(answers)[1:] == [
        ("second", "skipped", "not tried, for it needs: file"),
        ("third", "skipped", "not tried, for it needs: second"),
        ("absent", "skipped", "no such thing here"),
        ("after", "changed", "there"),
    ]
    assert not (tmp_path / "third").exists()


def test_what_only_time_mends_is_waited_for(carry_out: CarryOut, tmp_path: Path) -> None:
    looked = tmp_path / "looked"
    check = f"[ -e '{looked}' ] && {{ echo free; exit 0; }}; touch '{looked}'; echo held by apt; exit 1"
    answers = carry_out([Step(name="lock", check=check, limit_s=30.0)], under_way=True)
    assert states(answers) == [("lock", "doing", "waiting: held by apt"), ("lock", "ok", "free")]


def test_a_wait_and_a_look_end_with_their_limits(carry_out: CarryOut, tmp_path: Path) -> None:
    held = Step(name="lock", check="echo held by apt; exit 1", limit_s=0.2, remedy="end it")
    silent = making(tmp_path / "none", check="sleep 300", change="", limit_s=0, look_limit_s=0.3)
    waited, looked = carry_out([held, silent])
    assert (waited["state"], waited["message"]) == ("failed", "held by apt (waited 0.2 s)")
    assert waited["remedy"] == "end it"
    assert (looked["state"], looked["message"]) == ("failed", "not done after 0.3 s")


def test_a_change_that_does_not_end_is_ended_with_all_that_it_started(
    carry_out: CarryOut, tmp_path: Path
) -> None:
    children = tmp_path / "children"
    change = f"sleep 300 & echo $! >>'{children}'; sleep 300 & echo $! >>'{children}'; wait"
    began_s = time.monotonic()
    (answer,) = carry_out([making(tmp_path / "none", change=change, limit_s=0.5)])
    assert time.monotonic() - began_s < 20
    assert answer["state"] == "failed" and answer["message"].startswith("not done after 0.5 s")
    assert all_end([int(pid) for pid in children.read_text().split()])


def test_a_host_without_sudo_says_so_only_where_something_has_to_be_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "sudo").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "sudo").chmod(0o755)
    steps = runner.Steps(lambda line: None)
    in_order = {**vars(making(tmp_path, root=True)), "look_limit_s": 10}
    assert steps.outcome(in_order) == ("ok", "there", "")
    missing = {**vars(making(tmp_path / "none", root=True)), "look_limit_s": 10}
    state, message, remedy = steps.outcome(missing)
    assert (state, message) == ("failed", "none; fixing that needs root")
    assert "sudo" in remedy
    assert not (tmp_path / "none").exists()
    assert runner.as_words("true", 5, True)[:3] == ["sudo", "-n", "--"]
    assert runner.as_words("true", 5, False)[0] == "timeout"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert runner.as_words("true", 5, True)[0] == "timeout"
