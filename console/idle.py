"""Idle slices: since when no run has used a slice, and the line by which every command names it."""

from __future__ import annotations

import contextlib
import json
import os
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path

from contracts import atomic
from contracts.durations import HOUR_S, spoken
from contracts.errors import RequestError
from contracts.inventory import Slice
from jobs.runtime.cache import user_cache_dir
from jobs.runtime.metric_definitions import finite
from launch import costs, runs
from launch.hosts import HostError
from launch.remote_files import within
from launch.runs import Run
from launch.targets import Target

IDLE_HOURS = 4.0
"""After which a slice is named where `tpu-stack:idle-hours` says nothing."""
LOOK_LIMIT_S = 5.0
"""For a look at the runs at the end of a command that is about something else."""


def used_s(one: Slice, several: Sequence[Run]) -> float | None:
    """Return when a slice was last used, in Unix seconds: by one of the runs, or when it was made; None: not known.

    An active run has renewed its heartbeat within seconds, so the state of runs is not asked for. Of node pools that
    stay it is not known when they were made: 0.0 where there are no runs.
    """
    made_s = costs.made_s(one) if one.pool is None else 0.0
    if made_s is None or not one.is_usable or (one.pool and one.pool.scales_to_zero):
        return None
    of_runs = (_seen_s(run) for run in several if (run.described.get("slice") or {}).get("name") == one.name)
    return max([made_s, *of_runs])


def _seen_s(run: Run) -> float:
    ended_s = finite((run.current_result() or {}).get("time")) or 0.0
    beats_s = (finite(beat.get("time")) or 0.0 for beat in run.current() if beat)
    return max([runs.parse_time(run.described["attempts"][-1]["started"]), ended_s, *beats_s])


def limit_s(target: Target) -> float:
    """Return after how long a slice of a stack counts as idle."""
    return (target.inventory.idle_hours or IDLE_HOURS) * HOUR_S


def remarks(target: Target) -> Iterator[str]:
    """Return a line for each idle slice of a stack; nothing where the runs cannot be read in time.

    When a slice was last used is noted on this machine. No run is read while that is within the limit.
    """
    now_s, path = time.time(), _memory(target)
    seen = _read(path)
    candidates = [
        each
        for each in target.inventory.slices
        if used_s(each, ()) is not None
        and now_s - max(used_s(each, ()) or 0.0, seen.get(each.name, 0.0)) > limit_s(target)
    ]
    if not target.capabilities.is_billed or not candidates:
        return
    try:
        several = within(LOOK_LIMIT_S, target.name, lambda: runs.list_runs(target.runs))
    except (HostError, OSError, RequestError):
        return
    for each in candidates:
        last_s = max(used_s(each, several) or 0.0, seen.get(each.name, 0.0)) or now_s
        seen[each.name] = last_s
        if now_s - last_s > limit_s(target):
            removed = target.inventory.has_keeper and target.inventory.idle_hours
            yield (
                f"the slice {each.name} has had no run for {spoken(now_s - last_s, units=1)}: {costs.an_hour(each)}; "
                + (
                    "its keeper gives it back unless a program has a TPU open"
                    if removed and each.pool is None
                    else "with `scale-to-zero: true` (tpu-stack:slices) its nodes go with their run"
                    if each.pool is not None
                    else "`tpu-stack:slices: []` and `pulumi up` give it back"
                )
            )
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_json(path, seen)


def _memory(target: Target) -> Path:
    return user_cache_dir(os.environ) / "idle" / f"{urllib.parse.quote(target.name, safe='')[-200:]}.json"


def _read(path: Path) -> dict[str, float]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): at_s for name, value in found.items() if (at_s := finite(value)) is not None}
    except (OSError, ValueError, AttributeError):
        return {}
