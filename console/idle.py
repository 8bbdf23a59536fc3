"""Slices to look at: since when no run has used one, when one is taken back, and the line that every command adds."""

from __future__ import annotations

import contextlib
import json
import os
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path

from contracts import atomic
from contracts.durations import DAY_S, HOUR_S, spoken
from contracts.errors import RequestError
from contracts.inventory import Slice
from jobs.runtime.monitoring.metric_definitions import finite
from jobs.runtime.storage.cache import user_cache_dir
from launch import pricing, runs
from launch.hosts import HostError
from launch.remote_files import with_time_limit
from launch.runs import Run
from launch.targets import Target

IDLE_HOURS = 4.0
"""After which a slice is named where `tpu-stack:idle-hours` says nothing."""
LOOK_LIMIT_S = 5.0
"""For a look at the runs at the end of a command that is about something else."""


def used_s(one_slice: Slice, all_runs: Sequence[Run]) -> float | None:
    """Return when a slice was last used, in Unix seconds: by one of the runs, or when it was made; None: not known.

    An active run has renewed its heartbeat within seconds, so the state of runs is not asked for. Of node pools that
    stay it is not known when they were made: 0.0 where there are no runs.
    """
    active_s = pricing.active_s(one_slice) if one_slice.pool is None else 0.0
    if active_s is None or not one_slice.is_usable or (one_slice.pool and one_slice.pool.scales_to_zero):
        return None
    run_times = (_seen_s(run) for run in all_runs if run.slice_record.get("name") == one_slice.name)
    return max([active_s, *run_times])


def _seen_s(run: Run) -> float:
    ended_s = finite((run.current_result() or {}).get("time")) or 0.0
    beats_s = (finite(beat.get("time")) or 0.0 for beat in run.current() if beat)
    return max([run.started_s, ended_s, *beats_s])


def limit_s(target: Target) -> float:
    """Return after how long a slice of a stack counts as idle."""
    return (target.inventory.idle_hours or IDLE_HOURS) * HOUR_S


def remarks(target: Target) -> Iterator[str]:
    """Return a line for each slice of a stack that is idle, or that Google takes back within a day.

    When a slice was last used is noted on this machine. No run is read while that is within the limit; nothing is said
    of idle ones where the runs cannot be read in time.
    """
    now_s, path = time.time(), _memory(target)
    for tpu_slice in target.inventory.slices:
        if tpu_slice.ends_s is not None and now_s < tpu_slice.ends_s < now_s + DAY_S:
            left = spoken(tpu_slice.ends_s - now_s)
            yield f"the slice {tpu_slice.name} ({tpu_slice.capacity}) is taken back in {left}"
    used_at = _read(path)
    candidates = [
        idle
        for idle in target.inventory.slices
        if used_s(idle, ()) is not None
        and now_s - max(used_s(idle, ()) or 0.0, used_at.get(idle.name, 0.0)) > limit_s(target)
    ]
    if not target.capabilities.is_billed or not candidates:
        return
    try:
        all_runs = with_time_limit(LOOK_LIMIT_S, target.name, lambda: runs.list_runs(target.runs))
    except (HostError, OSError, RequestError):
        return
    for idle in candidates:
        last_s = max(used_s(idle, all_runs) or 0.0, used_at.get(idle.name, 0.0)) or now_s
        used_at[idle.name] = last_s
        if now_s - last_s > limit_s(target):
            if idle.pool is not None:
                remedy = "with `scale-to-zero: true` (tpu-stack:slices) its nodes go with their run"
            elif target.inventory.has_keeper and target.inventory.idle_hours:
                remedy = "its keeper gives it back unless a program has a TPU open"
            else:
                remedy = "`tpu-stack:slices: []` and `pulumi up` give it back"
            idle_time = spoken(now_s - last_s, units=1)
            yield f"the slice {idle.name} has had no run for {idle_time}: {pricing.an_hour(idle)}; {remedy}"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_json(path, used_at)


def _memory(target: Target) -> Path:
    return user_cache_dir(os.environ) / "idle" / f"{urllib.parse.quote(target.name, safe='')[-200:]}.json"


def _read(path: Path) -> dict[str, float]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): at_s for name, value in content.items() if (at_s := finite(value)) is not None}
    except (OSError, ValueError, AttributeError):
        return {}
