"""The launcher's own records of a run: run.json, a result.json that nobody else wrote, and how it ended in words."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts import run_directory
from contracts.durations import clock
from contracts.errors import DONE, FAILED, INTERRUPTED, UNAVAILABLE, WRONG_REQUEST
from contracts.run_directory import State
from jobs.runtime import metric_definitions
from jobs.runtime.metric_definitions import NO_METRICS, UNDECLARED, finite
from launch import jobs, runs
from launch.costs import of_run, price_of
from launch.jobs import Submitted
from launch.output import counted, printable
from launch.plan import Plan
from launch.runs import Run


def run_record(
    plan: Plan,
    config: Any,
    *,
    name: str | None,
    track: Sequence[str] = (),
    processes_per_host: str | None = None,
    sweep: Mapping[str, Any] | None = None,
    submitted: Submitted | None = None,
    now: datetime.datetime,
    before: Mapping[str, Any] | None,
    of_launcher: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of run.json for a new attempt.

    before: its content so far, for a run that is resumed. of_launcher: its `record`.
    """
    target, own = plan.target, plan.command
    runs_here = target.capabilities.shares_files and target.python == sys.executable
    if submitted is not None:
        git, metrics = dict(submitted.code), submitted.metric_definitions
    else:
        commit = jobs.commit_of(jobs.CHECKOUT if own is None else Path(config.workdir))
        git = {"git_commit": commit and commit.hash, "git_dirty": commit and commit.is_dirty}
        metrics = metric_definitions.as_json(UNDECLARED if own is not None else jobs.find(plan.job).metrics)
    if before is not None and own is not None and before["code"]["folder"] == own.folder_sha256:
        git = {name: before["code"][name] for name in git}  # this machine may not have the folder
    moment = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    image = plan.container.image if plan.container is not None else None
    attempt = {
        "attempt": plan.attempt,
        "started": moment,
        "processes": plan.processes,
        "coordinator": plan.coordinator,
        "bundle": plan.bundle_sha256,
        "image": image,
        "price": price_of(target.slice),
        "outcome": None,
    }
    return {
        "version": run_directory.RUN_VERSION,
        "run_id": plan.run_id,
        "name": name or (before["name"] if before else None),
        "job": plan.job,
        "stack": plan.framework,
        "target": target.name,
        "platform": target.platform,
        **({} if processes_per_host is None else {"processes_per_host": processes_per_host}),
        **({"track": [*track]} if track else {}),
        **({"sweep": member} if (member := sweep or (before or {}).get("sweep")) else {}),
        **({"max_usd": plan.budget.max_usd} if plan.budget is not None else {}),
        **(of_launcher or {}),
        "runtime": "bare" if plan.container is None else "docker",
        "args": list(plan.arguments),
        "config": dataclasses.asdict(config),
        "metric_definitions": metrics,
        "code": {
            "bundle": plan.bundle_sha256,
            **({"folder": own.folder_sha256} if own is not None else {}),
            **git,
        },
        "image": image,
        "container_access": plan.container.access if plan.container is not None else None,
        "hang_limit_s": plan.hang_floor_s,
        "heartbeat_limit_s": plan.heartbeat_limit_s,
        "versions": versions() if runs_here and plan.container is None and plan.framework == "jax" else {},
        "slice": dataclasses.asdict(target.slice),
        "hosts": [
            {"index": host.index, "name": host.name, "address": host.internal_address}
            for host in target.hosts
        ],
        "created": before["created"] if before else moment,
        "cwd": plan.cwd,
        "cache_dir": target.cache_dir,
        "attempts": [*(before["attempts"] if before else []), attempt],
    }


def versions() -> dict[str, str]:
    """Return the versions of this interpreter and of the libraries that decide what a run computes."""
    found = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tokenizers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def finalize(run: Run, outcome: str, error: str | None) -> Run:
    """Write result.json, if the attempt has none, and the report; return the run as it is then.

    A result that the job or an agent wrote is left as it is, readable or not: they were there.
    """
    fresh = runs.read(run.directory) or run
    if fresh.current_result() is None and fresh.unread_result is None:
        step, _ = runs.progress(fresh)
        fresh.directory.write_json(
            run_directory.RESULT,
            run_directory.result(outcome, attempt=fresh.attempt, steps=step, time=time.time(), error=error),
        )
    from jobs.runtime.report.render import read_and_render  # no launch needs it before its end

    with contextlib.suppress(OSError):  # a report is worth having, but not worth hiding how the run ended
        fresh.directory.write_text(run_directory.REPORT, read_and_render(fresh.directory.url))
    return runs.read(fresh.directory) or fresh


def exit_code(run: Run, state: State) -> int:
    """Return the exit code: 0 done; 1 failed; 2 the request was wrong; 69 something outside was away; 130 stopped."""
    if state == "done":
        return DONE
    if state in ("stopped", "preempted"):
        return INTERRUPTED
    result = run.current_result() or {}
    if result.get("exit_code") == UNAVAILABLE:
        return UNAVAILABLE
    return WRONG_REQUEST if result.get("request") else FAILED


def summary(run: Run, state: State) -> list[str]:
    """Return the last lines that a person sees of a run."""
    if state == "done":
        return _done(run)
    result = run.current_result() or {}
    is_spent = state == "stopped" and bool(result.get("out_of_budget"))
    more = f" --max-usd {2 * (finite(run.described.get('max_usd')) or 0):g}" if is_spent else ""
    resume = f"resume with `fab train --resume {run.run_id}{more}`"
    saved = run.directory.checkpoint_steps()
    if run.described["job"] == jobs.SERVER:
        resume = f"start another with `fab serve {run.described['config']['run']}`"
    elif saved:
        resume += f" (from step {saved[-1]})"
    elif run.is_own_command:
        resume += " (the command starts again, and finds its RUN_DIR as it was)"
    else:
        resume += " (no checkpoint yet: from the start)"
    if is_spent:
        return [f"{run.run_id} was stopped: out of budget", f"  {result.get('reason')}", f"  {resume}"]
    if state in ("stopped", "preempted"):
        return [f"{run.run_id} {run_directory.ENDED[state]}; {resume}"]
    if result.get("request"):
        return [f"{run.run_id}: {result.get('error')}"]
    lines = [f"{run.run_id} {run_directory.ENDED.get(state, f'is {state}')}"]
    if state == "lost" and run.unread_result is not None:
        lines[0] = f"{run.run_id}: how it ended cannot be read: {run.unread_result}"
    elif state == "lost":
        lines[0] += ": its processes are gone and left no result (was the machine restarted?)"
    if result.get("error"):
        lines += ["  " + line for line in str(result["error"]).splitlines()]
    host = result.get("failed_host")
    if host is not None:
        lines.append(f"  log: {run.directory.path(run_directory.log(run.attempt, host))}")
    return [*lines, f"  {resume}"]


def _done(run: Run) -> list[str]:
    result = run.current_result() or {}
    rows: list[tuple[str, str]] = []
    measured = {
        name: value for name, value in result.items() if finite(value) is not None and name not in NO_METRICS
    }
    if run.metrics.headline not in measured:  # a job may leave it to the last line of its metrics
        _, latest = runs.progress(run)
        value = finite(latest.get(run.metrics.headline))
        measured |= {} if value is None else {run.metrics.headline: value}
    rows += [
        (printable(metric.title), printable(run.metrics.compared(metric, measured)))
        for metric in run.metrics.told(measured)
        if not metric.is_detail
    ]
    taken, total, exported = result.get("steps"), run.total_steps, result.get("exported_step")
    of_all = f"{taken:,} of {counted(total, 'step')}" if total and taken not in (None, total) else None
    steps = "" if taken is None else f" for {of_all or counted(taken, 'step')}"
    rows.append(("wall time", clock(result.get("wall_s") or 0) + steps))
    rows += _time_split(result.get("time_s"))
    if cost := of_run(run):
        rows.append(("cost", cost.text()))
    saved = run.directory.checkpoint_steps()
    if saved:
        rows.append(("checkpoint", run.directory.path(f"{run_directory.CHECKPOINTS}/{saved[-1]}")))
    if run.directory.list(run_directory.EXPORT):
        of_step = f" (step {exported}, the best)" if exported not in (None, taken) else ""
        rows.append(("export", run.directory.path(run_directory.EXPORT) + of_step))
    if isinstance(found := result.get("tensorboard"), str):
        rows.append(("curves", f"tensorboard --logdir {run.directory.path(found)}"))
    warned = result.get("warnings")
    if isinstance(warned, list) and warned:
        rows.append(("warnings", f"{len(warned)}; the report has them"))
    rows.append(("report", run.directory.path(run_directory.REPORT)))
    width = max(12, *(len(label) for label, _ in rows))
    return [f"{run.run_id} is done", *(f"  {label:<{width}} {text}" for label, text in rows)]


def _time_split(said: object) -> list[tuple[str, str]]:
    """Return the shares of the parts that took 1% of the time or more, the largest first."""
    parts = (
        {name: s for name, s in said.items() if isinstance(s, int | float) and s > 0}
        if isinstance(said, dict)
        else {}
    )
    total_s = sum(parts.values())
    largest = sorted(parts.items(), key=lambda part: -part[1])
    shares = [f"{name.replace('_', ' ')} {s / total_s:.0%}" for name, s in largest if s > 0.01 * total_s]
    return [("of that", ", ".join(shares))] if shares else []
