"""One host as the launcher sees it: commands and files by a transport, questions to its agent, what goes wrong there.

`backends` has the transports: this machine's own processes, SSH. An agent takes JSON and answers
JSON; all hosts are asked at once, and one failure hides no other."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any, Literal, Protocol

from contracts.errors import os_error_reason, remedy_for
from contracts.host_interface import PROTOCOL_VERSION
from launch.output import last_line, printable


@dataclasses.dataclass(kw_only=True, eq=False)
class HostError(Exception):
    """What went wrong on one host, and what to do about it. Not frozen: raising sets an exception's traceback.

    is_in_use: the host is at work, for somebody else or another run. is_outage: no host but a bucket or another service
    did not answer, or could not for now.
    """

    host: str
    reason: str
    remedy: str = ""
    is_in_use: bool = False
    is_outage: bool = False

    def __str__(self) -> str:
        return f"{self.host}: {self.reason}" + (f" → {self.remedy}" if self.remedy else "")

    @classmethod
    def from_error(cls, host: str, error: Exception) -> HostError:
        """Return an error as one of this host, safe for a terminal."""
        reason, remedy = str(error), ""
        if isinstance(error, HostError):
            reason, remedy = error.reason, error.remedy
        elif isinstance(error, OSError) and error.filename:
            reason, remedy = os_error_reason(error), remedy_for(error)
        return cls(host=host, reason=printable(reason), remedy=printable(remedy))


class HostsError(Exception):
    """One or more hosts could not do what was asked; every one is listed."""

    def __init__(self, summary: str, errors: Sequence[HostError]) -> None:
        super().__init__("\n  ".join([summary, *map(str, errors)]))
        self.errors = tuple(errors)


Stream = Literal["out", "err"]
Show = Callable[[Stream, bytes], None]
"""Is handed a command's output in pieces, as it comes. It may block: what is not taken is not read from the host."""

Count = Callable[[int], None]
"""Is told how many more bytes have been copied."""

PIECE_BYTES = 64 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completed:
    """How a command ended. `exit_code` is None if it did not end in time, -N if signal N killed it."""

    exit_code: int | None
    stdout: str
    stderr: str


class Transport(Protocol):
    """One host, as a launcher sees it. Arguments are lists; quoting is the transport's own business.

    Every call may raise, or its Future may hold, OSError or `launch.hosts.HostError`: the host cannot be reached,
    or has no such command or file.
    """

    def begin(self, argv: Sequence[str], stdin: str, *, timeout_s: float) -> Future[Completed]:
        """Start a command and return at once. The output is kept in memory: for short answers."""
        ...

    def stream(self, argv: Sequence[str], show: Show, *, timeout_s: float | None) -> Future[int | None]:
        """Start a command and hand out its output as it comes; return the exit code (None: not in time).

        Cancelling the Future ends the command on the host.
        """
        ...

    def put(self, source: Path, target: str, progress: Count | None = None) -> None:
        """Copy a file or a folder with all that is in it to `target` on the host, under a new name first."""
        ...

    def get(self, source: str, target: Path, progress: Count | None = None) -> None:
        """Copy a file or a folder of the host to `target` on this machine."""
        ...

    def forward(self, remote_host: str, remote_port: int) -> contextlib.AbstractContextManager[int]:
        """Open a port of this machine that leads to one that the host can reach."""
        ...


def in_thread[T](work: Callable[[], T]) -> Future[T]:
    """Carry out `work` in a thread of its own, for which neither an interrupt nor the end of the program waits."""
    future: Future[T] = Future()

    def carry_out() -> None:
        # A future that was cancelled meanwhile wants no result.
        try:
            result = work()
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)
        else:
            with contextlib.suppress(InvalidStateError):
                future.set_result(result)

    threading.Thread(target=carry_out, daemon=True).start()
    return future


SSH_PORT = 22


def address_and_port(text: str) -> tuple[str, int]:
    """Return what "10.0.0.2", "name:2222", "::1" and "[::1]:2222" mean."""
    if match := re.fullmatch(r"\[([^\]]+)\](?::(\d{1,5}))?|([^:]+):(\d{1,5})", text):
        return match[1] or match[3], int(match[2] or match[4] or SSH_PORT)
    return text, SSH_PORT


ANSWER_LIMIT_S = 60.0
STOP_LIMIT_S = 60.0
"""Beyond the grace: a process is killed within seconds, and a Docker that does not answer is waited for 20 s."""
STOP_NOW_S = 2.0
"""Grace for processes that have nothing to save: they have not joined, or have lost a sibling."""


class Link(Protocol):
    """How one host's agent is asked. knows_all: whether its `status` is all that is to be known of a run there."""

    @property
    def knows_all(self) -> bool: ...

    def ask(self, verb: str, request: str, *, timeout_s: float) -> Future[Completed]:
        """Begin to ask. The answer is one line of JSON in `stdout`; `exit_code` is None where none came in time.

        The Future may hold OSError or HostError: the host cannot be reached, or cannot run an agent.
        """
        ...


@dataclasses.dataclass(frozen=True)
class GoneLink:
    """A host that a run had and the target does not have. reason: what is known of it. knows_all: whether it is that
    nothing runs there."""

    reason: str
    remedy: str
    knows_all: bool = True

    def ask(self, verb: str, request: str, *, timeout_s: float) -> Future[Completed]:  # noqa: ARG002 - it is a Link
        answer: Future[Completed] = Future()
        if verb == "status":
            answer.set_result(Completed(exit_code=0, stdout='{"ok": true, "processes": []}', stderr=""))
        else:
            answer.set_exception(HostError(host="", reason=self.reason, remedy=self.remedy))
        return answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agent:
    """The agent of one host. root: its own directory there."""

    host: str
    link: Link
    root: str

    def ask(
        self, verb: str, request: Mapping[str, Any], *, timeout_s: float = ANSWER_LIMIT_S
    ) -> dict[str, Any]:
        """Carry out one verb.

        Raises:
            HostError: the host did not answer, or its agent says that it could not.
        """
        return self.begin(verb, request, timeout_s=timeout_s).result()

    def begin(
        self, verb: str, request: Mapping[str, Any], *, timeout_s: float = ANSWER_LIMIT_S
    ) -> Future[dict[str, Any]]:
        """Begin to ask. The Future will hold the answer, or HostError as `ask` raises it."""
        answer: Future[dict[str, Any]] = Future()

        def take(completed: Future[Completed]) -> None:
            try:
                answer.set_result(self._parse(verb, completed.result(), timeout_s))
            except HostError as error:
                answer.set_exception(HostError.from_error(self.host, error))
            except OSError as error:
                answer.set_exception(
                    HostError.from_error(self.host, OSError(f"cannot run the agent: {error}"))
                )
            except BaseException as error:  # whoever waits for the answer is told
                answer.set_exception(error)

        text = json.dumps({"version": PROTOCOL_VERSION, "root": self.root, **request})
        try:
            future = self.link.ask(verb, text, timeout_s=timeout_s)
        except (OSError, HostError) as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(take)
        return answer

    def _parse(self, verb: str, completed: Completed, timeout_s: float) -> dict[str, Any]:
        if completed.exit_code is None:
            raise HostError(host=self.host, reason=f"no answer to {verb} within {timeout_s:g} s")
        try:
            answer = json.loads(completed.stdout)
            if not isinstance(answer, dict):
                raise ValueError(f"{answer!r} is no object")
        except ValueError:
            last = last_line(completed.stderr or completed.stdout, "")
            reason = f"{verb} was not answered by an agent (exit code {completed.exit_code}): {last}"
            raise HostError(host=self.host, reason=reason) from None
        return accepted(self.host, answer)


def accepted(host: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Return an agent's answer.

    Raises:
        HostError: it says that the agent could not do what it was asked.
    """
    if not answer.get("ok"):
        fault = answer.get("error", {})
        raise HostError(
            host=host, reason=fault.get("message", "unknown error"), remedy=fault.get("remedy") or ""
        )
    return answer


Answer = dict[str, Any] | HostError
"""What became of one question: the answer, or why there is none."""


def wait_for_answer(future: Future[dict[str, Any]]) -> Answer:
    """Wait for the answer to a question."""
    try:
        return future.result()
    except HostError as error:
        return error


def ask_all(
    agents: Sequence[Agent],
    verb: str,
    requests: Sequence[Mapping[str, Any]],
    *,
    timeout_s: float = ANSWER_LIMIT_S,
) -> list[Answer]:
    """Carry out `verb` on all hosts at once; return the answer or the error of each, in order."""
    pairs = zip(agents, requests, strict=True)
    return [
        *map(wait_for_answer, [agent.begin(verb, request, timeout_s=timeout_s) for agent, request in pairs])
    ]


def all_or_error(summary: str, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return the answers, if every host gave one.

    Raises:
        HostsError: listing every host that did not.
    """
    errors = [answer for answer in answers if isinstance(answer, HostError)]
    if errors:
        raise HostsError(summary, errors)
    return [answer for answer in answers if not isinstance(answer, HostError)]


def stop_processes(agents: Sequence[Agent], run_id: str, attempt: int, *, grace_s: float) -> list[Answer]:
    """Stop the attempt's process on every host; return the agents' answers in worker order, errors included."""
    requests = [
        {"run_id": run_id, "attempt": attempt, "process_id": index, "grace_s": grace_s}
        for index in range(len(agents))
    ]
    return ask_all(agents, "stop", requests, timeout_s=grace_s + STOP_LIMIT_S)
