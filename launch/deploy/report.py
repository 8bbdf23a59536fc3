"""What a deployment came to, host by host; hosts that are alike are told of together. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from launch.deploy.answers import Answer, Outcome

NOTHING = "nothing to do"
MARKS = {"changed": "changed", "warned": "warning", "failed": "FAILED"}
Row = tuple[str, str, str]


def rows(outcome: Outcome) -> tuple[Row, ...]:
    """(step, what became of it, message) of what a reader has to know of one host."""
    told = [
        (answer.step, MARKS[answer.state], _text(answer))
        for answer in outcome.answers
        if answer.state in MARKS
    ]
    if outcome.error is not None:
        remedy = f" → {outcome.error.remedy}" if outcome.error.remedy else ""
        told.append(("", "LOST" if outcome.answers else "NOT REACHED", outcome.error.reason + remedy))
    return tuple(told) or (("", "", NOTHING),)


def _text(answer: Answer) -> str:
    took = f" ({answer.took_s:.0f} s)" if answer.state == "changed" and answer.took_s >= 1 else ""
    return answer.message + took + (f" → {answer.remedy}" if answer.remedy else "")


def table(outcomes: Sequence[Outcome]) -> Table:
    alike: dict[tuple[Row, ...], list[str]] = {}
    for outcome in outcomes:
        alike.setdefault(rows(outcome), []).append(outcome.host)
    found = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("host", "step", "", "what"):
        found.add_column(heading, overflow="fold")
    for told, hosts in alike.items():
        for number, row in enumerate(told):
            found.add_row(named(hosts) if number == 0 else "", *row)
    return found


def named(hosts: Sequence[str]) -> str:
    """A group of hosts: the first and the last of many, and how many they are."""
    if len(hosts) <= 2:
        return ", ".join(hosts)
    return f"{hosts[0]} … {hosts[-1]} ({len(hosts)} hosts)"


def verdict(outcomes: Sequence[Outcome]) -> str:
    """One line for all hosts."""
    failed = sum(outcome.failed for outcome in outcomes)
    changed = sum(outcome.changed and not outcome.failed for outcome in outcomes)
    if failed:
        return f"{failed} of {_hosts(len(outcomes))} {'is' if failed == 1 else 'are'} not ready"
    if changed:
        return f"{_hosts(len(outcomes))} ready, {changed} changed"
    return f"{_hosts(len(outcomes))} ready: {NOTHING}"


def _hosts(count: int) -> str:
    return f"{count} host{'s' * (count != 1)}"
