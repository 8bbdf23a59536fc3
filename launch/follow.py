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
    noted: set[int] = set()
    while True:
        fresh = runs.read(run.directory)
        run = fresh or run
        _show(run, display, noted)
        looks_ended = run.current_result() is not None or any(
            beat is not None and beat["state"] in ("failed", "done", "stopped", "preempted")
            for beat in run.current()
        )
        if looks_ended or time.monotonic() - asked_s > AGENTS_PERIOD_S:
            asked_s, known = time.monotonic(), processes(agents, run)
        now = runs.state(run, known, now_s=time.time())
        if now == "failed" and any(p["state"] == "running" for p in known):
            rollout.stop(agents, run.run_id, run.attempt, grace_s=rollout.STOP_NOW_S)
        elif now == "failed" and run.current_result() is None and _recently_ended(known):
            pass  # the agent is finding out which host failed first
        elif now not in runs.ACTIVE:
            return now
        time.sleep(POLL_S)


def _recently_ended(known: Sequence[dict[str, Any]]) -> bool:
    ended = [p["ended"] for p in known if p.get("ended")]
    return bool(ended) and time.time() - max(ended) < runs.FINISHING_LIMIT_S


def _show(run: Run, display: Display, noted: set[int]) -> None:
    lines = run.directory.read_metrics()
    for line in lines:
        if "eval_loss" in line and line["step"] not in noted:
            noted.add(line["step"])
            loss, accuracy = line["eval_loss"], line["eval_accuracy"]
            display.note(
                f"step {line['step']}: eval loss "
                + (f"{loss:.3f}, accuracy {accuracy:.1%}" if loss is not None else "is not a finite number")
            )
    beats = [beat for beat in run.current() if beat]
    if not beats or any(beat["state"] in ("starting", "joined") for beat in beats):
        messages = [beat["message"] for beat in beats if beat.get("message")]
        display.waiting(messages[0] if messages else "starting")
        return
    trained = [line for line in lines if "loss" in line]
    last = trained[-1] if trained else {}
    step = max([*(beat["step"] for beat in beats), last.get("step", 0)])
    total, step_s = run.total_steps, last.get("step_s")
    display.progress(
        Progress(
            step=step,
            total=total,
            loss=last.get("loss"),
            tokens_per_s=last.get("tokens_per_s"),
            left_s=(total - step) * step_s if total and step_s else None,
        )
    )
