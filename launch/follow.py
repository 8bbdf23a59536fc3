"""Watching a run until it ends: what its directory says, and now and then what its agents say."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from launch import rollout, runs
from launch.agents import Agent, HostError, ask_all
from launch.display import Display, Progress
from launch.runs import Run, State

POLL_S = 0.5
AGENTS_PERIOD_S = 5.0


def processes(agents: Sequence[Agent], run: Run) -> list[dict[str, Any]]:
    """What the agents say of the processes of the latest attempt; hosts that do not answer are left out."""
    return _of(run, _ask(agents, {"run_id": run.run_id, "attempt": run.attempt}))


def state(agents: Sequence[Agent], run: Run) -> State:
    """What the run is doing now."""
    return runs.state(run, processes(agents, run), now_s=time.time())


def states(agents: Sequence[Agent], several: Sequence[Run]) -> dict[str, State]:
    """What each of several runs on the same hosts is doing, by run id; the hosts are asked once for all of them."""
    known = _ask(agents, {"run_id": None, "attempt": None})
    return {run.run_id: runs.state(run, _of(run, known), now_s=time.time()) for run in several}


def _ask(agents: Sequence[Agent], request: dict[str, Any]) -> list[dict[str, Any]]:
    # Hosts that are this machine share one agent directory; it is asked once.
    asked = list({(agent.root, agent.transport): agent for agent in agents}.values())
    answers = ask_all(asked, "status", [{**request, "process_id": None}] * len(asked))
    return [entry for answer in answers if not isinstance(answer, HostError) for entry in answer["processes"]]


def _of(run: Run, known: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in known if (entry["run_id"], entry["attempt"]) == (run.run_id, run.attempt)]


def follow(run: Run, agents: Sequence[Agent], display: Display) -> State:
    """Show the run's progress until it has ended on all hosts; what it came to.

    A host that failed takes the others down: they are stopped if they do not end by themselves.
    """
    asked_s, known = float("-inf"), processes(agents, run)
    watch = _Watch(display)
    failed_s: float | None = None
    while True:
        run = runs.read(run.directory) or run
        watch.show(run)
        looks_ended = run.current_result() is not None or any(
            beat is not None and beat["state"] in ("failed", "done", "stopped", "preempted")
            for beat in run.current()
        )
        if looks_ended or time.monotonic() - asked_s > AGENTS_PERIOD_S:
            asked_s, known = time.monotonic(), processes(agents, run)
        now = runs.state(run, known, now_s=time.time())
        if now == "failed" and any(p["state"] == "running" for p in known):
            failed_s = failed_s or time.monotonic()
            if time.monotonic() - failed_s > rollout.AGENTS_LIMIT_S:
                rollout.stop(agents, run.run_id, run.attempt, grace_s=rollout.STOP_NOW_S)
        elif now == "failed" and run.current_result() is None and _recently_ended(known):
            pass  # the agent is finding out which host failed first
        elif now not in runs.ACTIVE:
            return now
        time.sleep(POLL_S)


def _recently_ended(known: Sequence[dict[str, Any]]) -> bool:
    ended = [p["ended"] for p in known if p.get("ended")]
    return bool(ended) and time.time() - max(ended) < runs.FINISHING_LIMIT_S


class _Watch:
    """What has been shown of a run's metrics so far; each look reads only what is new."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._offset = -runs.METRICS_TAIL_BYTES
        self._last: dict[str, Any] = {}

    def show(self, run: Run) -> None:
        began_s = runs.parse_time(run.described["attempts"][-1]["started"])
        lines, self._offset = run.directory.read_new_metrics(self._offset)
        for line in lines:
            if line.get("time", 0) < began_s:
                continue  # an earlier attempt's
            if "eval_loss" in line:
                self._display.note(_evaluation(line))
            elif "loss" in line:
                self._last = line
        beats = [beat for beat in run.current() if beat]
        if not beats or any(beat["state"] in ("starting", "joined") for beat in beats):
            messages = [beat["message"] for beat in beats if beat.get("message")]
            self._display.waiting(messages[0] if messages else "starting")
            return
        step = max([*(beat["step"] for beat in beats), self._last.get("step", 0)])
        total, step_s = run.total_steps, self._last.get("step_s")
        self._display.progress(
            Progress(
                step=step,
                total=total,
                loss=self._last.get("loss"),
                tokens_per_s=self._last.get("tokens_per_s"),
                left_s=(total - step) * step_s if total and step_s else None,
            )
        )


def _evaluation(line: dict[str, Any]) -> str:
    loss, accuracy = line["eval_loss"], line["eval_accuracy"]
    figures = f"{loss:.3f}, accuracy {accuracy:.1%}" if loss is not None else "is not a finite number"
    return f"step {line['step']}: eval loss {figures}"
