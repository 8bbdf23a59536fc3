"""What the commands do and print: one function a command, each answering its exit code."""

from __future__ import annotations

import shlex
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from jobs.runtime.errors import RequestError
from launch import display, follow, log, outcome, rollout, runs, targets
from launch import jobs as job_index
from launch.agents import HostError
from launch.conclude import conclude
from launch.runs import Run
from launch.targets import Target


def train(
    *,
    job: str | None,
    arguments: str | None,
    resume: str | None,
    hosts: int | None,
    platform: str | None,
    target: str,
    name: str | None,
    detach: bool,
) -> int:
    """Start a run (or go on with one) and, unless `detach`, follow it to its end."""
    from launch import train as launching

    console = _console()
    old = _resumed(resume, job) if resume else None
    if old is None and job is None:
        raise RequestError(f"--job: say what to train; choose one of {', '.join(job_index.names())}")
    described = old.described if old else {}
    chosen = targets.resolve(
        target,
        hosts=hosts
        if hosts is not None
        else (old.processes if old and platform in (None, described["platform"]) else None),
        platform=platform or described.get("platform", "cpu"),
    )
    request = launching.Request(
        job=job or described["job"],
        arguments=tuple(_words(arguments or "")),
        name=name,
        resume=old,
    )
    try:
        run = launching.launch(request, chosen, _say(console))
    except launching.LaunchFailed as failure:
        return _report(console, failure.run, follow.state(chosen.agents, failure.run))
    if detach:
        _say(console)(
            f"it goes on by itself: `fab status`, `fab logs --follow`, `fab stop --run {run.run_id}`"
        )
        return outcome.DONE
    return _follow(console, run, chosen)


def _resumed(resume: str, job: str | None) -> Run:
    run = runs.find(targets.runs_dir(), resume)
    if job is not None and job != run.described["job"]:
        raise RequestError(f"--job {job}: {run.run_id} is a run of {run.described['job']}; leave --job out")
    return run


def _words(arguments: str) -> list[str]:
    try:
        return shlex.split(arguments)
    except ValueError as error:
        raise RequestError(f"--args: {arguments!r} has a quote that is not closed ({error})") from None


def _console() -> Console:
    """A terminal that prints what runs and users say as it is: "[/tmp]" is no markup, ":x:" no emoji."""
    return Console(markup=False, emoji=False)


def _say(console: Console) -> Any:
    return lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)


def _follow(console: Console, run: Run, target: Target) -> int:
    """Follow to the end. Ctrl-C stops a run on this machine gracefully; a second one does not wait for that."""
    shown = display.make(console)
    try:
        state = follow.follow(run, target.agents, shown)
    except KeyboardInterrupt:
        shown.close()
        console.print("stopping, so that the run can be resumed (Ctrl-C again: do not wait for it)")
        rollout.stop(target.agents, run.run_id, run.attempt, grace_s=120)
        state = follow.follow(run, target.agents, display.Plain(console))
    finally:
        shown.close()
    run = runs.read(run.directory) or run
    return _report(console, run if state in ("done", "lost") else conclude(run, state, None), state)


def _report(console: Console, run: Run, state: runs.State) -> int:
    for line in outcome.summary(run, state):
        _say(console)(line)
    return outcome.exit_code(run, state)


def status(wanted: str | None) -> int:
    """A table of the hosts of each run that is active, or of the run asked for."""
    console = _console()
    everything = runs.list_runs(targets.runs_dir())
    if not everything and wanted is None:
        _say(console)("no runs yet; `make train` or `fab train --job flax_mlm` starts one")
        return 0
    chosen = [runs.find(targets.runs_dir(), wanted)] if wanted else everything
    states = follow.states(targets.agents_of_all(chosen), chosen)
    if wanted is None:
        chosen = [run for run in chosen if states[run.run_id] in runs.ACTIVE] or chosen[:1]
    for run in chosen:
        step, loss = runs.progress(run)
        _say(console)(
            f"{run.run_id}  {states[run.run_id]}  step {step}/{run.total_steps or '?'}"
            + (f"  loss {loss:.3f}" if loss is not None else "")
            + f"  attempt {run.attempt}  {runs.age(run)} old"
        )
        console.print(_hosts_table(run))
        if states[run.run_id] not in (*runs.ACTIVE, "done"):
            for line in outcome.summary(run, states[run.run_id])[1:]:
                _say(console)(line)
    return 0


def _hosts_table(run: Run) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("host", "process", "state", "step", "heartbeat", "says"):
        table.add_column(heading)
    entries = {p["process_id"]: p for p in follow.processes(targets.agents_of(run.described), run)}
    for host, beat in zip(run.described["hosts"], run.current(), strict=False):
        entry = entries.get(host["index"], {})
        ago = f"{time.time() - beat['time']:.0f} s ago" if beat else "none"
        table.add_row(
            host["name"],
            f"{entry.get('state', 'gone')} (pid {entry['pid']})" if entry else "gone",
            beat["state"] if beat else "",
            str(beat["step"]) if beat else "",
            ago,
            (beat or {}).get("message") or "",
        )
    return table


def logs(wanted: str, *, host: int | None, keep_on: bool, lines: int) -> int:
    """Print the last lines of the hosts' logs and, with `keep_on`, what comes until the run ends."""
    run = runs.find(targets.runs_dir(), wanted)
    if host is not None and host >= run.processes:
        raise RequestError(f"--host {host}: {run.run_id} has the hosts 0 to {run.processes - 1}")
    agents = targets.agents_of(run.described)
    chosen = [host] if host is not None else list(range(run.processes))

    def show(index: int, line: str) -> None:
        print(line if host is not None else f"[{index}] {line}", flush=True)

    offsets: dict[int, int] = {}
    for index in chosen:
        found, offsets[index] = log.tail(agents[index], run, index, lines=lines)
        for line in found:
            show(index, line)
    if keep_on:
        log.follow_all(agents, run, offsets, show)
    return 0


def list_runs(*, limit: int | None) -> int:
    """A table of runs, the newest first."""
    console = _console()
    everything = runs.list_runs(targets.runs_dir())
    if not everything:
        _say(console)("no runs yet; `make train` or `fab train --job flax_mlm` starts one")
        return 0
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("run", "name", "job", "state", "step", "loss", "age"):
        table.add_column(heading, justify="right" if heading in ("step", "loss", "age") else "left")
    states = follow.states(targets.agents_of_all(everything[:limit]), everything[:limit])
    for run in everything[:limit]:
        step, loss = runs.progress(run)
        table.add_row(
            run.run_id,
            run.described.get("name") or "",
            run.described["job"],
            states[run.run_id],
            f"{step}/{run.total_steps or '?'}",
            f"{loss:.3f}" if loss is not None else "",
            runs.age(run),
        )
    console.print(table)
    if limit is not None and len(everything) > limit:
        _say(console)(f"{len(everything) - limit} older ones: `fab runs --all`")
    return 0


def stop(wanted: str | None, *, grace_s: float) -> int:
    """Stop a run on all its hosts; it saves a checkpoint first."""
    console = _console()
    run = runs.find(targets.runs_dir(), wanted) if wanted else _only_active()
    agents = targets.agents_of(run.described)
    before = follow.state(agents, run)
    if before not in runs.ACTIVE:
        _say(console)(f"{run.run_id} is not running: it is {before}")
        return 0
    _say(console)(f"stopping {run.run_id} (up to {grace_s:.0f} s to save a checkpoint)")
    answers = rollout.stop(agents, run.run_id, run.attempt, grace_s=grace_s)
    for agent, answer in zip(agents, answers, strict=True):
        if isinstance(answer, HostError):
            _say(console)(f"  {answer}")
            continue
        for entry in answer["stopped"]:
            _say(console)(f"  {agent.host}: process {entry['pid']} {entry['how']}")
    deadline = time.monotonic() + runs.FINISHING_LIMIT_S
    while (after := follow.state(agents, runs.read(run.directory) or run)) in runs.ACTIVE:
        if time.monotonic() > deadline:
            break
        time.sleep(follow.POLL_S)
    run = conclude(run, after, None) if after not in runs.ACTIVE else run
    for line in outcome.summary(run, after):
        _say(console)(line)
    return 0 if after in ("stopped", "done") else 1


def _only_active() -> Run:
    everything = runs.list_runs(targets.runs_dir())
    states = follow.states(targets.agents_of_all(everything), everything)
    active = [run for run in everything if states[run.run_id] in runs.ACTIVE]
    if not active:
        raise RequestError("--run: no run is active; `fab runs` lists them all")
    if len(active) > 1:
        raise RequestError(
            f"--run: {len(active)} runs are active, say which: {', '.join(r.run_id for r in active)}"
        )
    return active[0]


def list_jobs(wanted: str | None) -> int:
    """What can be trained; with a job's name, all its options."""
    console = _console()
    for name in [wanted] if wanted else job_index.names():
        job = job_index.find(name)
        _say(console)(f"{job.name}  (stack {job.stack})\n  {job.summary}\n")
        _say(console)(job.help())
    return 0
