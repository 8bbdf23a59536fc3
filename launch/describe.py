"""run.json: everything that a later reader needs to know of how a run was started."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import platform
from collections.abc import Mapping
from typing import Any

from contracts import run_directory
from jobs.runtime import metric_definitions
from launch import bundle, jobs
from launch.plan import Plan
from launch.target import Target


def describe(
    plan: Plan,
    target: Target,
    config: Any,
    *,
    name: str | None,
    now: datetime.datetime,
    before: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The content of run.json for a new attempt. before: what it said so far, for a run that is resumed."""
    commit = bundle.commit_of(jobs.CHECKOUT)
    moment = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    image = plan.container.image if plan.container is not None else None
    attempt = {
        "attempt": plan.attempt,
        "started": moment,
        "processes": plan.processes,
        "coordinator": plan.coordinator,
        "bundle": plan.bundle_sha256,
        "image": image,
        "outcome": None,
    }
    return {
        "version": run_directory.RUN_VERSION,
        "run_id": plan.run_id,
        "name": name or (before["name"] if before else None),
        "job": plan.job,
        "stack": plan.stack,
        "target": target.name,
        "platform": plan.platform,
        "runtime": "bare" if plan.container is None else "docker",
        "args": list(plan.arguments),
        "config": dataclasses.asdict(config),
        "metric_definitions": metric_definitions.as_json(jobs.find(plan.job).metrics),
        "code": {
            "bundle": plan.bundle_sha256,
            "git_commit": commit.hash if commit else None,
            "git_dirty": commit.is_dirty if commit else None,
        },
        "image": image,
        "container_access": plan.container.access if plan.container is not None else None,
        "hang_limit_s": plan.hang_floor_s,
        "heartbeat_limit_s": plan.heartbeat_limit_s,
        "versions": versions() if target.is_local and plan.container is None else {},
        "slice": dataclasses.asdict(target.slice),
        "hosts": [
            {"index": host.index, "name": host.name, "address": host.internal_address}
            for host in target.hosts
        ],
        "created": before["created"] if before else moment,
        "cwd": plan.cwd,
        "cache_dir": plan.cache_dir,
        "attempts": [*(before["attempts"] if before else []), attempt],
    }


def versions() -> dict[str, str]:
    """Of this interpreter and the libraries that decide what a run computes."""
    found = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tokenizers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
