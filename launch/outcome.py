"""How a run ended, in words for a terminal, and as the launcher's exit code."""

from __future__ import annotations

from contracts import run_directory
from contracts.errors import DONE, FAILED, INTERRUPTED, WRONG_REQUEST
from contracts.run_directory import State
from jobs.runtime.metric_definitions import NO_METRICS, finite
from launch import runs
from launch.display import duration
from launch.printable import printable
from launch.runs import Run


def exit_code(run: Run, state: State) -> int:
    """0 done; 1 failed; 2 the request was wrong; 130 somebody or something stopped it."""
    if state == "done":
        return DONE
    if state in ("stopped", "preempted"):
        return INTERRUPTED
    result = run.current_result()
    return WRONG_REQUEST if result is not None and result.get("request") else FAILED


def summary(run: Run, state: State) -> list[str]:
    """The last lines a person sees of a run."""
    if state == "done":
        return _done(run)
    resume = f"resume with `fab train --resume {run.run_id}`"
    saved = run.directory.checkpoint_steps()
    resume += f" (from step {saved[-1]})" if saved else " (no checkpoint yet: from the start)"
    if state in ("stopped", "preempted"):
        return [f"{run.run_id} was {state}; {resume}"]
    result = run.current_result() or {}
    if result.get("request"):
        return [f"{run.run_id}: {result.get('error')}"]
    lines = [f"{run.run_id} {'failed' if state == 'failed' else 'is ' + state}"]
    if state == "lost":
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
    rows.append(("wall time", f"{duration(result.get('wall_s') or 0)} for {result.get('steps')} steps"))
    rows += _time_split(result.get("time_s"))
    saved = run.directory.checkpoint_steps()
    if saved:
        rows.append(("checkpoint", run.directory.path(f"{run_directory.CHECKPOINTS}/{saved[-1]}")))
    if run.directory.list(run_directory.EXPORT):
        rows.append(("export", run.directory.path(run_directory.EXPORT)))
    warned = result.get("warnings")
    if isinstance(warned, list) and warned:
        rows.append(("warnings", f"{len(warned)}; the report has them"))
    rows.append(("report", run.directory.path(run_directory.REPORT)))
    width = max(12, *(len(label) for label, _ in rows))
    return [f"{run.run_id} is done", *(f"  {label:<{width}} {text}" for label, text in rows)]


def _time_split(said: object) -> list[tuple[str, str]]:
    """The shares of the parts that took 1 % of the time or more, the largest first."""
    parts = (
        {name: s for name, s in said.items() if isinstance(s, int | float) and s > 0}
        if isinstance(said, dict)
        else {}
    )
    total_s = sum(parts.values())
    largest = sorted(parts.items(), key=lambda part: -part[1])
    shares = [f"{name.replace('_', ' ')} {s / total_s:.0%}" for name, s in largest if s > 0.01 * total_s]
    return [("of that", ", ".join(shares))] if shares else []
