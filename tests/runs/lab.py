"""Runs of a job, so small that it trains in seconds: launched as users do, watched, and disturbed."""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from backends.local.local_backend import agents_for, on_this_machine
from contracts.files import DiskFiles
from contracts.run_directory import ACTIVE, RunDirectory, State
from launch import launching, runs
from launch.hosts import Agent, stop_processes
from launch.request.run_request import Request
from launch.runs import Run

CHECKOUT = Path(__file__).resolve().parents[2]
STEPS = 60
CHECKPOINT_EVERY = 5
SLOWLY = ("--checkpoint-every", "1")
"""Of a run that is not done before it has heard of a SIGTERM, which takes JAX a second or two."""
FAST = ("--checkpoint-every", "20")
WAIT_LIMIT_S = 200.0
END_LIMIT_S = 90.0

Losses = dict[int, float]


def losses(run: Run) -> Losses:
    """Step → training loss; every step is there once."""
    pairs = [(line["step"], line["loss"]) for line in run.directory.read_metrics() if "loss" in line]
    assert len(pairs) == len(dict(pairs)), "a step was written twice"
    return dict(pairs)


def evaluations(run: Run) -> list[tuple[int, float, float]]:
    """Step, loss and accuracy of every evaluation, in the order in which they were written."""
    return [
        (line["step"], line["eval_loss"], line["eval_accuracy"])
        for line in run.directory.read_metrics()
        if "eval_loss" in line
    ]


def result(run: Run) -> dict[str, Any]:
    """result.json of the latest attempt."""
    found = run.current_result()
    assert found is not None, f"{run.run_id} has no result"
    return found


def saved_steps(run: Run) -> list[int]:
    """The steps that have a complete checkpoint."""
    return sorted(int(name) for name in run.directory.list("checkpoints") if name.isdigit())


class Ended(NamedTuple):
    """A finished command: its exit code and all that it said."""

    code: int
    said: str


class Command:
    """A `fab` command that runs, its two outputs in one file."""

    def __init__(self, arguments: Sequence[str], folder: Path, environ: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(dir=folder, prefix="said-")
        self._output = Path(path)
        with os.fdopen(handle, "wb") as output:
            # Tests that run in the background of a shell have inherited that SIGINT is ignored; a command must not.
            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            self._process = subprocess.Popen(
                [Path(sys.executable).parent / "fab", *arguments],
                cwd=CHECKOUT,
                env={**os.environ, **environ, "NO_COLOR": "1", "COLUMNS": "200"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            signal.signal(signal.SIGINT, before)

    def said(self) -> str:
        return self._output.read_text()

    def has_said(self, words: str) -> bool:
        assert self._process.poll() is None or words in self.said(), self.said()
        return words in self.said()

    def ended(self) -> Ended:
        return Ended(self._process.wait(timeout=END_LIMIT_S), self.said())

    def interrupt(self) -> None:
        """Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Lab:
    """A directory of runs, the machine's agents, and everything that a test started there."""

    job = "flax_mlm"

    def __init__(self, runs_dir: Path, cache_home: Path, data: Path) -> None:
        self.runs_dir, self.cache_home, self.data = runs_dir, cache_home, data
        self.environ = {"TPU_STACK_RUNS": str(runs_dir), "XDG_CACHE_HOME": str(cache_home)}
        self.said: list[str] = []
        self._commands: list[Command] = []

    @property
    def agent_root(self) -> Path:
        return self.cache_home / "tpu-stack" / "agent"

    def launch(
        self,
        *more: str,
        hosts: int = 2,
        resume: Run | None = None,
        heartbeat_limit_s: float = 300.0,
        max_usd: float | None = None,
    ) -> Run:
        """A run that has just joined, or `resume` gone on with; `more`: options besides the usual ones.

        max_usd: its budget, on a machine that costs 3.92 USD an hour.
        """
        arguments = resume.described["args"] if resume else self.options()
        before = self.read(resume) if resume else None
        request = Request(
            job=self.job,
            arguments=(*arguments, *more),
            name=None,
            resume=before,
            overruled=launching.stop_asked(before) if before else None,
            heartbeat_limit_s=heartbeat_limit_s,
            max_usd=max_usd,
        )
        with mock.patch.dict(os.environ, self.environ):
            target = on_this_machine(hosts=str(hosts), platform="cpu")
            if max_usd is not None:
                dear = {"accelerator_type": "v5litepod-16", "zone": "us-central1-a", "capacity": "spot"}
                target = dataclasses.replace(target, slice=dataclasses.replace(target.slice, **dear))  # type: ignore[arg-type]
            return launching.launch(request, target, self.said.append)

    def resume(self, run: Run, *more: str, hosts: int = 2) -> Run:
        """The run after its resumed attempt has come to its end."""
        return self.finish(self.launch(*more, resume=run, hosts=hosts))

    def finish(self, run: Run, limit_s: float = WAIT_LIMIT_S) -> Run:
        """The run when it has a result, or is lost."""

        def has_ended() -> bool:
            state = self.state(run)
            return state == "lost" or (state not in ACTIVE and self.read(run).current_result() is not None)

        def told() -> str:
            disk = shutil.disk_usage(run.directory.url)
            logs = [self.log(run, host)[-3000:] for host in range(run.processes)]
            return "\n".join([f"{run.run_id} has ended; it is {self.state(run)}, {disk}", *logs])

        self.until(has_ended, told, limit_s, pause_s=0.5)
        return self.read(run)

    def fab(self, *arguments: str) -> Command:
        """`fab …` as in a terminal of its own."""
        command = Command(arguments, self.runs_dir.parent, self.environ)
        self._commands.append(command)
        return command

    def options(self) -> list[str]:
        """The smallest model that still learns; 12 sequences a step can be shared out to 1, 2 or 3 processes.

        In float32, whatever this CPU multiplies: bfloat16 rounds too much to compare one number of processes with
        another.
        """
        sizes = "--layers 1 --width 32 --heads 2 --ff-width 64 --vocab-size 300 --max-positions 32"
        batch = "--sequence-length 16 --batch-size 12 --learning-rate 1e-2 --eval-fraction 0.2"
        periods = f"--log-every 1 --eval-every {CHECKPOINT_EVERY} --checkpoint-every {CHECKPOINT_EVERY}"
        return [
            "--data",
            str(self.data),
            *f"--dtype float32 --steps {STEPS} {sizes} {batch} {periods} --eval-sequences 24".split(),
        ]

    def fab_train(self, *more: str) -> Command:
        return self.fab("train", "--job", self.job, "--args", " ".join([*self.options(), *more]))

    def end_all(self) -> None:
        """Nothing that was started here outlives the test."""
        for command in self._commands:
            command.kill()
        for path in self.runs_dir.glob("*/run.json"):
            run = runs.read(RunDirectory(str(path.parent)))
            if run is not None:
                self._end(run)

    def _end(self, run: Run) -> None:
        if not self._alive(run):
            return
        for attempt in range(run.attempt + 1):
            stop_processes(self._agents(run), run.run_id, attempt, grace_s=0)
        deadline = time.monotonic() + 10
        while self._alive(run) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in self._alive(run):
            os.kill(pid, signal.SIGKILL)

    def _alive(self, run: Run) -> list[int]:
        """What lives of a run: jobs and supervisors of all its attempts."""
        alive = []
        for path in self.agent_root.glob(f"runs/{run.run_id}/*/process.json"):
            record = json.loads(path.read_text())
            for role, since in (("pid", "start_ticks"), ("supervisor_pid", "supervisor_start_ticks")):
                if start_ticks(record[role]) == record[since]:
                    alive.append(record[role])
        return alive

    def copy_of(self, run: Run) -> Run:
        """A run of this lab with everything that `run` has left behind, under a name that no agent knows."""
        described = json.loads(json.dumps(run.described))
        letters = "".join(random.choices(string.ascii_lowercase, k=4))
        described["run_id"] = f"{run.run_id.rpartition('-')[0]}-{letters}"
        directory = RunDirectory(str(self.runs_dir / described["run_id"]))
        shutil.copytree(run.directory.url, directory.url)
        directory.write_json("run.json", described)
        copied = runs.read(directory)
        assert copied is not None
        return copied

    def _agents(self, run: Run) -> tuple[Agent, ...]:
        with mock.patch.dict(os.environ, self.environ):
            return agents_for(run.described)

    def read(self, run: Run) -> Run:
        found = runs.read(run.directory)
        assert found is not None, f"{run.directory.url} holds no run"
        return found

    def state(self, run: Run) -> State:
        with mock.patch.dict(os.environ, self.environ):
            return on_this_machine(hosts=None, platform="cpu").run_state(self.read(run))

    def all_runs(self) -> list[Run]:
        return runs.list_runs(runs.RunsFolder(url=str(self.runs_dir), files=DiskFiles()))

    def joined(self, command: Command) -> Run:
        """The newest run, once `command` says that its processes are in their group."""
        self.until(lambda: command.has_said("all joined"), "a run has joined")
        return self.all_runs()[0]

    def records(self, run: Run) -> list[dict[str, Any]]:
        """The agent's process.json of each process of the latest attempt, in order."""
        folder, run = self.agent_root / "runs" / run.run_id, self.read(run)
        return [
            json.loads((folder / f"{run.attempt}-{index}" / "process.json").read_text())
            for index in range(run.processes)
        ]

    def exits(self, run: Run) -> list[dict[str, Any]]:
        """The agent's exit.json of each process of the latest attempt, once all are there."""
        folder, run = self.agent_root / "runs" / run.run_id, self.read(run)
        paths = [folder / f"{run.attempt}-{index}" / "exit.json" for index in range(run.processes)]
        self.until(lambda: all(path.exists() for path in paths), "every process's end is on record")
        return [json.loads(path.read_text()) for path in paths]

    def was_told_to_stop(self, run: Run) -> bool:
        """Whether the agent has sent its SIGTERM to every process of the latest attempt."""
        folder, run = self.agent_root / "runs" / run.run_id, self.read(run)
        return all((folder / f"{run.attempt}-{i}" / "stop-requested").exists() for i in range(run.processes))

    def log(self, run: Run, host: int = 0) -> str:
        run = self.read(run)
        return run.directory.read_text(f"logs/{run.attempt}/host-{host}.log") or ""

    def until(
        self,
        condition: Callable[[], bool],
        what: str | Callable[[], str],
        limit_s: float = WAIT_LIMIT_S,
        pause_s: float = 0.01,
    ) -> None:
        """Wait until `condition` holds, or say `what` did not come; where asking costs a process, ask more seldom."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() >= deadline:
                raise AssertionError(f"not within {limit_s:g} s: {what if isinstance(what, str) else what()}")
            time.sleep(pause_s)

    def reach(self, run: Run, step: int) -> None:
        """Wait until the metrics say that `step` has been taken."""
        metrics = Path(run.directory.path("metrics.jsonl"))

        def has_reached() -> bool:
            ended = self.read(run).current_result()
            assert ended is None, f"{run.run_id} ended before step {step}: {ended}"
            lines = metrics.read_bytes().splitlines()[-1:] if metrics.exists() else []
            with contextlib.suppress(ValueError):
                return bool(lines) and int(json.loads(lines[0])["step"]) >= step
            return False

        self.until(has_reached, f"step {step} of {run.run_id}")

    def signal(self, run: Run, signum: signal.Signals, *hosts: int, role: str = "pid") -> None:
        """A signal to the processes of `hosts` (all where none is named) or, by role, their supervisors."""
        for index, record in enumerate(self.records(run)):
            if not hosts or index in hosts:
                os.kill(record[role], signum)

    @contextlib.contextmanager
    def frozen(self, run: Run) -> Iterator[None]:
        """The run as good as standing still at its present step, for what must not come too late."""
        self.signal(run, signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(run, signal.SIGCONT)

    def guards(self, run: Run) -> list[int]:
        """The second process of each supervisor, which would end the job in its place."""
        supervisors = {record["supervisor_pid"] for record in self.records(run)}
        folder = os.fsencode(self.agent_root / "runs" / run.run_id)
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().split(b"\0")
                if b"_supervise" in words and any(word.startswith(folder) for word in words):
                    found.append(int(path.parent.name))
        return [pid for pid in found if pid not in supervisors]

    def cut_power(self, run: Run) -> None:
        """SIGKILL to the supervisors, their guards and the jobs: nobody is left to say what happened."""
        for pid in self.guards(run):
            os.kill(pid, signal.SIGKILL)
        self.signal(run, signal.SIGKILL, role="supervisor_pid")
        self.signal(run, signal.SIGKILL)


def start_ticks(pid: int) -> int | None:
    """When a live process began, as the agent records it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
