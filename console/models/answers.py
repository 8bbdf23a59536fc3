"""`fab predict`: what a run's model answers to texts, pairs, questions or pictures, computed on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from backends.local import environments
from console.models.hub_export import fetch, note
from contracts.durations import spoken
from contracts.errors import RequestError
from contracts.run_directory import EXPORT
from jobs.runtime.report.page import quoted
from jobs.runtime.storage.cache import build_once, user_cache_dir
from launch import jobs, runs
from launch.jobs import Job
from launch.output import printable, say, terminal
from launch.runs import Run
from launch.targets import Target

LIMIT_S = 1800.0
"""For the answers."""
FROM_FILE = "@"
"""Begins the name of a file that has the text; doubled, a text that begins with it."""
LONGEST_HEADING = 400
ON_CPU = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
"""The devices of this machine may be busy with a run."""

type Answers = list[dict[str, Any]]


def predict(target: Target, name: str, typed: Sequence[str], *, second: str | None, as_json: bool) -> int:
    """Print the answers to all inputs.

    Raises:
        RequestError: there is no such run or file, no export yet, or the job cannot answer this.
        HostError: the export could not be copied from where it is, or the model could not be used.
    """
    inputs = [text for word in typed for text in _inputs(word)]
    predictions = answers(target, name, inputs, None if second is None else _second(second))
    if as_json:
        print(json.dumps({"answers": predictions}, ensure_ascii=False))
    else:
        print_answers(predictions)
    return 0


def answers(target: Target, name: str, inputs: Sequence[str], second: str | None) -> Answers:
    """Return the answers to all inputs. Raises as `predict`."""
    run = run_that_predicts(target, name)
    runs.require_export(run)
    job = jobs.find(run.described["job"])
    return ask(job, _on_this_machine(target, run, job), {"inputs": [*inputs], "second": second})


def _inputs(typed: str) -> list[str]:
    """Return the input that was typed, or the lines of the file that it names."""
    if not typed.startswith(FROM_FILE):
        return [typed]
    if typed.startswith(FROM_FILE * 2):
        return [typed[1:]]
    lines = [line for line in _read(typed).splitlines() if line.strip()]
    if not lines:
        raise RequestError(f"{typed}: the file has no line with text; write an input on each line")
    return lines


def _second(typed: str) -> str:
    if not typed.startswith(FROM_FILE):
        return typed
    return typed[1:] if typed.startswith(FROM_FILE * 2) else _read(typed)


def _read(typed: str) -> str:
    try:
        return Path(typed[1:]).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise RequestError(
            f"{typed}: {reason}; name a text file after @, or double the @ of a text"
        ) from None


def run_that_predicts(target: Target, name: str, also: Sequence[str] = ()) -> Run:
    """Return the run that is meant; "latest" is the latest whose job can predict. also: other jobs that will do.

    Raises:
        RequestError: there is none, or its job cannot predict.
    """
    able = [name for name in jobs.names() if jobs.find(name).can_predict]
    if name == runs.LATEST:
        latest = runs.newest(runs.survey(target.runs), name, jobs=able)
        if latest is not None:
            return latest
    run = runs.find(target.runs, name)
    if run.described["job"] not in (*able, *also):
        raise RequestError(
            f"{run.run_id} is a run of {run.what}, which cannot predict; name a run of {', '.join(able)}"
        )
    return run


def _on_this_machine(target: Target, run: Run, job: Job) -> str:
    """Return the export as a folder of this machine; one of a bucket or a host is copied into the cache."""
    if target.capabilities.shares_files and not run.directory.is_remote:
        return run.directory.path(EXPORT)
    ended = int((run.current_result() or {}).get("time") or 0)
    copied = user_cache_dir(os.environ) / "exports" / f"{run.run_id}-{run.attempt}-{ended}"

    build_once(copied, lambda temporary: fetch(target, run, temporary, job.predicts_from))
    return str(copied)


def ask(job: Job, export: str, questions: dict[str, Any]) -> Answers:
    """Return the answers of a job's predict.py, which `jobs.runtime.prediction` asks.

    export: a folder of this machine.

    Raises:
        RequestError: the request cannot be carried out; the job's own words.
        HostError: it ended otherwise.
    """
    environments.ensure(job.framework, note)
    answer = environments.run_module(
        job.framework,
        ["jobs.runtime.prediction", job.name, export, str(user_cache_dir(os.environ))],
        questions,
        variables=ON_CPU,
        limit_s=LIMIT_S,
        late=f"{export}: no answer within {spoken(LIMIT_S)}",
        failed=f"{export} cannot be used: ",
        remedy="`make install`",
    )
    answers: Answers = answer["answers"]
    return answers


def print_answers(answers: Answers) -> None:
    """Print a table for each answer, below its heading."""
    console = terminal()
    for answer in answers:
        heading = printable(answer["heading"])
        cut = heading if len(heading) <= LONGEST_HEADING else f"{heading[: LONGEST_HEADING - 1]}…"
        say(console)(cut)
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(justify="right")
        table.add_column()
        for guess in answer["best"]:
            share = guess["probability"]
            shown = "" if share is None else f"{100 * share:.1f} %"
            table.add_row(shown, quoted(printable(guess["text"])))
        console.print(table)
