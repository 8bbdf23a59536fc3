"""What the commands that look after runs do and print: one function a command, each answering its exit code."""

from __future__ import annotations

import sys
import time

from rich.table import Table

from contracts import run_directory
from contracts.errors import RequestError
from launch import follow, log, outcome, rollout, runs
from launch import jobs as job_index
from launch.agents import Agent
from launch.conclude import conclude
from launch.display import say, terminal
from launch.errors import HostError
from launch.printable import printable
from launch.runs import Run
from launch.target import Target

NO_RUNS = "no runs yet; `make train` or `fab train --job flax_mlm` starts one"


def status(target: Target, wanted: str | None) -> int:
    """A table of the hosts of each run that is active, or of the run asked for."""
    console = terminal()
    if wanted:
        chosen = [runs.find(target.runs, wanted)]
        known = follow.look(target.find_agents(chosen[0].described), chosen[0])
    else:
        chosen = runs.list_runs(target.runs)
        known = follow.look_at_all(_agents(target, chosen))
    if not chosen:
        say(console)(NO_RUNS)
        return 0
    states = {run.run_id: follow.state(run, known) for run in chosen}
    if wanted is None:
        chosen = [run for run in chosen if states[run.run_id] in run_directory.ACTIVE] or chosen[:1]
    for run in chosen:
        run = follow.with_agents_beats(run, known)
        step, latest = runs.progress(run)
        figure = runs.figure(run, latest)
        say(console)(
            f"{run.run_id}  {states[run.run_id]}  step {step}/{run.total_steps or '?'}"
            + (f"  {printable(figure)}" if figure else "")
            + f"  attempt {run.attempt}  {runs.age(run)} old"
        )
        console.print(_hosts_table(run, known.of(run)))
        if states[run.run_id] not in (*run_directory.ACTIVE, "done"):
            for line in outcome.summary(run, states[run.run_id])[1:]:
                say(console)(line)
    for error in known.errors:
        say(console)(f"no answer from {error}")
    return 0


def _agents(target: Target, several: list[Run]) -> tuple[Agent, ...]:
    """Every agent that may know of these runs: the target's own and, on one machine, those of runs with other hosts."""
    if not target.is_local:
        return target.agents
    return tuple(agent for run in several for agent in target.find_agents(run.described))


def _hosts_table(run: Run, known: follow.Look) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("host", "process", "state", "step", "heartbeat", "says"):
        table.add_column(heading)
    entries = {p["process_id"]: p for p in known.processes}
    silent = {error.host for error in known.errors}
    for host, beat in zip(run.described["hosts"], run.current(), strict=False):
        entry = entries.get(host["index"], {})
        gone = "no answer" if host["name"] in silent else "gone"
        ago = f"{time.time() - beat['time']:.0f} s ago" if beat else "none"
        table.add_row(
            host["name"],
            f"{entry.get('state', gone)} (pid {entry['pid']})" if entry else gone,
            beat["state"] if beat else "",
            str(beat["step"]) if beat else "",
            ago,
            printable((beat or {}).get("message") or ""),
        )
    return table


def logs(target: Target, wanted: str, *, host: int | None, keep_on: bool, lines: int) -> int:
    """Print the last lines of the hosts' logs and, with `keep_on`, what comes until the run ends."""
    run = runs.find(target.runs, wanted)
    if host is not None and host >= run.processes:
        raise RequestError(f"--host {host}: {run.run_id} has the hosts 0 to {run.processes - 1}")
    chosen = [host] if host is not None else list(range(run.processes))

    def show(index: int, line: str) -> None:
        print(line if host is not None else f"[{index}] {line}", flush=True)

    all_answered = log.show_all(
        target.find_agents(run.described),
        run,
        chosen,
        lines=lines,
        keep_on=keep_on,
        show=show,
        tell=lambda text: print(text, file=sys.stderr, flush=True),
    )
    return 0 if all_answered else 1


def list_runs(target: Target, *, limit: int | None) -> int:
    """A table of runs, the newest first."""
    console = terminal()
    everything = runs.list_runs(target.runs)
    if not everything:
        say(console)(NO_RUNS)
        return 0
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("run", "name", "job", "state", "step", "measured", "age"):
        table.add_column(heading, justify="right" if heading in ("step", "age") else "left")
    known = follow.look_at_all(_agents(target, everything[:limit]))
    for run in everything[:limit]:
        step, latest = runs.progress(run)
        table.add_row(
            run.run_id,
            run.described.get("name") or "",
            run.described["job"],
            follow.state(run, known),
            f"{step}/{run.total_steps or '?'}",
            printable(runs.figure(run, latest)),
            runs.age(run),
        )
    console.print(table)
    for error in known.errors:
        say(console)(f"no answer from {error}")
    if limit is not None and len(everything) > limit:
        say(console)(f"{len(everything) - limit} older ones: `fab runs --all`")
    return 0


def stop(target: Target, wanted: str | None, *, grace_s: float) -> int:
    """Stop a run on all its hosts; it saves a checkpoint first."""
    console = terminal()
    run = runs.find(target.runs, wanted) if wanted else _only_active(target)
    agents = target.find_agents(run.described)
    before = follow.state_now(agents, run)
    if before not in run_directory.ACTIVE:
        say(console)(f"{run.run_id} is not running: it is {before}")
        return 0
    say(console)(f"stopping {run.run_id} (up to {grace_s:.0f} s to save a checkpoint)")
    answers = rollout.stop(agents, run.run_id, run.attempt, grace_s=grace_s)
    for agent, answer in zip(agents, answers, strict=True):
        if isinstance(answer, HostError):
            say(console)(f"  {answer}")
            continue
        for entry in answer["stopped"]:
            note = f"; {printable(entry['note'])}" if entry.get("note") else ""
            say(console)(f"  {agent.host}: process {entry['pid']} {entry['how']}{note}")
    deadline = time.monotonic() + run_directory.FINISHING_LIMIT_S
    while (after := follow.state_now(agents, runs.read(run.directory) or run)) in run_directory.ACTIVE:
        if time.monotonic() > deadline:
            break
        time.sleep(follow.POLL_S)
    run = conclude(run, after, None) if after not in run_directory.ACTIVE else run
    for line in outcome.summary(run, after):
        say(console)(line)
    return 0 if after in ("stopped", "done") else 1


def _only_active(target: Target) -> Run:
    everything = runs.list_runs(target.runs)
    known = follow.look_at_all(_agents(target, everything))
    active = [run for run in everything if follow.state(run, known) in run_directory.ACTIVE]
    if not active:
        raise RequestError("--run: no run is active; `fab runs` lists them all")
    if len(active) > 1:
        raise RequestError(
            f"--run: {len(active)} runs are active, say which: {', '.join(r.run_id for r in active)}"
        )
    return active[0]


def list_jobs(wanted: str | None) -> int:
    """What can be trained; with a job's name, all its options."""
    console = terminal()
    for name in [wanted] if wanted else job_index.names():
        job = job_index.find(name)
        say(console)(f"{job.name}  (stack {job.stack})\n  {job.summary}\n")
        say(console)(job.help())
    return 0
