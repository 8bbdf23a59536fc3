"""The last word on a run whose own processes could not say it: stopped by force, or never joined."""

from __future__ import annotations

import contextlib
import time

from contracts import run_directory
from jobs.runtime.report.render import read_and_render
from launch import runs
from launch.runs import Run


def conclude(run: Run, outcome: str, error: str | None) -> Run:
    """Write result.json, where the attempt has none, and the report; the run as it is then.

    A result that the job or an agent wrote is left as it is: they were there.
    """
    fresh = runs.read(run.directory) or run
    if fresh.current_result() is None:
        step, _ = runs.progress(fresh)
        fresh.directory.write_json(
            run_directory.RESULT,
            run_directory.result(outcome, attempt=fresh.attempt, steps=step, time=time.time(), error=error),
        )
    with contextlib.suppress(OSError):  # a report is worth having, but not worth hiding how the run ended
        fresh.directory.write_text(run_directory.REPORT, read_and_render(fresh.directory.url))
    return runs.read(fresh.directory) or fresh
