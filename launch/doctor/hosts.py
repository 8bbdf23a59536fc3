"""The hosts: whether each is reached by its route, and everything that its agent finds there."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from launch import container
from launch import plan as plans
from launch.agents import ask_all
from launch.doctor.finding import Said, fail, ok
from launch.errors import HostError
from launch.plan import Plan
from launch.target import Target

IN_USE = ("device", "lockfile", "leftovers")
"""Checks that fail of a host that is at work, which is no fault of the host."""
ALIKE = ("kernel", "cpus")
"""Facts in which the hosts of a slice do not differ."""
NOTHING = "0" * 64
"""Stands for a bundle of code that no host has: none is sent."""


def asked(target: Target, stack: str) -> Plan:
    """A plan that nobody carries out: what a run would ask of the hosts."""
    return plans.on(
        target,
        run_id="doctor",
        job="doctor",
        stack=stack,
        run_dir=target.runs_url,
        cwd=plans.HOME,
        bundle_sha256=NOTHING,
        container=container.choose(target, stack, None, container.built_here),
    )


def reached(target: Target, indexes: Sequence[int]) -> list[Said]:
    """Whether the hosts answer, and how long that takes; all are asked at once.

    The first time is the agent's own way in: unpacked where the host has not got it yet.
    """
    began_s = time.monotonic()
    agents = [target.agents[index] for index in indexes]
    answers = ask_all(agents, "list", [{"path": agent.root} for agent in agents])
    took_s = time.monotonic() - began_s
    said = []
    for index, answer in zip(indexes, answers, strict=True):
        host = target.hosts[index]
        way = {"iap": "through IAP", "gateway": "through the gateway", "direct": "directly", "local": "here"}
        if isinstance(answer, HostError):
            said.append(fail(f"{answer.reason} ({way[host.reach]})", answer.remedy, host=host.name))
        else:
            said.append(ok(f"answers {way[host.reach]} ({took_s:.1f} s)", host=host.name))
    return said


def preflight(target: Target, stack: str) -> list[Said]:
    """What a run would find on every host, each check of each."""
    plan = asked(target, stack)
    requests = [plans.preflight(plan, index, now_s=time.time()) for index in range(plan.processes)]
    answers = ask_all(target.agents, "preflight", requests)
    busy = runs_on(target)
    said: list[Said] = []
    for host, answer in zip(target.hosts, answers, strict=True):
        if isinstance(answer, HostError):
            said.append(Said("fail", answer.reason, answer.remedy, host.name, "preflight"))
        else:
            said += [_check(each, host.name, busy.get(host.name)) for each in answer["checks"]]
            said += _facts(answer.get("facts", {}), host.name, target) if plan.container is None else []
    return [*said, *_differing(answers, target)]


def runs_on(target: Target) -> dict[str, str]:
    """The run that each host is at work for, where it is."""
    request = {"run_id": None, "attempt": None, "process_id": None}
    answers = ask_all(target.agents, "status", [request] * len(target.agents))
    found = {}
    for host, answer in zip(target.hosts, answers, strict=True):
        if not isinstance(answer, HostError):
            for entry in answer["processes"]:
                if entry["state"] in ("starting", "running"):
                    found[host.name] = str(entry["run_id"])
    return found


def _check(check: Mapping[str, Any], host: str, busy_with: str | None) -> Said:
    name, message = str(check["name"]), str(check["message"])
    if check["ok"]:
        return Said("ok", message, "", host, name)
    if busy_with is not None and name in IN_USE:
        return Said("warn", f"{message}: {busy_with} is running", f"`fab stop --run {busy_with}`", host, name)
    return Said("fail", message, str(check["remedy"] or ""), host, name)


def _facts(facts: Mapping[str, Any], host: str, target: Target) -> list[Said]:
    """What no run needs today and somebody may look for. Absent facts say nothing."""
    if target.is_local or not target.inventory.images or "docker" not in facts:
        return []
    if facts["docker"]:
        return [Said("ok", "docker is there", "", host, "docker")]
    return [
        Said(
            "warn",
            "docker is not there, and the stack has images",
            "take a runtime that has it",
            host,
            "docker",
        )
    ]


def _differing(answers: Sequence[Mapping[str, Any] | HostError], target: Target) -> list[Said]:
    """Hosts of one slice that are not alike."""
    said = []
    for name in ALIKE:
        by_value: dict[str, list[str]] = {}
        for host, answer in zip(target.hosts, answers, strict=True):
            if not isinstance(answer, HostError) and name in answer.get("facts", {}):
                by_value.setdefault(str(answer["facts"][name]), []).append(host.name)
        if len(by_value) > 1:
            told = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in by_value.items())
            said.append(
                Said("warn", f"not the same on all hosts: {told}", "make the slice again", None, name)
            )
    return said
