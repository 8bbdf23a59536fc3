"""Watching a run until it ends: what its directory says, and now and then what its agents say."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from contracts import run_directory
from contracts.run_directory import State
from jobs.runtime.metric_definitions import Metrics, finite
from launch import rollout, runs
from launch.display import Display, Progress, printable
from launch.hosts import Agent, HostError, ask_all
from launch.runs import Run

POLL_S = 0.5
BUCKET_POLL_S = 5.0
"""Each look at a run in a bucket is billed, and its heartbeats are written every 10 s only."""
AGENTS_PERIOD_S = 5.0
UNANSWERED_LIMIT_S = 10.0
PACE_LOOKS = 60
"""Half a minute of looks at a quick run."""
ENDING_LIMIT_S = 45.0
"""How long the hosts of a run in which a process failed have to end the others and to say what happened; they need
two seconds, and half a minute where one of them does not answer. After that the launcher stops what is left."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """What the agents say of processes, and the hosts that said nothing."""

    processes: tuple[dict[str, Any], ...]
    errors: tuple[HostError, ...]

    def of(self, run: Run) -> Look:
        """What is about the latest attempt of one run."""
        return dataclasses.replace(
            self,
            processes=tuple(
                entry
                for entry in self.processes
                if (entry["run_id"], entry["attempt"]) == (run.run_id, run.attempt)
            ),
        )


def look(agents: Sequence[Agent], run: Run) -> Look:
    """What the agents say of the processes of the latest attempt."""
    return _ask(agents, {"run_id": run.run_id, "attempt": run.attempt}).of(run)


def look_at_all(agents: Sequence[Agent]) -> Look:
    """What the agents say of every process of every run that they know; the hosts are asked once."""
    return _ask(agents, {"run_id": None, "attempt": None})


def state(run: Run, known: Look) -> State:
    """What the run is doing now."""
    return runs.state(run, known.of(run).processes, unanswered=len(known.errors), now_s=time.time())


def state_now(agents: Sequence[Agent], run: Run) -> State:
    """The same, after asking the agents."""
    return state(run, look(agents, run))


def _ask(agents: Sequence[Agent], request: dict[str, Any]) -> Look:
    # Hosts that are this machine share one agent directory; it is asked once.
    asked = list({(agent.root, agent.link): agent for agent in agents}.values())
    answers = ask_all(
        asked, "status", [{**request, "process_id": None}] * len(asked), timeout_s=UNANSWERED_LIMIT_S
    )
    return Look(
        processes=tuple(
            entry for answer in answers if not isinstance(answer, HostError) for entry in answer["processes"]
        ),
        errors=tuple(answer for answer in answers if isinstance(answer, HostError)),
    )


def follow(run: Run, agents: Sequence[Agent], display: Display) -> State:
    """Show the run's progress until it has ended on all hosts; what it came to.

    A host that failed takes the others down: they are stopped if they do not end by themselves.
    """
    asked_s, known = float("-inf"), look(agents, run)
    watch = _Watch(display)
    failed_s: float | None = None
    unheard: set[str] = set()
    unread = ""
    while True:
        fresh, unread = _read(run, display, unread)
        run = with_agents_beats(fresh, known)
        with contextlib.suppress(HostError):
            watch.show(run)
        looks_ended = run.current_result() is not None or any(
            beat is not None and beat["state"] in ("failed", "done", "stopped", "preempted")
            for beat in run.current()
        )
        if looks_ended or time.monotonic() - asked_s > AGENTS_PERIOD_S:
            asked_s, known = time.monotonic(), look(agents, run)
            unheard = _tell_unheard(display, known, unheard)
        now = state(run, known)
        if now == "failed" and any(p["state"] == "running" or p.get("supervised") for p in known.processes):
            # The hosts end it among themselves, and of a run that hung they save the stacks first.
            failed_s = failed_s or time.monotonic()
            if time.monotonic() - failed_s > ENDING_LIMIT_S:
                rollout.stop(agents, run.run_id, run.attempt, grace_s=rollout.STOP_NOW_S)
        elif now == "failed" and run.current_result() is None and _recently_ended(known):
            pass  # the agent is finding out which host failed first
        elif now not in run_directory.ACTIVE:
            return now
        time.sleep(BUCKET_POLL_S if run.directory.is_remote and not looks_ended else POLL_S)


def _read(run: Run, display: Display, before: str) -> tuple[Run, str]:
    """The run as it is now, or as it was where its directory cannot be read just now, and why it cannot.

    Of a bucket this is said, once; hosts that do not answer are told of elsewhere.
    """
    try:
        fresh = runs.read(run.directory) or run
    except HostError as error:
        if run.directory.is_remote and not before:
            display.note(f"{error}; it is asked again")
        return run, str(error)
    if run.directory.is_remote and before:
        display.note(f"{run.directory.url} answers again")
    return fresh, ""


def with_agents_beats(run: Run, known: Look) -> Run:
    """The run with the hosts' own copies of the heartbeats, where those are newer than what its directory has."""
    beats = list(run.heartbeats)
    for entry in known.of(run).processes:
        beat, rank = entry.get("beat"), entry["process_id"]
        if beat and rank < len(beats) and beat["time"] > ((beats[rank] or {}).get("time") or 0):
            beats[rank] = beat
    return dataclasses.replace(run, heartbeats=tuple(beats))


def _tell_unheard(display: Display, known: Look, before: set[str]) -> set[str]:
    """Say once of each host that it does not answer, and once that it does again."""
    for error in known.errors:
        if error.host not in before:
            display.note(f"{error}; it is asked again")
    now = {error.host for error in known.errors}
    for host in sorted(before - now):
        display.note(f"{host} answers again")
    return now


def _recently_ended(known: Look) -> bool:
    ended = [p["ended"] for p in known.processes if p.get("ended")]
    return bool(ended) and time.time() - max(ended) < run_directory.FINISHING_LIMIT_S


class _Watch:
    """What has been shown of a run's metrics so far; each look reads only what is new."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._offset = -runs.METRICS_TAIL_BYTES
        self._last: dict[str, Any] = {}
        self._warned: set[str] = set()
        self._pace = Pace()

    def show(self, run: Run) -> None:
        began_s = runs.parse_time(run.described["attempts"][-1]["started"])
        lines, self._offset = run.directory.read_new_metrics(self._offset)
        for line in lines:
            if line.get("time", 0) < began_s:
                continue  # an earlier attempt's
            evaluation = _evaluation(run.metrics, line)
            if evaluation:
                self._display.note(printable(evaluation))
            self._last |= line
        for warning in warnings(run):
            if warning not in self._warned:
                self._warned.add(warning)
                self._display.note(f"warning: {printable(warning)}")
        beats = [beat for beat in run.current() if beat]
        if not beats or any(beat["state"] in ("starting", "joined") for beat in beats):
            messages = [beat["message"] for beat in beats if beat.get("message")]
            self._display.waiting(printable(messages[0]) if messages else "starting")
            return
        step = max([*(beat["step"] for beat in beats), self._last.get("step", 0)])
        total, step_s = run.total_steps, self._last.get("step_s") or self._pace.step_s(step, time.monotonic())
        known = ((run.metrics.get(name), finite(self._last.get(name))) for name in run.metrics.progress)
        self._display.progress(
            Progress(
                step=step,
                total=total,
                figures=tuple(printable(metric.named(value)) for metric, value in known if value is not None),
                left_s=(total - step) * step_s if total and step_s else None,
            )
        )


class Pace:
    """How long a step of a run takes, by the steps that were seen: of a job that does not measure it itself."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, int]] = collections.deque(maxlen=PACE_LOOKS)

    def step_s(self, step: int, now_s: float) -> float | None:
        """Note that `step` is the latest at `now_s`; None as long as too little has been seen."""
        if not self._seen or step != self._seen[-1][1]:
            self._seen.append((now_s, step))
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return (last_s - first_s) / (last - first) if last > first and last_s > first_s else None


def warnings(run: Run) -> list[str]:
    """What its processes have warned of in the latest attempt."""
    found = [text for beat in run.current() if beat for text in beat.get("warnings") or ()]
    return [text for text in dict.fromkeys(found) if isinstance(text, str)]


def _evaluation(metrics: Metrics, line: dict[str, Any]) -> str | None:
    """The evaluation that a line of metrics tells of, in words."""
    told = [metric for metric in metrics.metrics if metric.is_evaluation and metric.name in line]
    figures = [
        f"{metric.title} is not a finite number" if value is None else metric.named(value)
        for metric, value in ((metric, finite(line[metric.name])) for metric in told)
    ]
    return f"step {line['step']}: {', '.join(figures)}" if figures else None
