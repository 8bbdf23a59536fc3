"""`fab track`: mirrors a run's metrics, settings, report and export to MLflow or Weights & Biases.

The mirror is a process of its own on the launching machine, which `fab train --track` starts and does not wait for. It
reads the run directory, wherever that is, and sends what is new to a process with the tracker's library
(tracker_client.py, in an environment of its own). The run knows nothing of it, so a tracker that is away, slow or
refuses can neither slow nor end it. What a tracker has, the tracker itself says: whatever is interrupted begins again,
and what is sent twice is there once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from backends.local import environments
from console import overview
from contracts import run_directory
from contracts.aliases import Say
from contracts.durations import spoken
from contracts.errors import RequestError
from contracts.run_directory import EXPORT, REPORT, RESULT, RUN, SAMPLES, SETTINGS, SILENCE_LIMIT_S
from contracts.run_records import Unread, without_retaken
from jobs.runtime.monitoring.metric_definitions import finite
from jobs.runtime.storage.cache import user_cache_dir
from launch import runs
from launch.hosts import HostError
from launch.jobs import CHECKOUT
from launch.output import printable, say, terminal
from launch.runs import Run
from launch.targets import Target

TRACKERS = ("mlflow", "wandb")
NONE = "none"
VARIABLE = "TPU_STACK_TRACK"
CLIENT = Path(__file__).with_name("tracker_client.py")
FILES = (RUN, SETTINGS, RESULT, REPORT, SAMPLES)
"""Files that are mirrored at the end, beside the export."""

POLL_S, REMOTE_POLL_S = 5.0, 15.0
RECORD_PERIOD_S = 10.0
SETTLE_S = 5.0
"""After its result, a run's report is still being written."""
UNREADABLE_LIMIT_S = 3600.0
"""How long a run directory that cannot be read is tried again."""
ANSWER_LIMIT_S = 600.0
"""For an answer of the client, which may have files to send; its libraries have shorter limits of their own."""
EXIT_LIMIT_S = 60.0
SECRETS = re.compile(r"(_KEY|_TOKEN|_PASSWORD)$")
SHORTEST_SECRET = 8
LONGEST_PROBLEM = 400
NICE = 10


class TrackerError(Exception):
    """The tracker did not take what it was sent, this time."""


def selected(
    option: Sequence[str] | None, environ: Mapping[str, str], previous: Sequence[str] | None
) -> tuple[str, ...]:
    """Return the trackers of a launch: those of --track, else those of the run that is resumed, else those of VARIABLE.

    Raises:
        RequestError: VARIABLE names something else.
    """
    if option is not None:
        return tuple(option)
    return tuple(previous) if previous is not None else parse(f"${VARIABLE}", environ.get(VARIABLE, ""))


def parse(source: str, text: str) -> tuple[str, ...]:
    """Return the trackers in a list such as mlflow,wandb; empty for NONE. source: where the list is from.

    Raises:
        RequestError: it names something else.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if names == (NONE,):
        return ()
    for name in names:
        if name not in TRACKERS:
            raise RequestError(
                f'{source}: "{name}" is not a tracker; choose one of {", ".join(TRACKERS)}, both with a comma between '
                f"them, or {NONE}"
            )
    return names


def start(run: Run, target: Target, tell: Say) -> None:
    """Start the mirrors of a run in the background, where they outlive this process and its terminal."""
    for tracker in run.described.get("track") or ():
        command = ["track", run.run_id, "--to", tracker, "--stack", target.name, "--runs", target.runs_url]
        command += ["--slice", target.slice.name]
        program = "from fabfile.command_line import main; main()"
        log = os.open(
            _cache_path(f"{run.run_id}-{tracker}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        null = os.open(os.devnull, os.O_RDWR)
        try:  # not a Popen, which would have to be waited for
            os.posix_spawn(
                sys.executable,
                [sys.executable, "-c", program, *command],
                os.environ,
                setsid=True,
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, to) for to, fd in enumerate((null, log, log))],
            )
        finally:
            os.close(log)
            os.close(null)
        tell(f"{tracker}: the run is mirrored in the background")


def progress(run: Run) -> list[str]:
    """Return a line about each tracker of a run: how much of the run it has."""
    trackers = run.described.get("track") or ()
    records = run.directory.read_objects([run_directory.tracker(name) for name in trackers])
    return [_progress(name, record, run) for name, record in zip(trackers, records, strict=True)]


def _progress(tracker: str, record: Mapping[str, Any] | None, run: Run) -> str:
    record = record or {}
    address = record.get("address") or "not reached yet"
    if record.get("complete") and record.get("attempt") == run.attempt:
        return f"{tracker}: complete in {address}"
    step, problem = record.get("step"), record.get("problem")
    reached = f"step {step} in {address}" if step is not None else address
    reason = f"; {problem}" if problem else ""
    return printable(f"{tracker}: {reached}{reason}; `fab track {run.run_id}` waits for it, or catches up")


def track(target: Target, name: str, to: Sequence[str] | None, *, limit_s: float) -> int:
    """Mirror a run until it has ended and the trackers have all of it. Return 0, or 1 if one does not.

    to: the trackers; None: those that the run was started with. limit_s: how long a tracker that is away is tried after
    the run's end.

    Raises:
        RequestError: there is no such run or tracker.
        HostError: the runs cannot be reached.
    """
    tell, run = say(terminal()), runs.find(target.runs, name)
    trackers = selected(to, os.environ, run.described.get("track"))
    if not trackers:
        raise RequestError(f"--to: say to which tracker; choose one of {', '.join(TRACKERS)}")
    os.nice(NICE)
    is_complete = True
    for tracker in trackers:  # one after the other; in the background each has a process
        lock = FileLock(_cache_path(f"{run.run_id}-{tracker}.lock"))
        try:
            lock.acquire(blocking=False).lock.release()
        except Timeout:
            tell(f"waiting for the process that mirrors it to {tracker} already")
        with lock, Mirror(target, run, tracker, limit_s) as mirror:
            mirror.follow()
        current = runs.read(run.directory) or run
        (record,) = run.directory.read_objects([run_directory.tracker(tracker)])
        tell(_progress(tracker, record, current))
        if tracker == "mlflow" and record and str(record.get("address")).startswith("sqlite:"):
            mlflow = environments.environment_python(tracker).with_name("mlflow")
            tell(f"look at it with: {mlflow} ui --backend-store-uri {record['address']}")
        is_complete &= mirror.is_complete
    return 0 if is_complete else 1


def _cache_path(name: str) -> str:
    folder = user_cache_dir(os.environ) / "trackers"
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / name)


class Mirror:
    """Copies one run to one tracker."""

    def __init__(self, target: Target, run: Run, tracker: str, limit_s: float) -> None:
        self._target, self._run, self._tracker, self._limit_s = target, run, tracker, limit_s
        is_local = target.capabilities.shares_files and target.runs_on_share
        self._folder = (Path(target.runs_url) if is_local else CHECKOUT / "runs") / tracker
        self._client: _Client | None = None
        self._attempt: int | None = None
        """The attempt that the tracker knows of."""
        self._offset = 0
        self._steps: dict[str, int] = {}
        """The last step of each metric that the tracker has."""
        self._settings: Mapping[str, Any] = {}
        self._unread = Unread()
        self._record: dict[str, Any] = {"tracker": tracker}
        self._recorded, self._recorded_s = "", float("-inf")
        self.is_complete = False

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._client.end()

    def follow(self) -> None:
        """Send what there is and what comes, until the run has ended and all is sent, or the tracker is given up."""
        read_s = active_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            try:
                run = runs.read(self._run.directory)
                if run is None:  # it was removed
                    return
                self._run, read_s = run, now_s
                end = _end(run)
                active_s = active_s if end else now_s
                self._send(end)
                self._note(None)
                if self.is_complete:
                    return
            except (TrackerError, RequestError, HostError, OSError) as error:
                self._attempt = None
                self._note(" ".join(str(error).split())[:LONGEST_PROBLEM])
                limit_s = self._limit_s if read_s == now_s else UNREADABLE_LIMIT_S
                if now_s - min(active_s, read_s) > limit_s:
                    return
            time.sleep(REMOTE_POLL_S if self._is_remote else POLL_S)

    @property
    def _is_remote(self) -> bool:
        return self._run.directory.is_remote or not self._target.capabilities.shares_files

    def _send(self, end: tuple[str, float] | None) -> None:
        run = self._run
        if self._attempt != run.attempt:
            self._begin()
        settings = overview.run_settings(run)
        if settings != self._settings:
            self._ask("settings", settings)
            self._settings = settings
        # Before its first step, an attempt has not removed the lines of the steps that it repeats.
        if end or any(beat and beat["state"] not in ("starting", "joined") for beat in run.current()):
            self._send_metrics()
        if end:
            outcome, time_s = end
            self._send_files(outcome)
            result = run.current_result() or {}
            step = int(finite(result.get("steps")) or max(self._steps.values(), default=0))
            final = {f"final/{name}": value for name, value in overview.values(run, {}).items()}
            self._ask("end", {"outcome": outcome, "time_s": time_s, "step": step, "final": final})
            self._record |= {"complete": True, "step": step}
            self.is_complete = True

    def _begin(self) -> None:
        """Start the client if it does not run, and find or create the tracker's run."""
        run, described = self._run, self._run.described
        if self._client is not None and not self._client.is_running:
            self._client.end()
            self._client = None
        if self._client is None:
            environments.ensure(self._tracker, lambda text: print(text, flush=True))
            self._client = _Client(self._tracker, self._folder)
        tags = {
            "job": run.what,
            "framework": described.get("stack"),
            "platform": described.get("platform"),
            "target": described.get("target"),
            "hosts": run.machines,
            "directory": run.directory.url,
            "git_commit": (described.get("code") or {}).get("git_commit"),
        }
        content = {
            "run_id": run.run_id,
            "name": described.get("name") or run.run_id,
            "job": run.what,
            "created_s": runs.parse_time(described["created"]),
            "tags": {name: str(value) for name, value in tags.items() if value is not None},
        }
        with FileLock(_cache_path(f"{self._tracker}.lock")):  # two that create a database at once spoil it
            answer = self._ask("begin", content)
        self._attempt, self._offset, self._settings = run.attempt, 0, {}
        self._steps = answer["steps"]
        self._record |= {"address": answer["address"], "id": answer["id"], "attempt": run.attempt}
        self._record |= {"step": max(self._steps.values(), default=None), "complete": False}

    def _send_metrics(self) -> None:
        lines, self._offset = self._run.directory.read_new_metrics(self._offset, self._unread)
        counting, _ = without_retaken(lines, len(self._run.described["attempts"]))
        new = [line for line in map(self._new_values, counting) if line is not None]
        for problem in self._unread.unannounced():
            print(printable(f"{self._tracker}: {problem}"), flush=True)
        if new:
            self._ask("metrics", new)
            self._record["step"] = new[-1][0]

    def _new_values(self, line: Mapping[str, Any]) -> tuple[int, float, dict[str, float]] | None:
        """Return step, time and those numbers of a line of metrics that the tracker does not have."""
        if "step" not in line:
            self._unread.add(
                f"{run_directory.METRICS}: a line has no step, and is not sent",
                more=" (the first of {count})",
            )
            return None
        step = int(line["step"])
        values = {
            name: value
            for name, value in line.items()
            if name not in ("step", "time")
            and value is not None
            and step > self._steps.get(name, -1)  # an attempt repeats some steps
        }
        self._steps |= dict.fromkeys(values, step)
        time_s = line.get("time") or runs.parse_time(self._run.described["created"])
        return (step, time_s, values) if values else None

    def _send_files(self, outcome: str) -> None:
        directory = self._run.directory
        with tempfile.TemporaryDirectory(prefix="track-") as folder:
            paths = {}
            for name in FILES:
                try:
                    text = directory.read_text(name)
                except OSError as error:  # of this file; a place that is away raises a HostError
                    print(f"{self._tracker}: {name} is not sent: {error}", flush=True)
                    continue
                if text is not None:
                    paths[name] = f"{folder}/{name}"
                    Path(paths[name]).write_text(text, encoding="utf-8")
            if outcome == "done" and directory.list(EXPORT):
                paths[EXPORT] = directory.path(EXPORT)
                if self._is_remote:
                    from console.models.hub_export import fetch  # no launch needs it

                    paths[EXPORT] = f"{folder}/{EXPORT}"
                    fetch(self._target, self._run, Path(paths[EXPORT]))
            self._ask("files", paths)

    def _ask(self, verb: str, content: object) -> Any:
        assert self._client is not None
        return self._client.ask(verb, content)

    def _note(self, problem: str | None) -> None:
        """Write into the run directory how much the tracker has: when that changes, and else every RECORD_PERIOD_S."""
        if problem and problem != self._record.get("problem"):
            print(f"{self._tracker}: {problem}; it is tried again", flush=True)
        self._record["problem"] = problem
        state = json.dumps([self._record.get(name) for name in ("address", "attempt", "complete", "problem")])
        if state == self._recorded and (problem or time.monotonic() - self._recorded_s < RECORD_PERIOD_S):
            return
        with contextlib.suppress(OSError, HostError):
            name = run_directory.tracker(self._tracker)
            self._run.directory.write_json(name, {**self._record, "time": time.time()})
            self._recorded, self._recorded_s = state, time.monotonic()


def _end(run: Run) -> tuple[str, float] | None:
    """Return how and when the latest attempt ended, once all its files are there; None while it continues."""
    result, now_s = run.current_result(), time.time()
    if result is not None:
        time_s = finite(result.get("time")) or now_s - SETTLE_S
        return (str(result.get("outcome")), time_s) if now_s - time_s >= SETTLE_S else None
    beats_s = [beat["time"] for beat in run.current() if beat]
    last_s = max([*beats_s, run.started_s])
    # Twice the limit after which a host counts as lost: by then whoever follows the run has written a result.
    return ("lost", last_s) if now_s - last_s > 2 * SILENCE_LIMIT_S else None


class _Client:
    """The process with the tracker's library. Its messages are returned without secrets."""

    def __init__(self, tracker: str, folder: Path) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [str(environments.environment_python(tracker)), "-P", str(CLIENT), tracker, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask(self, verb: str, content: object) -> Any:
        """Send a request and return the answer.

        Raises:
            TrackerError: there is none within ANSWER_LIMIT_S, or it is an error.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = threading.Timer(ANSWER_LIMIT_S, self._kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps({"verb": verb, "content": content}) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline() or "{}")
        except (OSError, ValueError):
            answer = {}
        finally:
            timer.cancel()
        if "ok" in answer:
            return answer["ok"]
        raise TrackerError(without_secrets(answer.get("error") or self._last_line(verb), os.environ))

    def end(self) -> None:
        """End the process; one that has nothing left to do ends by itself."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_LIMIT_S)
        self._kill()
        self._process.stdout.close()
        self._errors.close()

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _last_line(self, verb: str) -> str:
        self._kill()  # it has closed its output
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next(
            (line for line in reversed(lines) if line.strip()),
            f"its library did not answer to {verb} within {spoken(ANSWER_LIMIT_S)}, or ended without a message",
        )


def without_secrets(text: str, environ: Mapping[str, str]) -> str:
    """Return a text of a tracker's library without passwords of addresses and without keys of the environment."""
    text = re.sub(r"//[^/@\s]*@", "//", text)
    for name, value in environ.items():
        if SECRETS.search(name) and len(value) >= SHORTEST_SECRET:
            text = text.replace(value, "…")
    return text
