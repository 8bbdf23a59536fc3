"""How a run ended: in a person's words, and as an exit code."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from contracts import run_directory
from contracts.durations import clock
from contracts.errors import DONE, FAILED, INTERRUPTED, UNAVAILABLE, WRONG_REQUEST
from contracts.run_directory import State
from jobs.runtime.monitoring.metric_definitions import NO_METRICS, finite
from launch import jobs, runs
from launch.code.requirement_files import FRAMEWORK_PACKAGES
from launch.output import counted, printable
from launch.pricing import run_cost
from launch.runs import Run


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
    saved = run.directory.newest_checkpoint()
    if run.described["job"] == jobs.SERVER:
        resume = f"start another with `fab serve {run.described['config']['run']}`"
    elif saved is not None:
        resume += f" (from step {saved})"
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
        lines += _not_sent(run, str(result["error"]))
        lines += _not_importable(run, str(result["error"]))
    host = result.get("failed_host")
    if host is not None:
        lines.append(f"  log: {run.directory.path(run_directory.log(run.attempt, host))}")
    return [*lines, f"  {resume}"]


NO_SUCH_FILE = re.compile(
    r"No such file or directory|FileNotFoundError|does not exist|not found", re.IGNORECASE
)
PATH_IN_TEXT = re.compile(r"""['"`]([^'"`\n]+)['"`]|(\S+)""")


def _not_sent(run: Run, error: str) -> list[str]:
    """Return a line for each file that a command missed, that its folder has on this machine, and that was not sent."""
    if not run.is_own_command or not (folder := Path(str(run.described["config"].get("workdir")))).is_dir():
        return []
    texts = [line for line in error.splitlines() if NO_SUCH_FILE.search(line)]
    paths = [quoted or word.strip(".,:;()") for text in texts for quoted, word in PATH_IN_TEXT.findall(text)]
    # On a host the folder is a copy, whose name ends in work-N.
    names = dict.fromkeys(
        os.path.normpath(re.sub(r"^/.*?/work-\d+/", "", path)) for path in paths if "/" in path or "." in path
    )
    missed = [
        name
        for name in names
        if not name.startswith(("/", "..")) and name != "." and (folder / name).exists()
    ]
    bundle = runs.stored_folder(run) if missed else None
    if bundle is None:
        return []
    return [
        f"  {name} is in {folder}, and was not sent; start a new run with `--send {shlex.quote(name)}`"
        for name in missed
        if name not in bundle.names and not any(sent.startswith(f"{name}/") for sent in bundle.names)
    ]


NO_MODULE = re.compile(r"No module named '?([A-Za-z_]\w*)")


def _not_importable(run: Run, error: str) -> list[str]:
    """Return a line about a module that a command could not import, where it is in the folder or a framework's."""
    missing = NO_MODULE.search(error)
    if missing is None or not run.is_own_command:
        return []
    module, folder = missing[1], Path(str(run.described["config"].get("workdir")))
    for place, path in ((".", folder), ("src", folder / "src")):
        if _is_module(path, module):
            remedy = f"start a new run with `--env PYTHONPATH={place}`"
            return [f"  {module} is in {path}, where Python does not look; {remedy}"]
    package = module.replace("_", "-")
    framework = next((name for name, own in FRAMEWORK_PACKAGES.items() if package in own), None)
    if framework is None or framework == run.described.get("stack"):
        return []
    return [f"  {module} is a package of {framework}; start a new run with `--framework {framework}`"]


def _is_module(folder: Path, name: str) -> bool:
    """Whether Python can import the module of this name from a folder."""
    return (folder / f"{name}.py").is_file() or any((folder / name).glob("*.py"))


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
        for metric in run.metrics.ordered(measured)
        if not metric.is_detail
    ]
    taken, total, exported = result.get("steps"), run.total_steps, result.get("exported_step")
    step_count = f"{taken:,} of {counted(total, 'step')}" if total and taken not in (None, total) else None
    steps = "" if taken is None else f" for {step_count or counted(taken, 'step')}"
    total_s, last_s = run.total_wall_s, result.get("wall_s") or 0
    rows.append(
        ("wall time", f"{clock(last_s)} in the last attempt" if total_s is None else clock(total_s) + steps)
    )
    if (spent := run.goodput) is not None and spent.share is not None:
        rows.append(("goodput", spent.text()))
    if cost := run_cost(run):
        rows.append(("cost", cost.text()))
    if (saved := run.directory.newest_checkpoint()) is not None:
        rows.append(("checkpoint", run.directory.path(f"{run_directory.CHECKPOINTS}/{saved}")))
    if run.directory.list(run_directory.EXPORT):
        exported_step = f" (step {exported}, the best)" if exported not in (None, taken) else ""
        rows.append(("export", run.directory.path(run_directory.EXPORT) + exported_step))
    if isinstance(tensorboard := result.get("tensorboard"), str):
        rows.append(("curves", f"tensorboard --logdir {run.directory.path(tensorboard)}"))
    warned = result.get("warnings")
    if isinstance(warned, list) and warned:
        rows.append(("warnings", f"{len(warned)}; the report has them"))
    rows.append(("report", run.directory.path(run_directory.REPORT)))
    width = max(12, *(len(label) for label, _ in rows))
    return [f"{run.run_id} is done", *(f"  {label:<{width}} {text}" for label, text in rows)]
