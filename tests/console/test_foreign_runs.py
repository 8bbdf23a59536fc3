"""What others write into runs' directories, or keep from being read there, ends no command and hides no other run."""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.datastructures import QueryParams

from console import follow, overview, removal
from console import status as status_command
from console.dashboard.dashboard_server import Dashboard
from console.dashboard.folders import Place
from console.display import Progress
from console.models import hub_export as exporting
from console.summary import summary
from contracts.errors import RequestError
from contracts.files import DiskFiles
from jobs.runtime.report.render import read_and_render
from jobs.runtime.storage.bucket_files import BucketFiles
from launch import launching, runs
from launch.hosts import HostError
from launch.remote_files import Buckets
from launch.runs import Run, RunsFolder
from tests.console.recorded_display import Recorded
from tests.launch.slices import Beat, WriteRun, here

GOOD = "flax_mlm-20261120-214500-good"


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def instead(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink(missing_ok=True)
    make(path)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda record: record.write_text(""), "run.json: is empty"),
    "torn": (lambda record: record.write_text('{"version": 1, "run'), "run.json: is torn, or no JSON object"),
    "list": (lambda record: record.write_text("[]"), "run.json: is torn, or no JSON object"),
    "newer": (lambda record: changed(record, version=2), "run.json: has version 2, and this tpu-stack reads"),
    "date": (lambda record: changed(record, created="yesterday"), 'run.json: created is "yesterday"'),
    "hosts": (lambda record: changed(record, hosts=[{"index": 0}]), 'run.json: hosts is [{"index": 0}]'),
    "folder": (lambda record: instead(record, Path.mkdir), "run.json: is not a file"),
    "loop": (lambda record: instead(record, loop), "run.json: Too many levels of symbolic links"),
    "pipe": (lambda record: instead(record, os.mkfifo), "run.json: is not a file"),
    "theirs": (lambda record: record.chmod(0), "run.json: Permission denied"),
}
"""What may be wrong with a run.json, and what is said of it."""


def name(what: str) -> str:
    return f"flax_mlm-20261121-214500-{what[:4].ljust(4, 'x')}"


@pytest.fixture
def spoiled(write_run: WriteRun, runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs that cannot be read, beside a good one that ended and has a link loop for its settings."""
    write_run(GOOD, result={"outcome": "done", "steps": 3, "loss": 1.5}, name="mine")
    loop(runs_dir / GOOD / "settings.json")
    for what, (spoil, _) in SPOILED.items():
        write_run(name(what))
        spoil(runs_dir / name(what) / "run.json")
    theirs, opened = str(runs_dir / name("theirs") / "run.json"), os.open

    def refuse(path: Any, *more: Any, **named: Any) -> int:
        if str(path) == theirs and os.geteuid() == 0:  # whom a mode does not keep out
            raise PermissionError(13, "Permission denied", path)
        return opened(path, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    return runs_dir


def test_runs_that_cannot_be_read_are_named_once_and_hide_no_other(
    spoiled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(code: int) -> str:
        assert code == 0
        return capsys.readouterr().out

    settings_problem = "settings.json: Too many levels of symbolic links"
    texts = [
        printed(status_command.list_runs(here("2"), limit=None)),
        printed(status_command.status(here("2"), None)),
        printed(removal.prune(here("2"), keep=5, yes=True, resumed_by={})),
    ]
    for text in texts:
        for what, (_, problem) in SPOILED.items():
            assert text.count(f"{name(what)} cannot be read: {problem}") == 1, (what, text)
    assert f"{GOOD}: {settings_problem}" in texts[0] and "mine" in texts[0]
    assert GOOD in texts[1] and settings_problem in texts[1]
    said = json.loads(printed(status_command.list_runs(here("2"), limit=None, as_json=True)))
    assert [run["run"] for run in said["runs"]] == [GOOD]
    assert said["runs"][0]["problems"] == [settings_problem]
    assert {*said["unreadable"]} == {name(what) for what in SPOILED}
    for what, (_, problem) in SPOILED.items():
        for wanted in (name(what), name(what)[-4:]):
            with pytest.raises(RequestError) as refused:
                status_command.status(here("2"), wanted)
            assert problem in str(refused.value), what
    assert runs.find(here("2").runs, "latest").run_id == GOOD
    assert "may be newer, and cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("renamed", ["backup", "flax_mlm-20261121-214500-copy"])
def test_a_run_whose_folder_was_renamed_says_how_it_was_called(
    write_run: WriteRun, runs_dir: Path, renamed: str
) -> None:
    write_run(GOOD)
    (runs_dir / GOOD).rename(runs_dir / renamed)
    for other in (False, True):
        if other:
            write_run(name("else"))
        with pytest.raises(RequestError, match=rf"{renamed}.*run.json: is that of run {GOOD}; give"):
            runs.find(here("2").runs, renamed)


def test_what_a_run_is_called_cannot_change_the_terminal(
    write_run: WriteRun, beat: Beat, capsys: pytest.CaptureFixture[str]
) -> None:
    host = {"name": "h\x1b[2J", "address": ""}
    hosts = [{**host, "index": index} for index in range(2)]
    odd = {"name": "\x1b]0;mine\x07", "job": "command", "args": ["\x1b[2J.py"], "hosts": hosts}
    run = write_run(**odd, beats=[beat("\x1b[2J")] * 2)
    other = write_run(GOOD)
    assert status_command.list_runs(here("2"), limit=None) == 0
    assert status_command.status(here("2"), run.run_id) == 0
    assert status_command.compare(here("2"), [run.run_id, other.run_id], as_json=False) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_where_no_run_can_be_read_that_is_said_and_not_that_there_is_none(
    spoiled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(spoiled / GOOD)
    assert status_command.list_runs(here("2"), limit=3) == 0
    listed = capsys.readouterr().out
    assert status_command.status(here("2"), None) == 0
    for text in (listed, capsys.readouterr().out):
        assert "no runs yet" not in text and f"{name('empty')} cannot be read: run.json: is empty" in text
    with pytest.raises(RequestError, match="there is no run in(?s:.*)cannot be read: run.json"):
        runs.find(here("2").runs, "latest")


class Refusing(MemoryFileSystem):  # type: ignore[misc]
    """A bucket that refuses one object, as gcsfs says it, and is away for another."""

    protocol = "refusing"
    store: dict[str, Any] = {}  # noqa: RUF012 - as its base has it
    pseudo_dirs = [""]  # noqa: RUF012

    def cat_file(self, path: str, *more: Any, **named: Any) -> bytes:
        if path.endswith("-them/run.json"):
            raise OSError(f"Forbidden: {path}\nno access")
        if path.endswith("-away/run.json"):
            raise ConnectionError("no route")
        return bytes(super().cat_file(path, *more, **named))


def test_an_object_that_a_bucket_refuses_hides_no_other_run_and_a_bucket_that_is_away_is_no_answer(
    write_run: WriteRun,
) -> None:
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    bucket, described = "refusing://bucket/runs", write_run(GOOD).described
    folder = RunsFolder(url=bucket, files=Buckets())

    def put(letters: str, **changed: Any) -> None:
        run_id = GOOD.replace("good", letters)
        record = json.dumps({**described, "run_id": run_id, **changed})
        BucketFiles().write(f"{bucket}/{run_id}/run.json", record.encode() if letters != "none" else b"")

    for letters in ("good", "none", "them"):
        put(letters)
    put("late", version=9)
    listing = runs.survey(folder)
    assert [run.run_id for run in listing.runs] == [GOOD]
    assert {run_id[-4:]: why.split(",")[0] for run_id, why in listing.unreadable.items()} == {
        "none": "run.json: is empty",
        "late": "run.json: has version 9",
        "them": f"run.json: Forbidden: {bucket}/{GOOD.replace('good', 'them')}/run.json",
    }
    with pytest.raises(HostError, match="Forbidden"):  # nothing that was asked for is to be had
        runs.read(folder.directory(GOOD.replace("good", "them")))
    put("away")
    with pytest.raises(HostError, match="no route"):
        runs.survey(folder)


def own_run(write_run: WriteRun, beat: Beat, lines: Sequence[bytes | str], **more: Any) -> Run:
    command: dict[str, Any] = {
        "job": "command",
        "args": ["python", "train.py"],
        "metric_definitions": None,
        "config": {},
    }
    run = write_run(**command, beats=[beat("stepping")] * 2, **more)
    data = b"\n".join(line.encode() if isinstance(line, str) else line for line in lines)
    Path(run.directory.path("metrics.jsonl")).write_bytes(data)
    return run


def test_a_script_that_counts_no_steps_or_leaves_the_newline_out_is_followed_too(
    write_run: WriteRun, beat: Beat
) -> None:
    def after(*lines: str) -> Recorded:
        shown = Recorded()
        follow._Watch(shown).show(own_run(write_run, beat, lines))
        return shown

    assert after().waited == [follow.RUNNING]
    assert after('{"loss": 0.5}\n').steps == [Progress(step=None, total=None, figures=("loss 0.500",))]
    assert after('{"step": 0, "loss": 0.5}').steps == [Progress(step=0, total=None, figures=("loss 0.500",))]
    assert after('{"step": 1}{"step": 2, "loss": 0.5}').steps[0].step == 2


@pytest.mark.parametrize("make", [Path.mkdir, loop, os.mkfifo], ids=["folder", "loop", "pipe"])
def test_a_file_that_cannot_be_read_is_said_once_by_whoever_follows_and_in_the_report(
    write_run: WriteRun, beat: Beat, make: Callable[[Path], object]
) -> None:
    run = own_run(write_run, beat, [])
    for file in [
        "metrics.jsonl",
        "result.json",
        "heartbeats/host-1.json",
        "hosts/host-0.json",
        "samples.json",
    ]:
        path = Path(run.directory.path(file))
        path.parent.mkdir(exist_ok=True)
        if not (file == "samples.json" and make is os.mkfifo):  # which is of the jobs that made this run
            instead(path, make)
    fresh = runs.read(run.directory)
    assert fresh is not None
    shown = Recorded()
    watch = follow._Watch(shown)
    for _ in range(3):
        watch.show(fresh)
    named = sorted(note.split(":")[0] for note in shown.notes)
    assert named == ["heartbeats/host-1.json", "metrics.jsonl", "result.json"]
    page = read_and_render(run.directory.url)
    for file in (*named, "hosts/host-0.json"):
        assert page.count(f'"{file}: ') == 1, file


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS = {
    "run.json": (
        "name job args config code slice hosts platform metric_definitions created stack attempts target track sweep "
        "max_usd versions cwd image"
    ),
    "result.json": (
        "outcome attempt steps wall_s time error failed_host warnings time_s loss out_of_budget request exported_step "
        "tensorboard eval_loss"
    ),
    "heartbeats/host-0.json": "rank attempt state step time message warnings pid",
    "hosts/host-0.json": "host interval_s latest points capacity samples_per_point",
    "settings.json": "steps data init_from learning_rate",
}
"""What readers look for in each file."""


@st.composite
def odd_files(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """Some fields of some files, each with anything."""
    return {
        file: draw(st.dictionaries(st.sampled_from(fields.split()), ANYTHING, max_size=2))
        for file, fields in FIELDS.items()
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    odd_files(),
    st.lists(st.dictionaries(st.sampled_from(["step", "time", "loss", "x"]), ANYTHING), max_size=3),
)
def test_whatever_a_run_says_of_itself_every_reader_reads_it_and_the_run_beside_it(
    write_run: WriteRun,
    beat: Beat,
    runs_dir: Path,
    odd: Mapping[str, Mapping[str, Any]],
    lines: list[dict[str, Any]],
) -> None:
    good = write_run(GOOD, result={"outcome": "done", "steps": 3, "eval_loss": 1.5})
    bad = write_run(beats=[beat("stepping", step=3)] * 2, result={"outcome": "done"}, metrics=lines)
    for file, values in odd.items():
        path = Path(bad.directory.path(file))
        path.parent.mkdir(exist_ok=True)
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**before, **values}))
    listing = runs.survey(RunsFolder(url=os.path.dirname(good.directory.url), files=DiskFiles()))
    assert good.run_id in [run.run_id for run in listing.runs]
    assert {*listing.unreadable} | {run.run_id for run in listing.runs} == {good.run_id, bad.run_id}
    json.dumps([overview.overview(run, "done") for run in listing.runs], allow_nan=False)
    both = sorted(listing.runs, key=lambda run: run.run_id)
    for run in both:
        sampled = overview.samples(run)
        overview.findings(run, "running", sampled)
        overview.hosts(run, runs.Look(processes=(), errors=()), sampled)
        follow._Watch(Recorded()).show(run)
        assert summary(run, "done") and summary(run, "failed")
        exporting.card(run, None)
        read_and_render(run.directory.url)
    compared = overview.compare(both, [overview.overview(run, "done") for run in both])
    for row in (*compared.about, *compared.settings, *compared.metrics):
        row.texts()
    seen = Place("here", "here", RunsFolder(url=str(runs_dir), files=DiskFiles()), period_s=0.0)
    dashboard, nothing = Dashboard([seen]), QueryParams()
    answers = [dashboard.runs(), dashboard.compare([f"here/{run.run_id}" for run in both])]
    for shown in seen.look(30.0).runs.values():
        assert not any("cannot be understood" in problem for problem in shown.problems)
        answers.append(dashboard.run(seen, shown, nothing))
        if shown.run:
            answers.append(dashboard.curves(seen, shown, nothing))
    json.dumps(answers, allow_nan=False)


def test_a_result_that_cannot_be_read_is_none_that_is_missing(
    write_run: WriteRun, beat: Beat, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(beats=[beat("done", step=3)] * 2)
    path = Path(run.directory.path("result.json"))
    path.write_text('{"outcome": "stopped", "out_of_bu')
    run = launching.finalize(run, "failed", "nobody knows")
    assert path.read_text().endswith("out_of_bu"), "it is no place for another one"
    problem = "result.json: is torn, or no JSON object"
    decision = launching.decide("lost", run)
    assert (decision.do, decision.reason) == ("end", f"how it ended cannot be read: {problem}")
    assert summary(run, "lost")[0] == f"{run.run_id}: how it ended cannot be read: {problem}"
    with pytest.raises(RequestError, match="how it ended cannot be read"):
        launching.observed(run, "lost")
    Path(run.directory.path("metrics.jsonl")).mkdir()
    assert status_command.list_runs(here("2"), limit=1) == 0
    assert capsys.readouterr().out.count(f"{run.run_id}: {problem} (and 1 more)") == 1
