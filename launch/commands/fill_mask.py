"""`fab fill-mask`: what a run's model predicts for the masks in a text, computed on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from contracts.durations import spoken
from contracts.errors import RequestError
from contracts.run_directory import EXPORT
from jobs.runtime.cache import build_once, user_cache_dir
from jobs.runtime.report.render import quoted
from launch import jobs, runs
from launch.display import printable, say, terminal
from launch.hosts import HostError
from launch.jobs import CHECKOUT
from launch.runs import Run
from launch.targets import Target

MODULE = "predict"
"""A job that can do it has a module of this name; see jobs/flax_mlm/predict.py for what it is told and answers."""
MASK = "<mask>"
LIMIT_S = 1800.0
"""For everything, the copy of a large model from a bucket too."""
FILES = ("config.json", "model.safetensors", "tokenizer.json")
"""Of an export, what the module needs."""


def fill_mask(target: Target, wanted: str, text: str) -> int:
    """Print the best fillings of each mask.

    Raises:
        RequestError: there is no such run, no mask, no export yet, or the job has no such model.
        HostError: the export could not be copied from the hosts that have it, or the model could not be used.
    """
    if MASK not in text:
        raise RequestError(f'"{text}" has no {MASK}; write {MASK} where a word is to be guessed')
    run = _latest(target) if wanted == runs.LATEST else runs.find(target.runs, wanted)
    job = str(run.described["job"])
    if not _fills(job):
        able = ", ".join(name for name in jobs.names() if _fills(name))
        raise RequestError(f"{run.run_id} is a run of {job}, whose models fill no masks; name one of {able}")
    runs.require_export(run)
    print_fillings(text, ask(job, _readable(target, run), text))
    return 0


def _latest(target: Target) -> Run:
    """Return the latest run whose models fill masks; the latest of all where there is none."""
    found = next((run for run in runs.list_runs(target.runs) if _fills(run.described["job"])), None)
    return found or runs.find(target.runs, runs.LATEST)


def _fills(job: str) -> bool:
    return (CHECKOUT / "jobs" / job / f"{MODULE}.py").exists()


def ask(job: str, export: str, text: str) -> list[list[dict[str, Any]]]:
    """Return for each mask the best tokens with their probabilities; `export` is a folder of this machine or a URL.

    Raises:
        RequestError: the request cannot be carried out; the job's own words.
        HostError: it ended otherwise.
    """
    command = [sys.executable, "-P", "-m", f"jobs.{job}.{MODULE}", export, str(user_cache_dir(os.environ))]
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            check=False,
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        )
    except subprocess.TimeoutExpired:
        raise HostError(host="here", reason=f"{export}: no answer within {spoken(LIMIT_S)}") from None
    said = printable((done.stderr.strip().splitlines() or [""])[-1])
    if done.returncode == 2:
        raise RequestError(said.removeprefix("error: "))
    if done.returncode != 0:
        raise HostError(host="here", reason=f"{export} cannot be used: {said}", remedy="`make install`")
    masks: list[list[dict[str, Any]]] = json.loads(done.stdout)["masks"]
    return masks


def print_fillings(text: str, masks: list[list[dict[str, Any]]]) -> None:
    """Print a table for each mask, headed by the text around it."""
    console = terminal()
    pieces = text.split(MASK)
    for number, best in enumerate(masks):
        before, after = MASK.join(pieces[: number + 1]), MASK.join(pieces[number + 1 :])
        say(console)(f"{before}[{number + 1}]{after}" if len(masks) > 1 else text)
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(justify="right")
        table.add_column()
        for guess in best:
            table.add_row(f"{100 * guess['probability']:.1f} %", quoted(printable(guess["token"])))
        console.print(table)


def _readable(target: Target, run: Run) -> str:
    """Return the export as a folder of this machine, or a URL that this machine can read."""
    path = run.directory.path(EXPORT)
    if target.is_local or run.directory.is_remote:
        return path
    ended = int((run.current_result() or {}).get("time") or 0)
    copied = user_cache_dir(os.environ) / "exports" / f"{run.run_id}-{run.attempt}-{ended}"

    def fetch(temporary: Path) -> None:
        say(terminal())(f"copying {path} from {target.hosts[0].name}")
        for name in FILES:
            target.transports[0].get(f"{path}/{name}", temporary / name)

    build_once(copied, fetch)
    return str(copied)
