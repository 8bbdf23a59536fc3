"""`fab stacks` and `fab profile`: where the processes of a run are now, and a trace of its next steps."""

from __future__ import annotations

import dataclasses
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from console.hosts.execute import ranges
from contracts import run_directory
from contracts.errors import RequestError
from launch import bundles, runs
from launch.bundles import Bundle
from launch.hosts import HostError
from launch.output import printable, say, terminal
from launch.runs import Run
from launch.targets import Target

STACKS_LIMIT_S = 120.0
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
    run = _active(target, name)
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


def _active(target: Target, name: str) -> Run:
    run = runs.find(target.runs, name)
    state = target.state_of(run)
    if state not in run_directory.ACTIVE:
        raise RequestError(
            f"{run.run_id} {run_directory.ENDED.get(state, state)}: it has no processes; `fab logs {run.run_id}` "
            "shows what they printed"
        )
    return run


def _py_spy() -> tuple[Bundle | None, str | None]:
    """Return py-spy as hosts are sent it, or why there is none; they write the stacks of jobs themselves then."""
    fallback = "of jobs, stacks are taken without it: Python's frames alone"
    if (here := (platform.system(), platform.machine())) != HOSTS_PLATFORM:
        return None, f"py-spy: that of this machine ({' '.join(here)}) does not run on hosts; {fallback}"
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
