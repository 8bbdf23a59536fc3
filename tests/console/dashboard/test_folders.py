"""What the dashboard makes of a folder of runs, most of which no job of ours has written."""

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backends.local.local_backend import agents_here
from console.dashboard.folders import Look, Place
from contracts.files import DiskFiles
from jobs.runtime.storage.bucket_files import BucketFiles
from launch.remote_files import Buckets, HostFiles
from launch.runs import RunsFolder
from tests.console.dashboard.run_directories import make_run, run_id


def place(folder: Path) -> Place:
    return Place("here", "here", RunsFolder(url=str(folder), files=DiskFiles()), period_s=0.0)


def look(folder: Path) -> Look:
    return place(folder).look(30.0)


def changed(run: Path, name: str, /, **values: Any) -> None:
    path = run / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def instead(path: Path, make: Callable[[Path], object]) -> None:
    """Put something else where a file was."""
    path.unlink()
    make(path)


def next_look(seen: Place) -> Look:
    """A look that was begun after this call; what is asked for too soon is answered with the last one."""
    before = seen.look(30.0)
    while (after := seen.look(30.0)) is before:
        time.sleep(0.001)
    return after


JUNK: dict[str, Callable[[Path], object]] = {
    "torn": lambda run: (run / "run.json").write_text((run / "run.json").read_text()[:100]),
    "half written": lambda run: os.unlink(run / "run.json"),
    "huge": lambda run: os.truncate(run / "run.json", 2**40),
    "a folder": lambda run: instead(run / "run.json", Path.mkdir),
    "a pipe": lambda run: instead(run / "run.json", os.mkfifo),
    "of tomorrow": lambda run: changed(run, "run.json", version=2),
    "of another run": lambda run: changed(run, "run.json", run_id=run_id(999)),
    "a text for a list": lambda run: changed(run, "run.json", attempts="first"),
    "no attempts": lambda run: changed(run, "run.json", attempts=[]),
    "a million processes": lambda run: changed(
        run, "run.json", attempts=[{"attempt": 0, "started": "2020-11-20T21:45:00Z", "processes": 10**6}]
    ),
    "no date": lambda run: changed(run, "run.json", created="yesterday"),
    "nested": lambda run: (run / "run.json").write_text("[" * 100_000),
    "not UTF-8": lambda run: (run / "run.json").write_bytes(b'{"version": 1, "\xff'),
    "leads out": lambda run: instead(run / "run.json", lambda path: os.symlink("/etc/hostname", path)),
}
"""Runs that cannot be shown."""
DAMAGE: dict[str, Callable[[Path], object]] = {
    "result.json": lambda run: (run / "result.json").write_text("{"),
    "settings.json": lambda run: os.truncate(run / "settings.json", 2**40),
    "heartbeats/host-0.json": lambda run: changed(run, "heartbeats/host-0.json", step="many"),
    "heartbeats/host-1.json": lambda run: changed(run, "heartbeats/host-1.json", time=10**400),
    "metrics.jsonl": lambda run: instead(run / "metrics.jsonl", lambda path: os.symlink("/etc/passwd", path)),
}
"""Of runs that are shown without that file."""


def test_what_cannot_be_read_is_said_and_keeps_nothing_else_from_being_shown(tmp_path: Path) -> None:
    make_run(tmp_path, run_id(0))
    runs = {what: make_run(tmp_path, run_id(index)) for index, what in enumerate([*JUNK, *DAMAGE], start=1)}
    for what, spoil in {**JUNK, **DAMAGE}.items():
        spoil(runs[what])
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "<img src=x onerror=alert(1)>").mkdir()
    found = look(tmp_path)
    shown = {name for name, seen in found.runs.items() if seen.summary is not None}
    assert shown == {run_id(0), *(runs[what].name for what in DAMAGE)}
    assert found.runs[run_id(0)].problems == ()
    for what in JUNK:
        (problem,) = found.runs[runs[what].name].problems
        assert problem.startswith(("run.json: ", "has no run.json")), what
    for name in DAMAGE:
        (problem,) = found.runs[runs[name].name].problems
        assert problem.startswith(f"{name}: "), name
    assert "leads out of the run directory" in found.runs[runs["leads out"].name].problems[0]
    assert "more than the 1,048,576 that are read" in found.runs[runs["huge"].name].problems[0]
    assert found.other_names == ("<img src=x onerror=alert(1)>", "notes.txt")
    assert found.error is None


def test_a_place_that_refuses_is_said_and_what_was_seen_before_stays(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", run_id(0))
    seen = place(tmp_path / "runs")
    assert [*seen.look(30.0).runs] == [run.name]

    class Broken(DiskFiles):
        def list(self, path: str) -> list[str]:
            raise OSError(5, "Input/output error", path)

    seen.folder = RunsFolder(url=str(tmp_path / "runs"), files=Broken())
    after = next_look(seen)
    assert [*after.runs] == [run.name]
    assert "Input/output error" in (after.error or "")


def test_files_of_hosts_are_read_as_those_of_this_machine_and_lead_nowhere_else(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, run_id(0), points=600)
    (run / "result.json").unlink()
    (run / "result.json").symlink_to("/etc/hostname")
    here, hosts = DiskFiles(), HostFiles(agents_here(["h"], tmp_path / "cache"))
    places = [(str(run), name) for name in ("run.json", "result.json", "no.json", "metrics.jsonl", "logs")]
    for offset, limit in ((0, 100), (-50, 4096), (300, 50_000_000 // 4)):
        offsets = [offset] * len(places)
        mine, theirs = (files.read_inside(places, offsets, limit) for files in (here, hosts))
        for name, one, other in zip(places, mine, theirs, strict=True):
            assert (one is None) == (other is None), name
            if one is not None and other is not None:
                assert dataclasses.replace(one, error=None) == dataclasses.replace(other, error=None)
                assert bool(one.error) == bool(other.error) == (name[1] in ("result.json", "logs"))


def test_objects_of_a_bucket_are_read_as_files_of_a_disk(tmp_path: Path) -> None:
    run, bucket = make_run(tmp_path, run_id(0)), "memory://dashboard/runs"
    BucketFiles().put_folder(str(run), f"{bucket}/{run.name}")
    names = ["run.json", "no.json", "metrics.jsonl"]
    for offset, limit in ((0, 100), (-50, 4096), (300, 10**6), (10**9, 10)):
        there = BucketFiles().read_inside(
            [(f"{bucket}/{run.name}", name) for name in names], [offset] * 3, limit
        )
        assert there == DiskFiles().read_inside([(str(run), name) for name in names], [offset] * 3, limit)
    (seen,) = Place("b", "b", RunsFolder(url=bucket, files=Buckets()), period_s=0.0).look(30.0).runs.values()
    assert (seen.name, seen.state, seen.problems) == (run.name, "done", ())
