"""`fab rm` and `fab prune`: what goes, what stays, and what an interruption leaves. Nothing is trained."""

import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from backends.host_backend import HostBackend
from backends.pods.pod_backend import PodBackend
from console import removal
from contracts.errors import RequestError
from contracts.run_directory import large_folder, packages
from jobs.runtime.storage.bucket_files import BucketFiles
from launch import runs
from launch.hosts import HostError
from launch.remote_files import Buckets, HostFiles
from launch.targets import Target
from tests.launch.slices import WriteRun, here, ssh_backend

DONE = {"outcome": "done"}
IDS = {letter: f"flax_mlm-20261120-21450{place}-{letter * 4}" for place, letter in enumerate("abcdef")}


@pytest.fixture(autouse=True)
def nobody_there(monkeypatch: pytest.MonkeyPatch, runs_dir: Path) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    monkeypatch.setenv("COLUMNS", "200")


def nobody(_run_id: str) -> None:
    """Nobody starts a run again."""


def began(letter: str, **changed: Any) -> dict[str, Any]:
    """What makes a run the newer the later its letter."""
    started = f"2020-11-20T21:45:0{'abcdef'.index(letter)}Z"
    return {"attempts": [{"attempt": 0, "started": started, "processes": 2}], "result": DONE, **changed}


@pytest.fixture(params=["disk", "bucket", "hosts"])
def placed(request: pytest.FixtureRequest, write_run: WriteRun, tmp_path: Path) -> tuple[Target, Path]:
    """Two runs here, in a bucket or on a host; on disks the older one has links that lead outside."""
    for letter in "ab":
        run = write_run(IDS[letter], **began(letter))
        run.directory.write_text("checkpoints/5/state", "x" * 100_000)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "data").write_text("mine")
    old = Path(here().runs_url) / IDS["a"]
    if request.param == "bucket":
        url = f"memory://removal-{time.monotonic_ns()}/runs"
        BucketFiles().put_folder(str(old.parent), url)
        return dataclasses.replace(here(), runs_url=url, files=Buckets()), outside
    (old / "linked").symlink_to(outside)
    (old / "checkpoints" / "linked").symlink_to(outside / "data")
    if request.param == "hosts":
        return dataclasses.replace(
            here(), name="dev", backend=ssh_backend(), files=HostFiles(here().agents)
        ), outside
    return here(), outside


def test_a_run_is_removed_wherever_it_lies_and_nothing_that_its_links_lead_to(
    placed: tuple[Target, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    target, outside = placed
    assert removal.remove(target, "aaaa", yes=True, mark=nobody) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{IDS['a']}  10") and " kB  " in said[0]
    assert said[1:] == [f"removed {IDS['a']}"]
    assert target.files.list(target.runs_url) == [IDS["b"]]
    assert [run.run_id for run in runs.list_runs(target.runs)] == [IDS["b"]]
    assert (outside / "data").read_text() == "mine"


def test_with_an_own_command_goes_what_it_has_on_its_hosts_and_nothing_of_other_runs(
    write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id, other = "command-20261120-214500-aaaa", "command-20261120-214500-bbbb"
    for name in (run_id, other):
        run = write_run(name, job="command", args=["python", "train.py"], **began("a"))
    root = Path(run.described["cache_dir"]) / "agent" / "runs"
    left = {
        root / name / place for name in (run_id, other) for place in ("venv-0", "venv-1", "work-1", "0-0")
    }
    for folder in left:
        folder.mkdir(parents=True)
        (folder / "file").touch()
    assert removal.remove(here(), "aaaa", yes=True, mark=nobody) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [f"removed {run_id}"]
    stay = {folder for folder in left if folder.parent.name == other or folder.name == "0-0"}
    assert {folder for folder in left if folder.exists()} == stay


def test_packages_go_with_the_last_run_that_has_them(write_run: WriteRun) -> None:
    target = here()
    for letter, sha256 in (("a", "0" * 64), ("b", "1" * 64)):
        config, folder = {"packages": {"sha256": sha256}}, sha256[:32] + "f" * 32
        write_run(
            f"command-20261120-214500-{letter * 4}",
            job="command",
            args=["python"],
            **began(letter, config=config, code={"folder": folder}),
        )
        for path in (packages, large_folder):
            target.files.write(path(f"{target.runs_url}/x", sha256 if path is packages else folder), b"")
    assert removal.prune(target, keep=1, yes=True, resumed_by={}) == 0
    assert target.files.list(f"{target.runs_url}/.packages") == [
        f"{'1' * 64}.base64",
        f"{'1' * 32}{'f' * 32}.tar.gz.base64",
    ]


@pytest.mark.parametrize("placed", ["disk", "bucket"], indirect=True)
def test_what_an_interrupted_removal_leaves_is_no_run(
    placed: tuple[Target, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = placed

    def full_stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", full_stop)
    monkeypatch.setattr(MemoryFileSystem, "rm", full_stop)
    with pytest.raises(KeyboardInterrupt):
        removal.remove(target, IDS["a"], yes=True, mark=nobody)
    assert target.files.read([f"{target.runs_url}/{IDS['a']}/checkpoints/5/state"]) != [None]
    assert [run.run_id for run in runs.list_runs(target.runs)] == [IDS["b"]]


def test_the_newest_stay_and_what_is_active_or_was_begun_from_directly_or_not(
    write_run: WriteRun, beat: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(here().runs_url)
    alive = [beat("stepping", rank=rank, time=time.time()) for rank in range(2)]
    write_run(IDS["a"], **began("a"))
    write_run(IDS["b"], **began("b", config={"init_from": f"{folder}/{IDS['a']}/export"}))
    write_run(IDS["c"], **began("c", result=None), beats=alive)
    write_run(IDS["d"], **began("d"))
    served = {"export": f"{folder}/{IDS['d']}/export"}
    write_run(IDS["e"], **began("e", job="serve", config=served))  # which has ended
    (folder / "best").symlink_to(folder / IDS["b"])
    write_run(IDS["f"], **began("f", config={"init_from": "runs/best/export"}, cwd=str(folder.parent)))
    assert removal.prune(here(), keep=2, yes=True, resumed_by={}) == 0
    said = capsys.readouterr().out
    assert f"{IDS['c']} is kept: it is running; `fab stop {IDS['c']}` stops it\n" in said
    assert f"{IDS['b']} is kept: {IDS['f']} began from it\n" in said
    assert f"{IDS['a']} is kept: {IDS['b']} began from it\n" in said
    assert sorted(path.name for path in folder.iterdir()) == ["best", *(IDS[each] for each in "abcef")]
    assert removal.prune(here(), keep=2, yes=False, resumed_by={}) == 0
    assert capsys.readouterr().out.endswith(f"nothing to remove: {folder} has 5 runs\n")
    for name, why in (("cccc", "it is running"), ("aaaa", f"{IDS['b']} began from it")):
        with pytest.raises(RequestError, match=f"{IDS[name[0]]} is kept: {why}"):
            removal.remove(here(), name, yes=True, mark=nobody)
    for name in ("ffff", "bbbb"):
        assert removal.remove(here(), name, yes=True, mark=nobody) == 0


def test_the_latest_run_stays_while_another_stack_starts_it(write_run: WriteRun) -> None:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 60))
    write_run(target="tpus", attempts=[{"attempt": 0, "started": now, "processes": 2}])
    with pytest.raises(RequestError, match="is kept: it was started a moment ago"):
        removal.remove(here(), "latest", yes=True, mark=nobody)


def test_a_run_on_pods_that_may_still_wait_stays_while_its_cluster_does_not_answer(
    write_run: WriteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods = {"restarts": 10, "queue": "nlp"}
    waiting = write_run(IDS["a"], **began("a", result=None, pods=pods))
    ended = write_run(IDS["b"], **began("b", pods=pods))
    away = HostError(host="cluster dev", reason="its API server cannot be reached")
    look = runs.Look(processes=(), errors=(away,), knowing=0)
    monkeypatch.setattr(PodBackend, "status", lambda *_: look)
    monkeypatch.setattr(HostBackend, "status", lambda *_: look)
    preempted = write_run(IDS["c"], **began("c", result={"outcome": "preempted", "attempt": 0}, pods=pods))
    everything = [waiting, ended, preempted]
    cluster: Any = object()
    on_pods = dataclasses.replace(here(), backend=PodBackend(cluster))
    reasons = removal.blocked(on_pods, everything, everything, {})
    assert {*reasons} == {IDS["a"], IDS["c"]}
    assert not removal.blocked(here(), everything, everything, {}), "other hosts say nothing of a cluster"
    assert "its API server cannot be reached" in reasons[IDS["a"]]
    assert f"its folder {waiting.directory.url} itself" in reasons[IDS["a"]]


def test_nothing_goes_without_a_yes_or_when_the_run_was_resumed_while_the_question_was_open(
    write_run: WriteRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(result=DONE)
    with pytest.raises(RequestError, match="nobody is there to be asked, so nothing was removed; say --yes"):
        removal.remove(here(), "latest", yes=False, mark=nobody)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "y" if "Remove 1 run, " in question else "yes")
    assert removal.remove(here(), "latest", yes=False, mark=nobody) == 1
    assert capsys.readouterr().out.endswith("nothing was removed\n")

    def end_of_input(_question: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end_of_input)
    assert removal.remove(here(), "latest", yes=False, mark=nobody) == 1
    assert capsys.readouterr().out.endswith("nothing was removed\n")

    def resume(_question: str) -> str:
        attempts = run.described["attempts"]
        run.directory.write_json(
            "run.json", {**run.described, "attempts": [*attempts, {**attempts[0], "attempt": 1}]}
        )
        return "yes"

    monkeypatch.setattr("builtins.input", resume)
    with pytest.raises(RequestError, match="was resumed meanwhile, and is kept"):
        removal.prune(here(), keep=0, yes=False, resumed_by={})
    run.directory.write_json("run.json", run.described)
    monkeypatch.setattr("builtins.input", lambda _question: "yes")
    assert removal.prune(here(), keep=0, yes=False, resumed_by={}) == 0
    assert runs.list_runs(here().runs) == []


def test_a_run_that_is_resumed_later_is_removed_by_whoever_resumes_it_and_stays_with_prune(
    write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """It waits for capacity without a process: a restart would look for its checkpoints in vain."""
    for letter in "ab":
        write_run(IDS[letter], **began(letter, result={"outcome": "preempted"}))
    target, run_id, marked = here(), IDS["a"], list[str]()

    def mark(run_id: str) -> str:
        marked.append(run_id)
        return f"{run_id} is to be removed; the keeper does so at its next look"

    assert removal.remove(target, run_id, yes=True, mark=mark) == 0
    assert capsys.readouterr().out.endswith("is to be removed; the keeper does so at its next look\n")
    assert marked == [run_id] and len(runs.list_runs(target.runs)) == 2
    resumed_by = {run_id: f"the keeper resumes it; `fab unkeep {run_id}` first"}
    assert removal.prune(target, keep=0, yes=True, resumed_by=resumed_by) == 0
    assert f"{run_id} is kept: the keeper resumes it" in capsys.readouterr().out
    assert [run.run_id for run in runs.list_runs(target.runs)] == [run_id]
