"""How a run ended, in words for a terminal, and as the launcher's exit code."""

from __future__ import annotations

from jobs.runtime import run_directory
from launch.display import duration
from launch.runs import Run, State

DONE, FAILED, WRONG_REQUEST, INTERRUPTED = 0, 1, 2, 130


def exit_code(run: Run, state: State) -> int:
    """0 done; 1 failed; 2 the request was wrong; 130 somebody or something stopped it."""
    if state == "done":
        return DONE
    if state in ("stopped", "preempted"):
        return INTERRUPTED
    result = run.current_result()
    return WRONG_REQUEST if result is not None and result.get("request") else FAILED


def summary(run: Run, state: State) -> list[str]:
    """The last lines a person sees of a run."""
    if state == "done":
        return _done(run)
    resume = f"resume with `fab train --resume {run.run_id}`"
    saved = run.directory.checkpoint_steps()
    resume += f" (from step {saved[-1]})" if saved else " (no checkpoint yet: from the start)"
    if state in ("stopped", "preempted"):
        return [f"{run.run_id} was {state}; {resume}"]
    result = run.current_result() or {}
    if result.get("request"):
        return [f"{run.run_id}: {result.get('error')}"]
    lines = [f"{run.run_id} {'failed' if state == 'failed' else 'is ' + state}"]
    if state == "lost":
        lines[0] += ": its processes are gone and left no result (was the machine restarted?)"
    if result.get("error"):
        lines += ["  " + line for line in str(result["error"]).splitlines()]
    host = result.get("failed_host")
    if host is not None:
        lines.append(f"  log: {run.directory.path(run_directory.log(run.attempt, host))}")
    return [*lines, f"  {resume}"]


def _done(run: Run) -> list[str]:
    result = run.current_result() or {}
    lines = [f"{run.run_id} is done"]
    loss, baseline = result.get("eval_loss"), result.get("unigram_entropy")
    if loss is not None and baseline is not None:
        side = "below" if loss < baseline else "above"
        lines.append(
            f"  eval loss    {loss:.3f} nats, {abs(baseline - loss):.3f} {side} the unigram baseline of {baseline:.3f}"
        )
    if result.get("eval_accuracy") is not None:
        lines.append(f"  accuracy     {result['eval_accuracy']:.1%} of the masked tokens")
    if result.get("tokens_per_s"):
        lines.append(f"  speed        {result['tokens_per_s']:,.0f} tokens/s")
    lines.append(f"  wall time    {duration(result.get('wall_s') or 0)} for {result.get('steps')} steps")
    lines += _time_split(result.get("time_s"))
    saved = run.directory.checkpoint_steps()
    if saved:
        lines.append(f"  checkpoint   {run.directory.path(f'{run_directory.CHECKPOINTS}/{saved[-1]}')}")
    if run.directory.list(run_directory.EXPORT):
        lines.append(f"  export       {run.directory.path(run_directory.EXPORT)}")
    lines.append(f"  report       {run.directory.path(run_directory.REPORT)}")
    return lines


def _time_split(said: object) -> list[str]:
    """The shares of the parts that took 1 % of the time or more, the largest first."""
    parts = (
        {name: s for name, s in said.items() if isinstance(s, int | float) and s > 0}
        if isinstance(said, dict)
        else {}
    )
    total_s = sum(parts.values())
    largest = sorted(parts.items(), key=lambda part: -part[1])
    shares = [f"{name.replace('_', ' ')} {s / total_s:.0%}" for name, s in largest if s > 0.01 * total_s]
    return [f"  of that      {', '.join(shares)}"] if shares else []
