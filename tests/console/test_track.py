"""The mirror of a run in a tracker, by MLflow's and W&B's own libraries in their own environments."""

import dataclasses
import json
import os
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from backends.local import environments
from backends.local.local_backend import on_this_machine
from console import track, tracker_client
from contracts.errors import RequestError
from contracts.files import DiskFiles
from launch import runs
from launch.jobs import CHECKOUT
from launch.remote_files import HostFiles
from launch.runs import Run
from launch.targets import Target
from tests.launch.slices import WriteRun, ssh_backend
from tests.servers import free_port

LIMIT_S = 90.0
SERVER_LIMIT_S = 600.0
"""MLflow's server imports and migrates for 20 s on idle cores, and was seen to need 172 s on busy ones."""
KEY = "0123456789abcdef0123456789abcdef01234567"


def made(tracker: str) -> Path:
    environments.ensure(tracker, print)
    return environments.environment_python(tracker)


@pytest.fixture(scope="session")
def mlflow() -> Path:
    """The interpreter that has MLflow, in this user's own cache."""
    return made("mlflow")


@pytest.fixture(scope="session")
def wandb() -> Path:
    return made("wandb")


@pytest.fixture
def quick(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Target]:
    """Makes the mirror use an interpreter and wait for nothing long; returns this machine."""

    def use(python: Path) -> Target:
        for name in [
            "MLFLOW_TRACKING_URI",
            "MLFLOW_EXPERIMENT_NAME",
            "WANDB_API_KEY",
            "WANDB_MODE",
            "WANDB_DIR",
        ]:
            monkeypatch.delenv(name, raising=False)
        for name, value in {"POLL_S": 0.1, "SETTLE_S": 0.2, "NICE": 0}.items():
            monkeypatch.setattr(track, name, value)
        monkeypatch.setattr(environments, "environment_python", lambda _name: python)
        monkeypatch.setattr(environments, "ensure", lambda _name, _say: None)
        return on_this_machine(hosts=None, platform="cpu")

    return use


def until(found: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    end_s = time.monotonic() + limit_s
    while not found():
        assert time.monotonic() < end_s
        time.sleep(0.1)


@contextmanager
def following(target: Target, run: Run, tracker: str, limit_s: float = LIMIT_S) -> Iterator[track.Mirror]:
    """A mirror at work; at the end it is waited for."""
    with track.Mirror(target, run, tracker, limit_s) as mirror:
        thread = threading.Thread(target=mirror.follow)
        thread.start()
        try:
            yield mirror
        finally:
            thread.join(LIMIT_S)
    assert not thread.is_alive()


def lines(steps: Sequence[int], since_s: float, **more: float) -> list[dict[str, Any]]:
    """Lines of metrics, an evaluation at step 20; the same step has the same loss and another time."""
    trained = [
        {"step": step, "loss": 1 / step, "mfu": None, **more, "time": since_s + step} for step in steps
    ]
    evaluated = [{"step": 20, "eval_loss": 0.5, "time": since_s + 20.5}] if 20 in steps else []
    return sorted([*trained, *evaluated], key=lambda line: line["time"])


def attempts(count: int) -> list[dict[str, Any]]:
    return [{"attempt": each, "started": "2020-11-20T21:45:00Z", "processes": 1} for each in range(count)]


class Store:
    """What is in MLflow's database."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        if not self._path.exists():
            return []
        with closing(sqlite3.connect(self._path, timeout=30)) as database:
            try:
                return database.execute(query).fetchall()
            except sqlite3.OperationalError:  # it is being made
                return []

    def points(self, name: str = "loss") -> list[tuple[int, float]]:
        return self.ask(f"select step, value from metrics where key = '{name}' order by step, timestamp")


@contextmanager
def another_mirror(lock: str) -> Iterator[None]:
    """One that is at work for another moment."""
    held = threading.Event()

    def hold() -> None:
        with FileLock(lock):
            held.set()
            time.sleep(0.5)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(LIMIT_S)
    yield
    thread.join()


def test_of_a_step_that_a_script_took_again_the_tracker_gets_the_later_value(
    quick: Callable[[Path], Target], write_run: WriteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    since_s = time.time()
    metrics = lines([1, 2, 3], since_s) + [{"step": step, "loss": 9.0} for step in (2, 3, 4)]
    run = write_run(attempts=attempts(2), metrics=metrics)
    sent: list[Any] = []
    mirror = track.Mirror(quick(tmp_path), run, "mlflow", LIMIT_S)
    monkeypatch.setattr(mirror, "_ask", lambda verb, content: sent.append((verb, content)))
    mirror._send_metrics()
    ((verb, points),) = sent
    assert (verb, [(step, values["loss"]) for step, _, values in points]) == (
        "metrics",
        [(1, 1.0), (2, 9.0), (3, 9.0), (4, 9.0)],
    )


STEPS = [(step, 1 / step) for step in (10, 20, 30, 40)]


@pytest.mark.slow  # its environment has to be made first
def test_a_resumed_run_is_one_run_in_mlflow_with_each_step_once_however_often_it_is_sent(
    mlflow: Path,
    quick: Callable[[Path], Target],
    write_run: WriteRun,
    runs_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, store, now_s = quick(mlflow), Store(runs_dir / "mlflow" / "mlflow.db"), time.time()

    def beat(attempt: int, state: str) -> dict[str, Any]:
        return {"attempt": attempt, "state": state, "step": 1, "time": time.time()}

    told: dict[str, Any] = {"config": {"steps": 35}, "name": "mine", "metrics": lines([10, 20, 30], now_s)}
    run = write_run(attempts=attempts(1), beats=[beat(0, "stepping")], **told)
    with following(target, run, "mlflow") as mirror:
        until(lambda: store.points() == STEPS[:3])
        # Resumed from step 20: the lines after it are still there until the attempt has begun.
        told |= {"attempts": attempts(2), "config": {"steps": 40}}
        write_run(beats=[beat(1, "joined")], **told)
        until(lambda: mirror._attempt == 1)
        told["metrics"] = lines([10, 20], now_s) + lines([30, 40], now_s + 100, tokens_per_s=1000)
        run = write_run(beats=[beat(1, "stepping")], **told)
        run.directory.write_text("export/config.json", "{}")
        run.directory.write_text("report.html", "the report")
        run.directory.write_text("settings.json", json.dumps({"steps": 40, "lr": 0.1}))
        result: dict[str, Any] = {"outcome": "done", "attempt": 1, "steps": 40, "eval_loss": 0.5}
        result["time"] = time.time()
        run.directory.write_json("result.json", result)
    assert mirror.is_complete
    record = run.directory.read_json("trackers/mlflow.json") or {}
    assert (record["complete"], record["step"], record["problem"]) == (True, 40, None)
    run.directory.remove("trackers/mlflow.json")  # nobody needs to remember what was sent
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{runs_dir}/mlflow/mlflow.db")
    elsewhere = dataclasses.replace(
        target, name="dev", backend=ssh_backend(), files=HostFiles(target.agents)
    )  # as on a stack
    with another_mirror(track._cache_path(f"{run.run_id}-mlflow.lock")):
        assert track.track(elsewhere, run.run_id, ["mlflow"], limit_s=LIMIT_S) == 0
    assert "waiting for the process that mirrors it to mlflow already" in capsys.readouterr().out
    assert (store.points(), store.points("eval_loss")) == (STEPS, [(20, 0.5)])
    assert store.points("final/eval_loss") == [(40, 0.5)]
    assert (store.points("mfu"), store.points("tokens_per_s")) == ([], [(30, 1000), (40, 1000)])
    assert store.ask("select name, status, end_time from runs") == [
        ("mine", "FINISHED", int(1000 * result["time"]))
    ]
    assert store.ask("select key, value from params order by key") == [("lr", "0.1"), ("steps", "35")]
    assert ("resumed with steps", "40") in store.ask("select key, value from tags")
    (artifacts,) = (runs_dir / "mlflow" / "artifacts").glob("*/artifacts")
    assert {path.name for path in artifacts.rglob("*") if path.is_file()} == {
        *("run.json", "settings.json", "result.json", "report.html", "config.json")
    }


def is_open(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


@contextmanager
def server(mlflow: Path, folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """MLflow's own server, which answers; killed at the end, with its workers."""
    folder.mkdir(exist_ok=True)
    words = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder)]
    with open(folder / "server.log", "ab") as log:
        process = subprocess.Popen(
            [mlflow.with_name("mlflow"), "server", *words, "--port", str(port), "--workers", "1"],
            stdout=log, stderr=log, start_new_session=True, cwd=folder,
            env={**os.environ, "PATH": f"{mlflow.parent}:{os.environ['PATH']}", "MLFLOW_DISABLE_TELEMETRY": "true"},
        )  # fmt: skip
    try:
        until(lambda: is_open(port), SERVER_LIMIT_S)
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.nightly
@pytest.mark.timeout(3 * SERVER_LIMIT_S)
def test_a_server_that_is_away_comes_dies_and_comes_again_has_all_in_the_end_and_no_password_is_written(
    mlflow: Path,
    quick: Callable[[Path], Target],
    write_run: WriteRun,
    runs_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    target, store, port = quick(mlflow), Store(tmp_path / "server" / "mlflow.db"), free_port()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:{KEY}@127.0.0.1:{port}")
    now_s = time.time()

    def grown(to: int) -> Run:
        beat = {"attempt": 0, "state": "stepping", "step": to, "time": time.time()}
        steps = list(range(10, to + 1, 10))
        return write_run(attempts=attempts(1), beats=[beat], metrics=lines(steps, now_s), track=["mlflow"])

    run = grown(10)

    def problem() -> str:
        return str((run.directory.read_json("trackers/mlflow.json") or {}).get("problem"))

    with following(target, run, "mlflow") as mirror:
        until(lambda: "Max retries" in problem() or "refused" in problem())
        (said,) = track.progress(runs.read(run.directory) or run)
        assert said.startswith("mlflow: not reached yet; ") and f"`fab track {run.run_id}`" in said
        with server(mlflow, tmp_path / "server", port):
            grown(20)
            until(lambda: store.points() == STEPS[:2])
        grown(30)
        until(lambda: problem() != "None")
        assert mirror._client is not None
        os.kill(mirror._client._process.pid, signal.SIGKILL)
        with server(mlflow, tmp_path / "server", port):
            run = grown(40)
            run.directory.write_json("result.json", {"outcome": "failed", "attempt": 0, "time": time.time()})
            until(lambda: mirror.is_complete)
    assert (store.points(), store.points("eval_loss")) == (STEPS, [(20, 0.5)])
    assert store.ask("select status from runs") == [("FAILED",)]
    written = [path.read_bytes() for path in runs_dir.rglob("*") if path.is_file()]
    assert KEY.encode() not in b"".join(written) and KEY not in "".join(capfd.readouterr())


@pytest.mark.nightly
def test_a_tracker_that_never_answers_changes_no_loss_and_delays_no_run(mlflow: Path, tmp_path: Path) -> None:
    """A socket that nobody accepts from; the run with it and the run without it are the same."""

    def trained(name: str, **environ: str) -> tuple[float, list[Any]]:
        began_s = time.monotonic()
        fab = Path(sys.executable).with_name("fab")
        subprocess.run(
            [fab, "train", "--job", "jax_hello", "--name", name, "--", "--steps", "300"],
            env={**os.environ, "TPU_STACK_RUNS": str(tmp_path), **environ}, check=True, timeout=LIMIT_S,
        )  # fmt: skip
        took_s = time.monotonic() - began_s
        run = runs.find(runs.RunsFolder(url=str(tmp_path), files=DiskFiles()), name)
        assert (run.result or {})["outcome"] == "done"
        return took_s, [(line["step"], line["loss"]) for line in run.directory.read_metrics()]

    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(100)
        address = f"http://127.0.0.1:{hole.getsockname()[1]}"
        without_s, losses = trained("without")
        with_s, same = trained("with", TPU_STACK_TRACK="mlflow", MLFLOW_TRACKING_URI=address)
        assert same == losses
        assert with_s < 1.5 * without_s + 5
        run = runs.find(runs.RunsFolder(url=str(tmp_path), files=DiskFiles()), "with")
        until(lambda: "no answer" in problem_of(run) or "timed out" in problem_of(run))
        until(lambda: not at_work(run))  # after the run it gives up by itself


def problem_of(run: Run) -> str:
    return str((run.directory.read_json("trackers/mlflow.json") or {}).get("problem"))


def at_work(run: Run) -> bool:
    """Whether a process of this machine mirrors the run."""
    found = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return any(f"track\0{run.run_id}".encode() in words for words in found)


def records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file, which is a log in LevelDB's format behind a header of 7 bytes."""
    data, at, parts = path.read_bytes(), 7, [b""]
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        _, size, kind = struct.unpack("<IHB", data[at : at + 7]) if left >= 7 else (0, 0, 0)
        if kind == 0:
            at += left
            continue
        parts.append(data[at + 7 : at + 7 + size])
        at += 7 + size
        if kind in (1, 4):
            yield b"".join(parts)
            parts.clear()


def in_folder(wandb: Path, folder: Path) -> list[Mapping[str, Any]]:
    """The lines of metrics and the artifacts that a folder for `wandb sync` has."""
    (log,) = folder.glob("*.wandb")
    read = (
        "import json, sys; from wandb.proto.wandb_internal_pb2 import Record\n"
        "for line in sys.stdin:\n"
        "    record = Record.FromString(bytes.fromhex(line))\n"
        "    if record.HasField('history'):\n"
        "        print(json.dumps({i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.history.item}))\n"
        "    if record.HasField('artifact'): print(json.dumps({'artifact': record.artifact.name}))\n"
    )
    hexes = "".join(f"{each.hex()}\n" for each in records(log))
    said = subprocess.run([wandb, "-c", read], input=hexes, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in said.splitlines()]


@pytest.mark.slow  # its environment has to be made first
def test_without_a_key_wandb_has_of_a_step_that_a_resumed_run_repeats_the_later_value(
    wandb: Path,
    quick: Callable[[Path], Target],
    write_run: WriteRun,
    runs_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, now_s = quick(wandb), time.time()
    monkeypatch.setenv("NETRC", "/nowhere")

    def beat(attempt: int) -> dict[str, Any]:
        return {"attempt": attempt, "state": "stepping", "step": 1, "time": time.time()}

    run = write_run(attempts=attempts(1), beats=[beat(0)], metrics=lines([10, 20, 30], now_s))
    with following(target, run, "wandb") as mirror:
        until(lambda: mirror._record.get("step") == 30)
        later = [{**line, "loss": 9.0} for line in lines([30, 40], now_s + 100)]
        run = write_run(attempts=attempts(2), beats=[beat(1)], metrics=lines([10, 20], now_s) + later)
        until(lambda: mirror._record.get("step") == 40)
        run.directory.write_json("result.json", {"outcome": "done", "attempt": 1, "steps": 40, "time": 1.0})
    assert mirror.is_complete
    (folder,) = (runs_dir / "wandb" / "wandb").glob("offline-run-*")
    history = [line for line in in_folder(wandb, folder) if "loss" in line]
    assert [(line["_step"], line["loss"]) for line in history] == [*STEPS[:2], (30, 9.0), (40, 9.0)]


@pytest.mark.nightly
def test_without_a_key_a_run_is_one_folder_for_wandb_sync_and_with_one_that_nobody_takes_it_is_kept_secret(
    wandb: Path,
    quick: Callable[[Path], Target],
    write_run: WriteRun,
    runs_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    target = quick(wandb)
    monkeypatch.setenv("NETRC", "/nowhere")
    run = write_run(attempts=attempts(1), metrics=lines([10, 20, 30, 40], time.time()))
    run.directory.write_text("export/config.json", "{}")
    run.directory.write_text("report.html", "the report")
    run.directory.write_json("result.json", {"outcome": "done", "attempt": 0, "steps": 40, "time": 1.0})
    for _ in range(2):
        assert track.track(target, run.run_id, ["wandb"], limit_s=LIMIT_S) == 0
    (folder,) = (runs_dir / "wandb" / "wandb").glob("offline-run-*")
    assert (folder / "files" / "report.html").read_text() == "the report"
    assert not (folder / "files" / "report.html").is_symlink()
    found = in_folder(wandb, folder)
    history = [line for line in found if "loss" in line]
    assert [(line["_step"], line["loss"]) for line in history] == STEPS
    assert [line["_step"] for line in history if line.get("eval_loss") == 0.5] == [20]
    assert {"artifact": f"{run.run_id}-export"} in found

    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    assert track.track(target, run.run_id, ["wandb"], limit_s=0) == 1
    record = run.directory.read_json("trackers/wandb.json") or {}
    assert record["problem"] and "catches up" in capfd.readouterr().out
    written = [path.read_bytes() for path in runs_dir.rglob("*") if path.is_file()]
    assert KEY.encode() not in b"".join(written)


@pytest.mark.parametrize(
    ("given", "environ", "before", "meant"),
    [
        (None, {}, None, ()),
        (["mlflow"], {}, None, ("mlflow",)),
        (None, {"TPU_STACK_TRACK": "wandb, mlflow,wandb"}, None, ("wandb", "mlflow")),
        ([], {"TPU_STACK_TRACK": "mlflow"}, ["mlflow"], ()),
        (None, {"TPU_STACK_TRACK": "mlflow"}, [], ()),
        (None, {}, ["wandb"], ("wandb",)),
    ],
)
def test_an_option_decides_on_trackers_before_the_run_that_is_resumed_and_that_before_the_environment(
    given: list[str] | None, environ: dict[str, str], before: list[str] | None, meant: tuple[str, ...]
) -> None:
    assert track.selected(given, environ, before) == meant


def test_a_tracker_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(RequestError, match='--track: "aim" is not a tracker; choose one of mlflow, wandb'):
        track.parse("--track", "mlflow,aim")
    assert track.parse("--track", "none") == ()
    with pytest.raises(RequestError, match="TPU_STACK_TRACK"):
        track.selected(None, {"TPU_STACK_TRACK": "aim"}, None)


def test_what_a_library_says_has_no_password_of_an_address_and_no_key_of_the_environment() -> None:
    said = f"POST https://me:secret@host/api?k={KEY} failed with hunter2hunter2 in {CHECKOUT}"
    secret = {"WANDB_API_KEY": KEY, "MLFLOW_TRACKING_PASSWORD": "hunter2hunter2"}
    environ = {**secret, "SHORT_KEY": "a", "PATH": "/"}
    assert track.without_secrets(said, environ) == f"POST https://host/api?k=… failed with … in {CHECKOUT}"
    assert tracker_client.public("https://me:secret@host:5000/x") == "https://host:5000/x"
    assert tracker_client.public("sqlite:////home/a@b/mlflow.db") == "sqlite:////home/a@b/mlflow.db"
