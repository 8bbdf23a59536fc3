"""`fab verify`: a process on every host, started as a run's is, that computes with all the others; and a verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import random
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

from contracts.errors import RequestError
from contracts.run_directory import RunDirectory, heartbeat
from launch import bundle as bundles
from launch import container, rollout, runs, verdict
from launch import plan as plans
from launch.agents import ask_all
from launch.container import Container
from launch.display import say, terminal
from launch.errors import HostError
from launch.jobs import CHECKOUT
from launch.plan import Plan
from launch.rollout import NotJoined
from launch.target import Target

FOLDER = ".verify"
"""In the folder of runs, and no run: what is looked for there has other names."""
MODULES = {"jax": "runtime.jax.verify"}
"""What is started on the hosts, by framework, as a module of `jobs`."""
LIMIT_S = 600.0
POLL_S = 0.5


def verify(target: Target, framework: str, runtime: str | None, container_access: str | None = None) -> int:
    """Print what each host found and whether all is well; 0 or 1.

    runtime, container_access: as `launch.container.choose` takes them.

    Raises:
        RequestError: there is no such framework here, or the hosts are a part of a TPU slice.
        HostsError: a host failed the preflight, and nothing was started; or a start, and all was stopped again.
    """
    console = terminal()
    plan, failures, found = gather(target, framework, runtime, container_access)
    hosts = [host.name for host in target.hosts]
    problems = [*failures, *verdict.problems(verdict.expected(target), hosts, found)]
    console.print(verdict.table(hosts, found, verdict.expected(target)))
    for line in verdict.lines(found, problems, hosts):
        say(console)(line)
    if problems:
        say(console)(f"what the hosts wrote: {plan.run_dir}")
        return 1
    clear(target, plan)
    return 0


def gather(
    target: Target, framework: str, runtime: str | None, container_access: str | None = None
) -> tuple[Plan, list[str], Sequence[Mapping[str, Any] | None]]:
    """What was carried out, what failed, and each process's report, in worker order. Raises as `verify`."""
    if framework not in MODULES:
        raise RequestError(f"--framework {framework}: choose one of {', '.join(MODULES)}")
    if part := target.part_of_tpu:
        raise RequestError(part)
    box = container.choose(target, framework, runtime, container.built_here, access=container_access)
    plan = _plan(target, framework, box)
    failures = _carry_out(plan, target)
    names = [f"verify/host-{index}.json" for index in range(plan.processes)]
    return plan, failures, RunDirectory(plan.run_dir, target.files).read_jsons(names)


def clear(target: Target, plan: Plan) -> None:
    """Leave nothing behind of what went well."""
    if target.is_local:
        shutil.rmtree(plan.run_dir, ignore_errors=True)
        return
    with contextlib.suppress(HostError, OSError):  # a few kilobytes that stay are no reason to fail
        _remove(target, plan.run_dir, depth=4)


def _plan(target: Target, framework: str, box: Container | None) -> Plan:
    now = datetime.datetime.now(datetime.UTC)
    run_id = runs.new_run_id(f"verify_{framework}", now, random.Random())
    return plans.on(
        target,
        run_id=run_id,
        job=MODULES[framework],
        stack=framework,
        run_dir=f"{target.runs_url}/{FOLDER}/{run_id}",
        cwd=plans.HOME,
        bundle_sha256="",
        container=box,
    )


def _carry_out(plan: Plan, target: Target) -> list[str]:
    """Start, wait for the end, and stop what is left; what failed, in words."""
    code = bundles.build(CHECKOUT)
    plan = dataclasses.replace(plan, bundle_sha256=code.sha256)
    facts = rollout.preflight(plan, target.agents)
    rollout.stage(plan, code, target.agents, facts)
    rollout.pull(plan, target.agents, facts, say(terminal()))
    plan = plans.settled(plan, facts, token=secrets.token_hex(16))
    rollout.start(plan, target.agents)
    try:
        try:
            rollout.join(plan, target.agents)
            is_over = _wait(plan, target)
        except NotJoined as error:
            hint = container.way_out(plan.container, plan.platform)
            return [str(error), *_reasons(plan, target), *([hint] if hint else [])]
        return _reasons(plan, target) + ([] if is_over else [f"it was not done within {LIMIT_S:.0f} s"])
    finally:
        rollout.stop(target.agents, plan.run_id, plan.attempt, grace_s=0)


def _wait(plan: Plan, target: Target) -> bool:
    """Whether every process has ended in time."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if all(entry["state"] not in ("starting", "running") for entry in _status(plan, target)):
            return True
        time.sleep(POLL_S)
    return False


def _status(plan: Plan, target: Target) -> list[dict[str, Any]]:
    """Of every process that its host tells of; a host that does not answer now may do so at the next look."""
    requests = [plan.process(index) for index in range(plan.processes)]
    answers = ask_all(target.agents, "status", requests)
    silent = {"state": "running"}
    return [
        entry
        for answer in answers
        for entry in ([silent] if isinstance(answer, HostError) else answer["processes"])
    ]


def _reasons(plan: Plan, target: Target) -> list[str]:
    """What processes that did not end well say, or what is known of how they ended."""
    beats = RunDirectory(plan.run_dir, target.files).read_jsons(
        [heartbeat(index) for index in range(plan.processes)]
    )
    requests = [plan.process(index) for index in range(plan.processes)]
    found = []
    for host, answer, beat in zip(
        target.hosts, ask_all(target.agents, "status", requests), beats, strict=True
    ):
        if isinstance(answer, HostError):
            found.append(str(answer))
            continue
        for entry in answer["processes"]:
            reason = _reason(entry, beat)
            found += [f"{host.name}: {reason}"] if reason else []
    return found


def _reason(entry: Mapping[str, Any], beat: Mapping[str, Any] | None) -> str | None:
    if entry["state"] in ("starting", "running") or entry.get("code") == 0:
        return None
    said = (beat or {}).get("message") if (beat or {}).get("state") == "failed" else None
    how = entry.get("reason") or (
        f"ended by signal {entry['signal']}" if entry.get("signal") else f"exit code {entry.get('code')}"
    )
    return str(said or how)


def _remove(target: Target, path: str, *, depth: int) -> None:
    names: Sequence[str] = target.files.list(path) if depth and "." not in path.rpartition("/")[2] else ()
    for name in names:
        _remove(target, f"{path}/{name}", depth=depth - 1)
    target.files.remove(path)
