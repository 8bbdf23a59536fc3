"""`fab stacks` and `fab profile`: where the processes of a run are now, and a trace of its next steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import platform
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from console.hosts.execute import ranges
from contracts import run_directory
from contracts.aliases import Say
from contracts.durations import spoken
from contracts.errors import RequestError
from contracts.files import is_url
from contracts.host_interface import MOST_TRACED_STEPS
from launch import runs
from launch.code import bundles
from launch.code.bundles import Bundle
from launch.hosts import HostError, HostsError, all_or_error
from launch.output import printable, say, terminal
from launch.runs import Run
from launch.targets import Target

STACKS_LIMIT_S = 120.0
ANSWER_LIMIT_S = 15.0
PACE_S = 1.0
"""Over which the pace of the steps is measured."""
LEAD_S = 4.0
"""For all hosts to have heard which steps to trace before the first of them."""
POLL_S = 1.0
TAKING_STEPS = ("stepping", "saving")
SIGNAL_LIMIT_S = 10.0
HOSTS_PLATFORM = ("Linux", "x86_64")
"""What the program runs on that this machine has, and hosts are."""
THREAD = re.compile(r"^(?:Current )?[Tt]hread .*$", re.MULTILINE)
ADDRESS = re.compile(r"0x[0-9a-f]+")
MAIN = "MainThread"


def stacks(target: Target, name: str) -> int:
    """Print the stack traces of all ranks of a run, equal ones once, and save them; return the exit code.

    Raises:
        RequestError: there is no such run, or it is not active.
    """
    run = active_run(target, name)
    program, reason = _py_spy()
    problems = [] if reason is None else [reason]
    if program is not None:
        request = {"sha256": program.sha256, "archive_base64": None}
        present = target.backend.ask(run, "stage", request, timeout_s=STACKS_LIMIT_S)
        if any(isinstance(answer, dict) and not answer["present"] for answer in present):
            target.backend.ask(
                run, "stage", {**request, "archive_base64": program.text}, timeout_s=STACKS_LIMIT_S
            )
    answers = target.backend.ask(
        run,
        "stacks",
        {
            "py_spy": None if program is None else program.sha256,
            "own_command": run.is_own_command,
            "timeout_s": SIGNAL_LIMIT_S,
        },
        timeout_s=STACKS_LIMIT_S,
    )
    taken, all_traces = time.strftime("%Y%m%d-%H%M%S", time.gmtime()), list[Trace]()
    for index, answer in enumerate(answers):
        if isinstance(answer, HostError):
            problems.append(str(answer))
            continue
        problems += [f"{run.described['hosts'][index]['name']}: {answer['note']}"] if answer["note"] else []
        text = "\n".join(_titled(index, process) for process in answer["processes"])
        run.directory.write_text(run_directory.live_stacks(taken, index), text)
        all_traces += [trace for process in answer["processes"] for trace in traces(index, process)]
    for title, frames in grouped(all_traces):
        print(f"{printable(title)}\n{printable(frames)}\n")
    for problem in dict.fromkeys(problems):
        print(printable(problem), file=sys.stderr)
    if not all_traces:
        return 1
    say(terminal())(f"saved in {run.directory.path(f'{run_directory.STACKS}/{taken}')}")
    return 0 if all(isinstance(answer, dict) for answer in answers) else 1


def active_run(target: Target, name: str) -> Run:
    """Return the run that `name` means. Raises RequestError: there is none, or it is not active."""
    run = runs.find(target.runs, name)
    state = target.run_state(run)
    if state not in run_directory.ACTIVE:
        raise RequestError(
            f"{run.run_id} {run_directory.ENDED.get(state, state)}: it has no processes; `fab logs {run.run_id}` "
            "shows what they printed"
        )
    return run


def _py_spy() -> tuple[Bundle | None, str | None]:
    """Return py-spy as hosts are sent it, or why there is none; they write the stacks of jobs themselves then."""
    fallback = "of jobs, stacks are taken without it: Python's frames alone"
    if (this_platform := (platform.system(), platform.machine())) != HOSTS_PLATFORM:
        return (
            None,
            f"py-spy: that of this machine ({' '.join(this_platform)}) does not run on hosts; {fallback}",
        )
    path = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if path is None:
        return None, f"py-spy: is not in this environment, `make install` brings it; {fallback}"
    return bundles.archive({"py-spy": Path(path).read_bytes()}, {"py-spy"}), None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """The stack of one thread. place: the rank, or where that is not known the host. frames: as they are printed."""

    place: tuple[str, int]
    thread: str
    frames: str


def _titled(index: int, process: Mapping[str, Any]) -> str:
    place, number = _place(index, process)
    return f"{place} {number}, pid {process['pid']}: {process['command']}\n{process['text']}"


def _place(index: int, process: Mapping[str, Any]) -> tuple[str, int]:
    return ("host", index) if process["rank"] is None else ("rank", process["rank"])


def traces(index: int, process: Mapping[str, Any]) -> Iterator[Trace]:
    """Return the stacks of the threads of one process. index: of its host."""
    starts = [match.start() for match in THREAD.finditer(process["text"])]
    for start, end in zip(starts, [*starts[1:], len(process["text"])], strict=True):
        head, _, frames = process["text"][start:end].partition("\n")
        named = re.search(r'"(.*)"$', head)
        thread = named[1] if named else "a thread"
        yield Trace(place=_place(index, process), thread=thread, frames=ADDRESS.sub("0x…", frames.rstrip()))


def grouped(traces: Sequence[Trace]) -> Iterator[tuple[str, str]]:
    """Return each stack once, main threads first, with a title: the thread's name and whose it is."""
    groups: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for trace in traces:
        groups.setdefault((trace.thread, trace.frames), []).append(trace.place)
    for (thread, frames), places in sorted(
        groups.items(), key=lambda item: (item[0][0] != MAIN, -len(item[1]))
    ):
        texts = []
        for kind in ("rank", "host"):
            numbers = [number for place, number in places if place == kind]
            distinct = sorted({*numbers})
            times = f" ({len(numbers)} times)" if len(numbers) > len(distinct) else ""
            texts += [f"{kind}{'s' * (len(distinct) > 1)} {ranges(distinct)}{times}"] if distinct else []
        yield f"{', '.join(texts)}: {thread}", frames


def profile(target: Target, name: str, steps: int, *, limit_s: float) -> int:
    """Have all ranks of a run trace their next steps, wait until the traces are written, and return the exit code.

    Raises:
        RequestError: there is no such run, or it takes no steps that could be traced.
        HostsError: a host does not answer.
    """
    if steps > MOST_TRACED_STEPS:
        raise RequestError(f"--steps {steps}: a trace holds at most {MOST_TRACED_STEPS} steps")
    run = active_run(target, name)
    if run.is_own_command:
        raise RequestError(
            f"{run.run_id}: its steps are known to its own program alone, which can trace itself (docs/scripts.md); "
            f"`fab stacks {run.run_id}` shows where it is now"
        )
    ask = functools.partial(_ask_profile, target, run, secrets.token_hex(8))
    before, before_s = _steps(run, ask()), time.monotonic()
    time.sleep(PACE_S)
    now = _steps(run, ask())
    pace = max(0.0, (max(now) - max(before)) / (time.monotonic() - before_s))
    first = max(now) + math.ceil(pace * LEAD_S) + 2
    if run.total_steps is not None and first > run.total_steps:
        raise RequestError(f"{run.run_id}: is at step {max(now)} of {run.total_steps}, too close to its end")
    ask(steps=steps, first=first)
    tell = say(terminal())
    tell(f"steps {first} to {first + steps - 1} will be traced; the run is at step {max(now)}")
    try:
        answers = _await_traces(run, ask, limit_s)
    except BaseException:
        with contextlib.suppress(HostsError):
            ask(steps=0)
        raise
    return _tell_traces(target, run, answers, tell)


def _ask_profile(target: Target, run: Run, request_id: str, **request: int) -> list[dict[str, Any]]:
    answers = target.backend.ask(run, "profile", {"id": request_id, **request}, timeout_s=ANSWER_LIMIT_S)
    return all_or_error(f"{run.run_id}: not every host answers:", answers)


def _steps(run: Run, hosts: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the step of each host. Raises RequestError: one takes none now."""
    for index, host in enumerate(hosts):
        beat = host["beat"] or {"state": "starting"}
        if host["state"] != "running" or beat["state"] not in TAKING_STEPS:
            activity = f" ({beat['message']})" if beat.get("message") else ""
            state = beat["state"] if host["state"] == "running" else host["state"]
            raise RequestError(
                f"{run.run_id}: host {index} takes no steps now, it is {state}{activity}; try again when `fab status` "
                "shows that it is stepping, and for what comes before see `fab stacks`"
            )
    return [int(host["beat"]["step"]) for host in hosts]


def _await_traces(run: Run, ask: Callable[[], list[dict[str, Any]]], limit_s: float) -> list[dict[str, Any]]:
    """Return what has become of a request at every rank.

    Raises:
        RequestError: the run has ended before, or it has not come to that within the limit.
    """
    until_s = time.monotonic() + limit_s
    while True:
        hosts = ask()
        answers = [answer for host in hosts for answer in host["answers"]]
        if all(host["answers"] and len(host["answers"]) == host["answers"][0]["ranks"] for host in hosts):
            return answers
        if any(host["state"] != "running" for host in hosts):
            raise RequestError(
                f"{run.run_id}: has ended before its traces were written; `fab status` says how"
            )
        if time.monotonic() > until_s:
            at = max(int((host["beat"] or {}).get("step", 0)) for host in hosts)
            raise RequestError(
                f"{run.run_id}: is not traced within {spoken(limit_s)}, it is at step {at}, and the request is "
                "withdrawn; --limit sets another time"
            )
        time.sleep(POLL_S)


def _tell_traces(target: Target, run: Run, answers: Sequence[Mapping[str, Any]], tell: Say) -> int:
    problems = [answer["problem"] for answer in answers if "problem" in answer]
    for problem in dict.fromkeys(problems):
        print(
            printable(f"{run.run_id}: {problem} ({problems.count(problem)} of {len(answers)} ranks)"),
            file=sys.stderr,
        )
    traced = [answer for answer in answers if "files" in answer]
    if not traced:
        return 1
    folder, names = (
        run.directory.path(run_directory.PROFILE),
        [name for answer in traced for name in answer["files"]],
    )
    steps = ", ".join(dict.fromkeys(answer["steps"] for answer in traced))
    tell(f"steps {steps} of {len(traced)} rank{'s' * (len(traced) > 1)} are traced in {folder}")
    if not (target.capabilities.shares_files or is_url(folder)):
        tell(
            f"`fab get {folder} profile{target.stack_option} --hosts {target.hosts[0].index}` brings them here"
        )
        folder = "profile"
    if any(name.endswith(".xplane.pb") for name in names):
        tell(f"`xprof --logdir {folder}` (pip install xprof), or TensorBoard with it, opens them")
    if any(".perfetto." in name for name in names):
        tell("ui.perfetto.dev opens the files *.perfetto.json.gz")
    return 1 if problems else 0
