"""`fab export`: a run's export with a model card, in a folder or a bucket, in the layout of the Hugging Face Hub."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.filesize import decimal

from backends.local.processes import copy_folder
from console import overview
from console.hosts.copies import swap
from contracts import atomic
from contracts.durations import spoken
from contracts.errors import RequestError
from contracts.files import DiskFiles, Files, is_url, unwritable
from contracts.run_directory import EXPORT
from jobs.runtime.monitoring.metric_definitions import Metric
from launch import jobs, pricing, runs
from launch.output import counted, printable, say, terminal
from launch.remote_files import FOLDER_LIMIT_S, Buckets
from launch.runs import Run
from launch.targets import Target

CARD = "README.md"
MARK = "\n- tpu-stack\n"
"""The tag that every card has."""
TO_FILL_IN = (
    "license:   # fill in, such as apache-2.0\ndatasets:   # fill in, as a list of names on the Hub\n"
)
LOADED_WITH = {
    "transformers": "from transformers import pipeline\n\nmodel = pipeline({task!r}, model={export!r})",
    "keras": "import keras\n\nmodel = keras.saving.load_model('{export}/model.keras')",
}


def export(target: Target, name: str, to: str, *, force: bool) -> int:
    """Copy a run's export to a folder of this machine or to a bucket, with its card: whole, or not to be taken for it.

    Raises:
        RequestError: there is no such run, it is not done or has no export, or something else is at `to`.
        HostError: the export or the bucket cannot be reached.
    """
    if problem := unwritable(to):
        raise RequestError(f"--to {to}: {problem}")
    to = to.removeprefix("file://")
    run = runs.find(target.runs, name)
    runs.require_export(run)
    if (run.current_result() or {}).get("outcome") != "done":
        raise RequestError(
            f"{run.run_id} is not done, and its export may be half written or of an earlier attempt; wait for it, or "
            f"complete it with `fab train --resume {run.run_id}`"
        )
    place = to.rstrip("/") if is_url(to) else os.path.realpath(os.path.expanduser(to))
    files: Files = Buckets() if is_url(to) else DiskFiles()
    _check(files, place, run.directory.list(EXPORT), force=force)
    if isinstance(files, Buckets):
        with tempfile.TemporaryDirectory(prefix="export-") as folder:
            text, size = _make(target, run, Path(folder))
            (Path(folder) / CARD).unlink()
            files.remove_folder(place, CARD)
            files.put_folder(folder, place)
            files.write(f"{place}/{CARD}", text.encode())  # last: without it a copy is not whole
    else:
        fresh, aside = (Path(place).with_name(atomic.beside_name(Path(place).name)) for _ in range(2))
        try:
            fresh.parent.mkdir(parents=True, exist_ok=True)
            try:
                _, size = _make(target, run, fresh)
                if os.path.isdir(place):
                    swap(Path(place), fresh, aside)
                else:
                    fresh.rename(place)
            finally:
                atomic.remove(fresh)
        except (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
            raise RequestError(
                f"--to {to}: no folder can be made there ({error.strerror}); name another place"
            ) from None
    tell = say(terminal())
    tell(f"exported {run.run_id} to {place} ({decimal(size)}); fill in license and datasets in its {CARD}")
    if not is_url(to):
        tell(f"then this publishes it: hf upload ACCOUNT/NAME {shlex.quote(place)}")
    return 0


def _check(files: Files, place: str, names: Sequence[str], *, force: bool) -> None:
    """Make sure that an export may take the place of what is at `place`: nothing, or by force an earlier one."""
    existing = files.list(place)
    if existing and not force:
        raise RequestError(
            f"--to {place}: is not empty; name another place, or replace all of it with --force"
        )
    (before,) = files.read([f"{place}/{CARD}"]) if existing else [None]
    if not {*existing} <= {*names, CARD} and MARK.encode() not in (before or b""):
        raise RequestError(
            f"--to {place}: --force replaces an earlier export, and this is none ({', '.join(existing[:3])}, …); name "
            "another place"
        )


def _make(target: Target, run: Run, folder: Path) -> tuple[str, int]:
    """Make the export with its card in a folder; return the card, and the bytes of all."""
    fetch(target, run, folder)
    path = folder / CARD
    own = path.read_text() if path.is_file() else MARK
    text = card(run, None if MARK in own else own)
    atomic.write(path, text)
    return text, DiskFiles().folder_bytes(str(folder))


def fetch(target: Target, run: Run, into: Path, names: tuple[str, ...] = ()) -> None:
    """Copy a run's export, or these files and folders of it, into a folder of this machine.

    Raises:
        HostError: the bucket or the host where it is cannot be reached.
    """
    path, is_remote = run.directory.path(EXPORT), run.directory.is_remote
    if target.capabilities.shares_files and not is_remote:
        copy_folder(Path(path), into, follow_links=True)
        return
    note(f"copying {path}{'' if is_remote else f' from {target.hosts[0].name}'}")
    into.mkdir(exist_ok=True)
    for name in names or run.directory.list(EXPORT):
        if is_remote:
            Buckets().get(f"{path}/{name}", into / name, limit_s=FOLDER_LIMIT_S)
        else:
            target.transports[0].get(f"{path}/{name}", into / name)


def note(text: str) -> None:
    """Say something beside what a program may read."""
    print(text, file=sys.stderr, flush=True)


def card(run: Run, own: str | None) -> str:
    """Return README.md as the Hub takes it, from what the run's directory says; what is not known is left out.

    own: README.md of the export, where its job wrote one; it says how to load the model.
    """
    job = jobs.find(run.described["job"]) if run.described["job"] in jobs.names() else None
    library, task = (job and job.hub) or (None, None)
    settings = overview.run_settings(run)
    data = {name: settings[name] for name in ("data", "eval_data", "init_from") if settings.get(name)}
    headline, (_, latest) = run.metrics.headline, runs.progress(run)
    measured = overview.values(run, {headline: latest.get(headline)})
    metrics = [metric for metric in run.metrics.ordered(measured) if metric.better and not metric.is_detail]
    title = _cell(run.described.get("name") or run.run_id)
    front = {
        "library_name": library,
        "pipeline_tag": task,
        "tags": [tag for tag in ("tpu-stack", run.what, run.described.get("stack")) if tag],
        "model-index": task
        and metrics
        and data.get("data")
        and _index(run, title, task, data["data"], metrics, measured),
    }
    header = yaml.safe_dump({name: value for name, value in front.items() if value}, sort_keys=False)
    if own is None:
        code = LOADED_WITH.get(library or "", "# as the program wrote it").format(task=task, export=EXPORT)
        own = f"# How to load it\n\n```python\n{code}\n```"
    sections = (
        f"# {title}",
        f"A model{f' for {task}' if task else ''}, trained with tpu-stack by the run `{run.run_id}` of "
        + (f"the job `{job.name}`: {job.summary}" if job else f"the command `{_cell(run.what)}`."),
        "## Data",
        _table("option", "value", [(name, _value(value)) for name, value in data.items()]),
        "## Results",
        _table(
            "metric", "value", [(metric.title, run.metrics.compared(metric, measured)) for metric in metrics]
        ),
        "## How it was trained",
        _table("what", "value", _training(run)),
        "## Settings",
        _table("option", "value", [(name, _value(value)) for name, value in settings.items()]),
        f"#{own.strip()}",
        f"`{EXPORT}` stands for the folder of this file.",
    )
    return f"---\n{TO_FILL_IN}{header}---\n\n" + "\n\n".join(sections) + "\n"


def _index(
    run: Run, title: str, task: str, data: str, metrics: Sequence[Metric], measured: Mapping[str, float]
) -> list[dict[str, Any]]:
    """The results as the Hub reads them, each metric's baseline behind it."""
    names = [name for metric in metrics for name in (metric.name, metric.baseline or "") if name in measured]
    entries = [{"type": name, "name": run.metrics.get(name).title, "value": measured[name]} for name in names]
    results = {"task": {"type": task}, "dataset": {"type": data, "name": data}, "metrics": entries}
    return [{"name": title, "results": [results]}]


def _training(run: Run) -> list[tuple[str, str]]:
    described, attempts = run.described, run.described["attempts"]
    one_slice, code = run.slice_record, described.get("code") or {}
    wall_s, cost = run.total_wall_s, pricing.run_cost(run)
    is_tpu, place = described["platform"] == "tpu", f"{one_slice.get('capacity')}, {one_slice.get('zone')}"
    commit, versions = code.get("git_commit"), described.get("versions") or {}
    rows = {
        "hardware": f"{one_slice['count']} x {one_slice['accelerator_type']}"
        if is_tpu and one_slice
        else described["platform"],
        "hosts": f"{run.machines}, with {counted(run.processes, 'process')}",
        "wall time": f"{spoken(wall_s)}, {counted(len(attempts), 'attempt')}" if wall_s is not None else None,
        "cost": cost and f"{cost.text()}, for the wall time ({place})",
        "framework": described.get("stack"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "tpu-stack": importlib.metadata.version("tpu-stack"),
        "git commit": commit and f"{commit}{', with uncommitted changes' if code.get('git_dirty') else ''}",
    }
    return [(name, value) for name, value in rows.items() if value]


def _table(name: str, value: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = [(name, value), ("---", "---"), *((_cell(name), _cell(value)) for name, value in rows)]
    return "\n".join(f"| {name} | {value} |" for name, value in lines) if rows else "Not known."


def _value(value: object) -> str:
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _cell(value: object) -> str:
    return " ".join(printable(str(value)).split()).replace("|", "\\|")
