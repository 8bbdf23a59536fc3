"""`fab deploy`: the steps of a target's hosts, carried out on all of them at once."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Literal, get_args

from rich.table import Table

from backends.vm import python_environment
from backends.vm.python_environment import Lock
from backends.vm.steps import (
    Step,
    certificates,
    docker,
    docker_login,
    first_boot,
    folders,
    huge_pages,
    registries,
    share,
    shell_tools,
    to_json,
)
from contracts.aliases import Say
from launch import plan
from launch.hosts import Completed, HostError, HostsError, Stream, Transport
from launch.jobs import CHECKOUT
from launch.output import last_line, printable, say, terminal
from launch.plan import MODULES_OF_FRAMEWORK
from launch.targets import Target

FRAMEWORK = "jax"
"""What a bare run computes with; containers bring any other."""


def deploy(target: Target, *, with_comforts: bool, runtime: str | None = None) -> int:
    """Prepare every host and say what changed; 0 where all are ready.

    runtime: as `launch.plan.choose_container` takes it.

    Raises:
        RequestError: this checkout has no lock for the target's platform, or there is no such runtime or no image.
        HostsError: no host could be reached.
    """
    console = terminal()
    contained, bare = ways_of_running(target, runtime)
    lock = python_environment.needed(target, CHECKOUT) if bare else None
    reached = reach(target, say(console))
    needed = steps(target, with_comforts=with_comforts, contained=contained, bare=bare, lock=lock)
    outcomes = _carry_out(target, needed, lock, reached, say(console))
    console.print(table(outcomes))
    say(console)(verdict(outcomes))
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def ways_of_running(target: Target, runtime: str | None) -> tuple[bool, bool]:
    """Return whether there are runs in containers, which need Docker, and bare ones, which need a Python.

    Without `runtime`, each image is for runs in containers, and FRAMEWORK runs bare if the stack has no image of it.

    Raises:
        RequestError: there is no such runtime or no image.
    """
    images = target.inventory.images
    framework = FRAMEWORK if FRAMEWORK in images else min(images, default=FRAMEWORK)
    contained = plan.choose_container(target, framework, runtime) is not None
    return contained, not contained or (runtime is None and framework != FRAMEWORK)


def steps(
    target: Target, *, with_comforts: bool, contained: bool, bare: bool, lock: Lock | None
) -> tuple[Step, ...]:
    """Return what each host of a target needs, in order. contained, bare: there are runs in containers, and others."""
    modules = MODULES_OF_FRAMEWORK[FRAMEWORK]
    own = [target.agent_root, target.cache_dir]
    if target.capabilities.shares_files:
        return (
            folders([*own, target.runs_url]),
            python_environment.existing_python(target.python, modules, "`make install`"),
        )
    mounted = target.mount is not None
    needs = ("share",) if mounted else ()
    places = [*own, target.runs_url] if target.runs_on_share else own
    return (
        first_boot(),
        certificates(),
        *((share(target.mount, target.inventory.storage.nfs_source),) if target.mount is not None else ()),
        folders(places, needs),
        *((huge_pages(),) if target.platform == "tpu" else ()),
        *((docker(),) if contained else ()),
        *docker_login(registries(target.inventory.images.values())),
        *((_python(target, modules, lock),) if bare else ()),
        *((shell_tools(),) if with_comforts else ()),
    )


def _python(target: Target, modules: Sequence[str], lock: Lock | None) -> Step:
    if lock is not None:
        return python_environment.managed_environment(modules, lock)
    remedy = "install what jobs need there, or leave --python out to have it made"
    return python_environment.existing_python(target.python, modules, remedy)


def _carry_out(
    target: Target,
    needed: Sequence[Step],
    lock: Lock | None,
    reached: Sequence[HostError | None],
    tell: Say,
) -> list[Outcome]:
    # Hosts may be one machine.
    errors = python_environment.install(target.agents, lock, reached)[
        : 1 if target.capabilities.shares_host else None
    ]
    telling = threading.Lock()

    def begin(index: int, error: HostError | None) -> Deployment:
        name = target.hosts[index].name

        def show(answer: Answer) -> None:
            if answer.state in ("doing", "changed", "warned", "failed"):
                with telling:
                    tell(f"[{name}] {answer.step}: {answer.message}")

        return Deployment(name, needed, show, error).begin(target.transports[index])

    deployments = [begin(index, error) for index, error in enumerate(errors)]
    try:
        return [deployment.outcome() for deployment in deployments]
    finally:
        for deployment in deployments:
            deployment.end()


REACH_LIMIT_S = 180.0
AGAIN_S = 5.0
ONE_TRY_S = 30.0
LASTING = ("host key", "no SSH key", "OS Login", "is not installed", "is not known")
"""Signs, in an error's reason, that waiting does not help: this machine or the inventory has to change."""


def reach(target: Target, tell: Say) -> list[HostError | None]:
    """Wait until every host lets us in, as a fresh one does after a while; the error of each that does not.

    Raises:
        HostsError: none does.
    """
    deadline = time.monotonic() + REACH_LIMIT_S
    errors_by_host: list[HostError | None] = [None] * len(target.hosts)
    waiting = list(range(len(target.hosts)))
    reasons: dict[int, str] = {}
    while True:
        attempts = [
            (index, target.transports[index].begin(["true"], "", timeout_s=ONE_TRY_S)) for index in waiting
        ]
        for index, future in attempts:
            errors_by_host[index] = _refusal(target.hosts[index].name, future)
        waiting = [
            index for index in waiting if (error := errors_by_host[index]) is not None and may_pass(error)
        ]
        for index in waiting:
            if reasons.get(index) != (reason := str(errors_by_host[index])):
                reasons[index] = reason
                tell(f"waiting up to {max(0, deadline - time.monotonic()):.0f} s for {reason}")
        if not waiting or time.monotonic() + AGAIN_S > deadline:
            break
        time.sleep(AGAIN_S)
    errors = [error for error in errors_by_host if error is not None]
    if errors and len(errors) == len(errors_by_host):
        raise HostsError("no host could be reached, nothing was changed:", errors)
    return errors_by_host


def _refusal(host: str, future: Future[Completed]) -> HostError | None:
    try:
        done = future.result()
    except (OSError, HostError) as error:
        return HostError.from_error(host, error)
    if done.exit_code is None:
        return HostError(host=host, reason=f"no answer within {ONE_TRY_S:.0f} s")
    return None


def may_pass(error: HostError) -> bool:
    """Return whether a host that cannot be reached may be one that is still booting."""
    return not any(sign in error.reason for sign in LASTING)


RUNNER = Path(__file__).with_name("runner.py")
PYTHON = "python3"
DEPLOY_LIMIT_S = 3600.0
SHELLS_LONGEST = 120_000
"""Bytes of one argument that Linux takes (MAX_ARG_STRLEN is 131,072), with room for the shell's quotes."""


class Deployment:
    """The steps of one host, carried out there in one go; `show` is given each answer as it comes."""

    def __init__(
        self,
        host: str,
        steps: Sequence[Step],
        show: Callable[[Answer], None],
        error: HostError | None = None,
        limit_s: float = DEPLOY_LIMIT_S,
    ) -> None:
        self._host, self._steps, self._show, self._error, self._limit_s = host, steps, show, error, limit_s
        self._reader, self._ended = Reader(), list[Answer]()
        self._future: Future[int | None] | None = None

    def begin(self, transport: Transport) -> Deployment:
        """Start, unless it is known already that this will not do."""
        request = to_json(self._steps)
        assert len(request) < SHELLS_LONGEST, "more steps than one argument holds"
        argv = [PYTHON, "-S", "-E", "-c", RUNNER.read_text(encoding="utf-8"), request]
        if self._error is None:
            self._future = transport.stream(argv, self._take, timeout_s=self._limit_s)
        return self

    def outcome(self) -> Outcome:
        """Return what became of the host; waits for it."""
        if self._future is not None:
            try:
                self._error = self._missing(self._future.result())
            except (OSError, HostError) as error:
                self._error = HostError.from_error(self._host, error)
        return Outcome(host=self._host, answers=tuple(self._ended), error=self._error)

    def end(self) -> None:
        """Break it off where it has not ended; the next deployment goes on from there."""
        if self._future is not None:
            self._future.cancel()

    def _take(self, stream: Stream, data: bytes) -> None:
        for answer in self._reader.take(stream, data):
            self._show(answer)
            if answer.state != "doing":
                self._ended.append(answer)

    def _missing(self, code: int | None) -> HostError | None:
        """Return why there are no more answers, where there should be."""
        if len(self._ended) == len(self._steps):
            return None
        after = f"after {self._ended[-1].step}" if self._ended else "before the first step"
        if code is None:
            reason = f"was not done within {self._limit_s:.0f} s, it ended {after}"
            return HostError(host=self._host, reason=reason)
        last_output = self._reader.last_words
        return HostError(
            host=self._host,
            reason=f"ended {after} with exit code {code}" + (f": {last_output}" if last_output else ""),
            remedy="`fab deploy` again; what was done is found done",
        )


State = Literal["doing", "ok", "changed", "skipped", "warned", "failed"]
STATES: tuple[State, ...] = get_args(State)
LONGEST_LINE = 64 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One step of one host. `doing`: it is under way, and the message says with what.
    `warned`: it failed, and no run needs it."""

    step: str
    state: State
    message: str
    remedy: str = ""
    took_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one host: its steps that have ended, and why there are no more, where it was lost."""

    host: str
    answers: tuple[Answer, ...]
    error: HostError | None = None

    @property
    def changed(self) -> bool:
        return any(answer.state == "changed" for answer in self.answers)

    @property
    def failed(self) -> bool:
        return self.error is not None or any(answer.state == "failed" for answer in self.answers)


class Reader:
    """Takes a host's output in pieces and gives its answers; memory is bounded, whatever the host sends."""

    def __init__(self) -> None:
        self._pending = b""
        self.last_words = ""

    def take(self, stream: Stream, data: bytes) -> Iterator[Answer]:
        if stream == "err":
            self._keep(data)
            return
        *lines, incomplete = (self._pending + data).split(b"\n")
        self._pending = incomplete[-LONGEST_LINE:]
        for line in lines:
            answer = parse(line)
            if answer is None:
                self._keep(line)
            else:
                yield answer

    def _keep(self, data: bytes) -> None:
        self.last_words = printable(last_line(data.decode(errors="replace"), self.last_words)[:500])


def parse(line: bytes) -> Answer | None:
    """Return the answer in a line; None where it holds none."""
    try:
        value = json.loads(line)
        if value["state"] not in STATES:
            return None
        step, message, remedy = (printable(value[name]) for name in ("step", "message", "remedy"))
        took_s = float(value["took_s"])
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError, OverflowError):
        return None
    return Answer(step=step, state=value["state"], message=message, remedy=remedy, took_s=took_s)


NOTHING = "nothing to do"
MARKS = {"changed": "changed", "warned": "warning", "failed": "FAILED"}
Row = tuple[str, str, str]


def rows(outcome: Outcome) -> tuple[Row, ...]:
    """(step, what became of it, message) of what a reader has to know of one host."""
    shown = [
        (answer.step, MARKS[answer.state], _text(answer))
        for answer in outcome.answers
        if answer.state in MARKS
    ]
    if outcome.error is not None:
        remedy = f" → {outcome.error.remedy}" if outcome.error.remedy else ""
        shown.append(("", "LOST" if outcome.answers else "NOT REACHED", outcome.error.reason + remedy))
    return tuple(shown) or (("", "", NOTHING),)


def _text(answer: Answer) -> str:
    took = f" ({answer.took_s:.0f} s)" if answer.state == "changed" and answer.took_s >= 1 else ""
    return answer.message + took + (f" → {answer.remedy}" if answer.remedy else "")


def table(outcomes: Sequence[Outcome]) -> Table:
    alike: dict[tuple[Row, ...], list[str]] = {}
    for outcome in outcomes:
        alike.setdefault(rows(outcome), []).append(outcome.host)
    grid = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("host", "step", "", "what"):
        grid.add_column(heading, overflow="fold")
    for shown, hosts in alike.items():
        for number, row in enumerate(shown):
            grid.add_row(named(hosts) if number == 0 else "", *row)
    return grid


def named(hosts: Sequence[str]) -> str:
    """Return a group of hosts: the first and the last of many, and how many they are."""
    if len(hosts) <= 2:
        return ", ".join(hosts)
    return f"{hosts[0]} … {hosts[-1]} ({len(hosts)} hosts)"


def verdict(outcomes: Sequence[Outcome]) -> str:
    """Return one line for all hosts."""
    failed = sum(outcome.failed for outcome in outcomes)
    changed = sum(outcome.changed and not outcome.failed for outcome in outcomes)
    if failed:
        return f"{failed} of {_hosts(len(outcomes))} {'is' if failed == 1 else 'are'} not ready"
    if changed:
        return f"{_hosts(len(outcomes))} ready, {changed} changed"
    return f"{_hosts(len(outcomes))} ready: {NOTHING}"


def _hosts(count: int) -> str:
    return f"{count} host{'s' * (count != 1)}"
