"""Talking to the agents of a run's hosts: JSON in, JSON out, all hosts at once, one failure hiding no other."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from launch.errors import HostError, HostsError
from launch.printable import printable
from launch.transport import Completed, Transport

PROTOCOL_VERSION = 1
ANSWER_LIMIT_S = 60.0


class Link(Protocol):
    """How one host's agent is asked."""

    def ask(self, verb: str, request: str, *, timeout_s: float) -> Future[Completed]:
        """Begin to ask. The answer is one line of JSON in `stdout`; `exit_code` is None where none came in time.

        The Future may hold OSError or HostError: the host cannot be reached, or cannot run an agent.
        """
        ...


@dataclasses.dataclass(frozen=True)
class ProcessLink:
    """An agent that is started anew for every verb. command: how it is started."""

    transport: Transport
    command: tuple[str, ...]

    def ask(self, verb: str, request: str, *, timeout_s: float) -> Future[Completed]:
        return self.transport.begin([*self.command, verb], request, timeout_s=timeout_s)


@dataclasses.dataclass(frozen=True)
class GoneLink:
    """A host that a run had and the slice no longer has: nothing runs there. reason: what is known of it."""

    reason: str
    remedy: str

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
    ) -> PendingAnswer:
        """Begin to ask, to wait for the answer later."""
        text = json.dumps({"version": PROTOCOL_VERSION, "root": self.root, **request})
        try:
            future = self.link.ask(verb, text, timeout_s=timeout_s)
        except (OSError, HostError) as error:
            future = Future()
            future.set_exception(error)
        return PendingAnswer(agent=self, verb=verb, timeout_s=timeout_s, future=future)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingAnswer:
    """A question that is under way."""

    agent: Agent
    verb: str
    timeout_s: float
    future: Future[Completed]

    def result(self) -> dict[str, Any]:
        """The answer; waits for it.

        Raises:
            HostError: as `Agent.ask`.
        """
        try:
            done = self.future.result()
        except HostError as error:
            raise self._error(error.reason, error.remedy) from None
        except OSError as error:
            raise self._error(f"cannot run the agent: {error}") from None
        if done.exit_code is None:
            raise self._error(f"no answer to {self.verb} within {self.timeout_s:g} s")
        try:
            answer = json.loads(done.stdout)
            if not isinstance(answer, dict):
                raise ValueError(f"{answer!r} is no object")
        except ValueError:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise self._error(
                f"{self.verb} was not answered by an agent (exit code {done.exit_code}): {said[-1] if said else ''}"
            ) from None
        if not answer.get("ok"):
            fault = answer.get("error", {})
            raise self._error(fault.get("message", "unknown error"), fault.get("remedy") or "")
        return answer

    def _error(self, reason: str, remedy: str = "") -> HostError:
        return HostError(host=self.agent.host, reason=printable(reason), remedy=printable(remedy))


def ask_all(
    agents: Sequence[Agent],
    verb: str,
    requests: Sequence[Mapping[str, Any]],
    *,
    timeout_s: float = ANSWER_LIMIT_S,
) -> list[dict[str, Any] | HostError]:
    """Carry out `verb` on all hosts at once; the answer or the error of each, in order."""
    pending = [
        agent.begin(verb, request, timeout_s=timeout_s)
        for agent, request in zip(agents, requests, strict=True)
    ]

    def answer(question: PendingAnswer) -> dict[str, Any] | HostError:
        try:
            return question.result()
        except HostError as error:
            return error

    return [answer(question) for question in pending]


def all_or_error(what: str, answers: Sequence[dict[str, Any] | HostError]) -> list[dict[str, Any]]:
    """The answers, where every host gave one.

    Raises:
        HostsError: listing every host that did not.
    """
    errors = [answer for answer in answers if isinstance(answer, HostError)]
    if errors:
        raise HostsError(what, errors)
    return [answer for answer in answers if not isinstance(answer, HostError)]
