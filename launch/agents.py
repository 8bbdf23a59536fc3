"""Talking to the agents of a run's hosts: JSON in, JSON out, all hosts at once, one failure hiding no other."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from launch.transport import Transport

PROTOCOL_VERSION = 1
MOST_AT_ONCE = 64


@dataclasses.dataclass(kw_only=True, eq=False)
class HostError(Exception):
    """What went wrong on one host, and what to do about it. Not frozen: raising sets an exception's traceback."""

    host: str
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.host}: {self.reason}" + (f" → {self.remedy}" if self.remedy else "")


class HostsError(Exception):
    """One or more hosts could not do what was asked; every one is listed."""

    def __init__(self, what: str, errors: Sequence[HostError]) -> None:
        super().__init__("\n  ".join([what, *map(str, errors)]))
        self.errors = tuple(errors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agent:
    """The agent of one host. command: how it is started there; root: its own directory there."""

    host: str
    transport: Transport
    command: tuple[str, ...]
    root: str

    def ask(self, verb: str, request: Mapping[str, Any], *, timeout_s: float = 60) -> dict[str, Any]:
        """Carry out one verb.

        Raises:
            HostError: the host did not answer, or its agent says that it could not.
        """
        text = json.dumps({"version": PROTOCOL_VERSION, "root": self.root, **request})
        try:
            done = self.transport.run([*self.command, verb], text, timeout_s=timeout_s)
        except OSError as error:
            raise HostError(host=self.host, reason=f"cannot run the agent: {error}") from None
        if done.exit_code is None:
            raise HostError(host=self.host, reason=f"no answer to {verb} within {timeout_s:g} s")
        try:
            answer = json.loads(done.stdout)
            if not isinstance(answer, dict):
                raise ValueError(f"{answer!r} is no object")
        except ValueError:
            said = (done.stderr or done.stdout).strip().splitlines()
            reason = f"{verb} was not answered by an agent (exit code {done.exit_code}): {said[-1] if said else ''}"
            raise HostError(host=self.host, reason=reason) from None
        if not answer.get("ok"):
            fault = answer.get("error", {})
            raise HostError(
                host=self.host, reason=fault.get("message", "unknown error"), remedy=fault.get("remedy") or ""
            )
        return answer


def ask_all(
    agents: Sequence[Agent], verb: str, requests: Sequence[Mapping[str, Any]], *, timeout_s: float = 60
) -> list[dict[str, Any] | HostError]:
    """Carry out `verb` on all hosts at once; the answer or the error of each, in order."""

    def one(agent: Agent, request: Mapping[str, Any]) -> dict[str, Any] | HostError:
        try:
            return agent.ask(verb, request, timeout_s=timeout_s)
        except HostError as error:
            return error

    with ThreadPoolExecutor(max_workers=min(MOST_AT_ONCE, max(1, len(agents)))) as pool:
        return list(pool.map(one, agents, requests))


def all_or_error(what: str, answers: Sequence[dict[str, Any] | HostError]) -> list[dict[str, Any]]:
    """The answers, where every host gave one.

    Raises:
        HostsError: listing every host that did not.
    """
    errors = [answer for answer in answers if isinstance(answer, HostError)]
    if errors:
        raise HostsError(what, errors)
    return [answer for answer in answers if not isinstance(answer, HostError)]
