"""What a deployment is told as: changes and failures by host, hosts that are alike together."""

from __future__ import annotations

import io

from rich.console import Console

from launch.deploy import deploy
from launch.deploy.deploy import Answer, Outcome, State
from launch.hosts import HostError


def outcome(host: str, *steps: tuple[str, State, str], error: HostError | None = None) -> Outcome:
    answers = tuple(Answer(step=step, state=state, message=message) for step, state, message in steps)
    return Outcome(host=host, answers=answers, error=error)


def printed(outcomes: list[Outcome]) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=100, markup=False).print(deploy.table(outcomes))
    return [" ".join(line.split()) for line in file.getvalue().splitlines()]


def test_hosts_where_the_same_happened_are_told_of_together() -> None:
    alike = [outcome(f"w-{index}", ("a", "ok", "there"), ("b", "changed", "made")) for index in range(4)]
    other = outcome("w-4", ("a", "ok", "there"), ("b", "skipped", "no such thing"))
    assert printed([*alike, other])[1:] == ["w-0 … w-3 (4 hosts) b changed made", "w-4 nothing to do"]
    assert deploy.verdict([*alike, other]) == "5 hosts ready, 4 changed"


def test_a_second_deployment_has_nothing_to_say_but_that() -> None:
    twice = [outcome(f"w-{index}", ("a", "ok", "there")) for index in range(2)]
    assert printed(twice)[1:] == ["w-0, w-1 nothing to do"]
    assert deploy.verdict(twice) == "2 hosts ready: nothing to do"


def test_a_host_that_failed_or_was_lost_or_never_reached_is_named_with_its_remedy() -> None:
    lost = HostError(host="w-1", reason="connection lost", remedy="again")
    failed = Answer(step="a", state="failed", message="no disk", remedy="buy one")
    told = [
        Outcome(host="w-0", answers=(failed,)),
        outcome("w-1", ("a", "ok", "there"), error=lost),
        outcome("w-2", error=lost),
    ]
    assert printed(told)[1:] == [
        "w-0 a FAILED no disk → buy one",
        "w-1 LOST connection lost → again",
        "w-2 NOT REACHED connection lost → again",
    ]
    assert deploy.verdict(told) == "3 of 3 hosts are not ready"
