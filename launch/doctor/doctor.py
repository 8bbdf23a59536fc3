"""`fab doctor`: all checks from near to far, what they found, and a verdict."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from contracts.errors import RequestError
from jobs.runtime.cache import user_cache_dir
from launch.deploy.deploy import named
from launch.display import say, terminal
from launch.doctor import google_cloud, slice_hosts, workstation
from launch.doctor.check import Check, Finding, carry_out
from launch.doctor.workstation import Machine
from launch.jobs import CHECKOUT
from launch.target import Target

MARKS = {"ok": "✓", "warn": "!", "fail": "✗", "skip": "·"}
Open = Callable[[], Target]


def doctor(open_target: Open, *, wants_stack: bool, as_json: bool, framework: str = "jax") -> int:
    """Print every finding; 0 where nothing failed, else 1. wants_stack: whether it is about more than this machine."""
    here = Machine(
        environ=os.environ,
        home=Path.home(),
        checkout=CHECKOUT,
        cache_dir=user_cache_dir(os.environ),
        ask=workstation.ask,
    )
    console = terminal()
    found: list[Finding] = []
    everything = findings(here, open_target, wants_stack=wants_stack, framework=framework)
    for area, of_area in itertools.groupby(everything, key=lambda finding: finding.area):
        listed = list(of_area)
        found += listed
        if not as_json:
            say(console)("\n".join([area, *(line for each in grouped(listed) for line in lines(each))]))
    if as_json:
        print(
            json.dumps(
                {"ok": not _failed(found), "findings": [dataclasses.asdict(each) for each in found]}, indent=2
            )
        )
    else:
        say(console)(verdict(found))
    return 1 if _failed(found) else 0


def _failed(found: Sequence[Finding]) -> int:
    return sum(each.state == "fail" for each in found)


def findings(here: Machine, open_target: Open, *, wants_stack: bool, framework: str) -> Iterator[Finding]:
    """From near to far; without a target what lies farther is not looked at."""
    yield from carry_out(workstation.checks(here, needs_pulumi=wants_stack))
    try:
        target = open_target()
    except RequestError as error:
        yield Finding(area="stack", name="inventory", state="fail", message=str(error))
        if wants_stack:
            yield from carry_out([Check("this machine", "gcloud", lambda: workstation.gcloud(here.ask))])
            yield from carry_out([Check("this machine", "ssh keys", lambda: workstation.usable(here))])
            yield from carry_out([Check("this machine", "os login", lambda: workstation.os_login(here))])
        return
    if not target.is_local:
        yield from carry_out(_account(here, target))
        yield from carry_out(_stack(here, target))
    yield from _hosts(target, framework)
    yield from carry_out(slice_hosts.checks(target))


def _account(here: Machine, target: Target) -> list[Check]:
    """What of this machine matters for this stack's hosts."""
    area = workstation.AREA
    found = [Check(area, "ssh keys", lambda: workstation.usable(here))]
    project = target.inventory.project
    if project is None:
        return found
    found.append(Check(area, "gcloud", lambda: workstation.gcloud(here.ask)))
    found.append(Check(area, "credentials", lambda: google_cloud.default_credentials(here.environ)))
    if any(host.user is None for host in target.hosts):
        found.append(Check(area, "os login", lambda: workstation.os_login(here)))
    if any(host.reach == "iap" for host in target.hosts):
        found.append(Check(area, "roles", lambda: google_cloud.roles(project, here.environ)))
    return found


def _stack(here: Machine, target: Target) -> list[Check]:
    inventory, one_slice, project = target.inventory, target.slice, target.inventory.project
    found = [
        Check("stack", "slice", lambda: google_cloud.slice_in_use(inventory, one_slice)),
        Check("stack", "regions", lambda: google_cloud.regions(inventory, one_slice)),
    ]
    if project is not None:
        found.append(
            Check("stack", "capacity", lambda: google_cloud.queued_resource(here.ask, project, one_slice))
        )
    return found


def _hosts(target: Target, framework: str) -> Iterator[Finding]:
    """The first alone, for all others may be reached through it; those that do not answer are asked nothing more."""
    everyone = list(range(len(target.hosts)))
    first = list(
        carry_out([Check("network", "first host", lambda: slice_hosts.reached(target, everyone[:1]))])
    )
    others = list(carry_out([Check("network", "hosts", lambda: slice_hosts.reached(target, everyone[1:]))]))
    yield from [*first, *others]
    lost = {finding.host for finding in [*first, *others] if finding.state == "fail"}
    rest = [index for index in everyone if target.hosts[index].name not in lost]
    if rest:
        answering = only(target, rest)
        yield from carry_out(
            [Check("hosts", "preflight", lambda: slice_hosts.preflight(answering, framework))]
        )


def only(target: Target, indexes: Sequence[int]) -> Target:
    """The target without the other hosts."""
    return dataclasses.replace(
        target,
        hosts=tuple(target.hosts[index] for index in indexes),
        transports=tuple(target.transports[index] for index in indexes),
        agents=tuple(target.agents[index] for index in indexes),
        cpus=tuple(target.cpus[index] for index in indexes),
    )


def grouped(found: Sequence[Finding]) -> list[Finding]:
    """The findings of one area as they are shown: what holds of several hosts alike is said once."""
    groups: dict[tuple[str | None, ...], list[Finding]] = {}
    for number, each in enumerate(found):
        if each.host is None:
            groups[(str(number),)] = [each]
        else:
            # Messages of what is in order may differ in a figure; those of what is not are all shown.
            same = (each.message, each.remedy) if each.state != "ok" else ()
            groups.setdefault(("", each.name, each.state, *same), []).append(each)
    return [_merged(group) for group in groups.values()]


def _merged(group: Sequence[Finding]) -> Finding:
    if len(group) == 1:
        return group[0]
    alike = all(each.message == group[0].message for each in group)
    message = group[0].message if alike else f"such as {group[0].message}"
    return dataclasses.replace(
        group[0],
        host=named(list(dict.fromkeys(each.host for each in group if each.host is not None))),
        message=message,
    )


def lines(finding: Finding) -> list[str]:
    """A finding on a terminal; the remedy stands under it."""
    host = f"{finding.host}: " if finding.host else ""
    text = f"  {MARKS[finding.state]} {finding.name}: {host}{finding.message}"
    return [text, f"      → {finding.remedy}"] if finding.remedy else [text]


def verdict(found: Sequence[Finding]) -> str:
    """One line for everything."""
    warned = sum(each.state == "warn" for each in found)
    parts = [f"{_failed(found)} failed"] * bool(_failed(found)) + [f"{warned} to look at"] * bool(warned)
    return f"{', '.join(parts)}, of {len(found)} looked at" if parts else f"all well, {len(found)} looked at"
