"""Hosts that are there, of this machine or over SSH: their agents are asked, all at once, and told what to start."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from contracts.aliases import Say
from contracts.durations import spoken
from contracts.errors import RequestError
from contracts.ranks import LAYER_STAMP
from launch import plan as plans
from launch.code.bundles import Bundle, keep
from launch.hosts import (
    STOP_NOW_S,
    Agent,
    Answer,
    HostError,
    HostsError,
    Transport,
    all_or_error,
    ask_all,
    stop_processes,
)
from launch.output import counted
from launch.runs import Look, Run
from launch.targets import Capabilities, Environments, Plan, PodOptions, Require, Sleep, Target

PULL_ATTEMPTS = 5
PULL_LIMIT_S = 3600.0
"""Gigabytes on every host of a large slice, with the pauses between attempts."""
STATUS_LIMIT_S = 10.0
LOGS_LIMIT_S = 10.0
REMOVE_LIMIT_S = 10.0
CLEAR_LIMIT_S = 600.0
"""For a host to remove the copy of a command's folder, and what was installed for it."""
BOOT_LIMIT_S = 300.0
BOOT_POLL_S = 1.0
REQUIRE_PERIOD_S = 10.0
IN_USE = ("device", "lockfile", "leftovers")
"""Checks that fail of a host that is at work, which is no fault of the host."""
MOST_NAMED = 4
BUNDLES = ("code", "folder", "packages")
"""What a run has sent to its hosts, in this order."""
STAGE_LIMIT_S = 900.0
"""A gigabyte of packages, to many hosts at once."""
MOST_BYTES_SENT = 2**30
"""To all hosts at once: this machine has a copy for each of them."""
PIECE_BYTES = 32 * 2**20
"""Of an archive, in one request: an agent reads its requests into memory."""
LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostBackend:
    """A `launch.targets.Backend` of hosts that have agents.

    agents, transports: of the target's hosts. agents_for: of the hosts that a run.json names, in worker order. restore:
    makes the slice again. deploy: makes new hosts able to run something; False: some are not, which has been said.
    """

    capabilities: Capabilities
    environments: Environments | None
    agents: tuple[Agent, ...]
    transports: tuple[Transport, ...]
    agents_for: Callable[[Mapping[str, Any]], tuple[Agent, ...]]
    restore: Callable[[Say, Sleep], None]
    deploy: Callable[[Target], bool]
    hold: Callable[[], AbstractContextManager[Require]]
    terminal: Callable[[Target, int | None, Sequence[str]], int]

    def ensure(
        self, target: Target, reopen: Callable[[], Target], say: Say, sleep: Sleep = time.sleep
    ) -> Target:
        silent = self.status().errors
        if not silent:
            return target
        for error in silent:
            say(f"no answer from {error}")
        self.restore(say, sleep)
        return self.prepare(reopen, say, sleep=sleep)

    def prepare(
        self,
        reopen: Callable[[], Target],
        say: Say,
        require: Require = lambda: None,
        sleep: Sleep = time.sleep,
    ) -> Target:
        fresh = reopen()
        _wait_for_hosts(fresh, require, say, sleep)
        say(f"{fresh.slice.name}: all hosts answer ({len(fresh.hosts)})")
        if not self.deploy(fresh):
            raise RequestError(
                "not every host could be prepared; fix what is listed, then `fab recover` again"
            )
        return reopen()  # what deploying has changed, as the user's groups, is so from the next log-in on

    def launcher(self, target: Target, options: PodOptions, before: Run | None) -> HostLauncher:  # noqa: ARG002
        if options.queue is not None or options.wait_s is not None:
            raise RequestError(
                f"--queue, --wait: the slice {target.slice.name} is no node pool of a cluster; leave them out"
            )
        return HostLauncher()

    def stop(self, run: Run, *, grace_s: float) -> list[Answer]:
        return stop_processes(self.agents_for(run.described), run.run_id, run.attempt, grace_s=grace_s)

    def status(self, selected: Sequence[Run] | None = None) -> Look:
        request: dict[str, Any] = {"run_id": None, "attempt": None, "process_id": None}
        agents = self.agents
        if selected is not None and (self.capabilities.hosts_follow_run or len(selected) == 1):
            agents = tuple(agent for run in selected for agent in self.agents_for(run.described))
        if selected is not None and len(selected) == 1:
            request |= {"run_id": selected[0].run_id, "attempt": selected[0].attempt}
        # Hosts that are this machine share one agent directory; it is asked once.
        distinct = list({(agent.root, agent.link): agent for agent in agents}.values())
        answers = ask_all(distinct, "status", [request] * len(distinct), timeout_s=STATUS_LIMIT_S)
        return Look(
            processes=tuple(
                entry for answer in answers if isinstance(answer, dict) for entry in answer["processes"]
            ),
            errors=tuple(answer for answer in answers if isinstance(answer, HostError)),
            knowing=sum(agent.link.knows_all for agent in distinct),
        )

    def logs(self, run: Run, index: int, *, offset: int, limit_bytes: int) -> dict[str, Any]:
        request = {**run.process(index), "offset": offset, "limit_bytes": limit_bytes}
        return self.agents_for(run.described)[index].ask("logs", request, timeout_s=LOGS_LIMIT_S)

    def ask(self, run: Run, verb: str, request: Mapping[str, Any], *, timeout_s: float) -> list[Answer]:
        agents = self.agents_for(run.described)
        requests = [{**run.process(index), **request} for index in range(len(agents))]
        return ask_all(agents, verb, requests, timeout_s=timeout_s)

    def clear(self, run: Run) -> list[str]:
        agents, problems = self.agents_for(run.described), list[str]()
        for kind in ("venv", "work"):
            requests = [
                {"path": f"{agent.root}/runs/{run.run_id}/{kind}-{index}", "first": LAYER_STAMP}
                for index, agent in enumerate(agents)
            ]
            answers = ask_all(agents, "remove_folder", requests, timeout_s=CLEAR_LIMIT_S)
            problems += [
                f"{answer}; {request['path']} is still there"
                for answer, request in zip(answers, requests, strict=True)
                if isinstance(answer, HostError)
            ]
        return problems

    def conclude(self, run_id: str) -> None:  # noqa: ARG002 - its agents have said all
        return None

    def open_shell(self, target: Target, index: int | None, run: Run | None) -> int:
        if run is None:
            return self.terminal(target, index, ())
        agent = self.agents_for(run.described)[index or 0]
        argv = agent.ask("shell", run.process(index or 0))["argv"]
        place = next((host.index for host in target.hosts if host.name == agent.host), None)
        return self.terminal(target, place, argv)

    def forward(self, run_id: str, index: int, port: int) -> AbstractContextManager[int]:  # noqa: ARG002
        return self.transports[index].forward(LOOPBACK, port)


def _wait_for_hosts(target: Target, require: Require, say: Say, sleep: Sleep) -> None:
    """Wait until the SSH servers of hosts answer. Raises RequestError: some do not within BOOT_LIMIT_S."""
    deadline = time.monotonic() + BOOT_LIMIT_S
    required_s, is_told = time.monotonic(), False
    while silent := target.backend.status().errors:
        if not is_told:
            say(
                f"waiting for {_named([error.host for error in silent])} to answer, for at most {spoken(BOOT_LIMIT_S)}"
            )
            is_told = True
        if time.monotonic() - required_s > REQUIRE_PERIOD_S:
            require()
            required_s = time.monotonic()
        if time.monotonic() > deadline:
            lines = [
                f"hosts do not answer {spoken(BOOT_LIMIT_S)} after their slice was there:",
                *map(str, silent),
            ]
            raise RequestError(
                "\n  ".join(lines)
                + f"\nGoogle says that {target.slice.name} is there. To make it anew: `pulumi stack --show-urns` "
                f"names it, `pulumi up --stack {target.pulumi_stack} --replace URN` gives it back and asks for another"
            )
        sleep(BOOT_POLL_S)


class HostLauncher:
    """A `launch.targets.Launcher` of runs on hosts: preflight, code and image at all of them, then all processes."""

    record: Mapping[str, Any] = {}

    def documents(self, plan: Plan) -> list[dict[str, Any]]:  # noqa: ARG002 - each host is told by itself
        return []

    def placed(self, plan: Plan) -> Plan:
        return plan

    def prepare(
        self, plan: Plan, bundles: Sequence[Bundle], say: Say, now_s: Callable[[], float] = time.time
    ) -> Plan:
        """Preflight every host, send the code and pull the image; return the plan with what the preflight found.

        Raises:
            HostsError: a host is not ready; nothing has been started.
        """
        agents = plan.target.agents
        try:
            facts = preflight(plan, agents, now_s)
            code, *further = bundles
            sent = stage(code, agents, facts)
            for bundle in further:
                if (path := plan.stored_at(bundle.sha256)) is not None:
                    keep(bundle, path, plan.target.files)
                sent += stage_if_missing(bundle, agents, path, say)
            pull(plan, agents, facts, say)
        except BaseException:
            if plan.target.runs_on_share:
                # The run directory that a preflight has made to see whether it can be, on any of the hosts, is empty.
                requests = [{"path": plan.run_dir}] * len(agents)
                ask_all(agents, "remove", requests, timeout_s=REMOVE_LIMIT_S)
            raise
        name = " and ".join(
            f"{title} {bundle.sha256[:12]}" for title, bundle in zip(BUNDLES, bundles, strict=False)
        )
        is_there = "are there" if further else "is there"
        hosts = _named([host.name for host in plan.target.hosts])
        say(f"preflight passed on {hosts}, {name} {'sent' if sent else is_there}")
        return plans.settled(plan, facts, token=secrets.token_hex(16))

    def begin(self, plan: Plan, say: Say) -> None:  # noqa: ARG002 - hosts start at once
        start(plan, plan.target.agents)

    def join(self, plan: Plan, *, limit_s: float, answer_limit_s: float) -> list[Answer]:
        # Each host waits for its own process and answers once: however long that takes, it is one journey.
        requests = [{**plan.process(index), "limit_s": limit_s} for index in range(plan.processes)]
        return ask_all(plan.target.agents, "join", requests, timeout_s=limit_s + answer_limit_s)


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMED]) + (", …" if len(names) > MOST_NAMED else "")
    return f"{len(names)} host{'s' * (len(names) > 1)} ({shown})"


def preflight(
    plan: Plan, agents: Sequence[Agent], now_s: Callable[[], float] = time.time
) -> list[dict[str, Any]]:
    """Ask every host whether the run can start there; return the facts of each.

    Raises:
        HostsError: listing every failed check of every host; nothing has been started.
    """
    requests = [plans.preflight(plan, index, now_s=now_s()) for index in range(plan.processes)]
    answers = ask_all(agents, "preflight", requests)
    errors: list[HostError] = []
    for agent, answer in zip(agents, answers, strict=True):
        if isinstance(answer, HostError):
            errors.append(answer)
            continue
        errors += [
            HostError(
                host=agent.host,
                reason=check["message"],
                remedy=check["remedy"] or "",
                is_in_use=check["name"] in IN_USE,
            )
            for check in answer["checks"]
            if not check["ok"]
        ]
    if errors:
        raise HostsError("preflight failed, nothing was started:", errors)
    return [answer["facts"] for answer in answers if not isinstance(answer, HostError)]


def stage(bundle: Bundle, agents: Sequence[Agent], facts: Sequence[dict[str, Any]]) -> int:
    """Send the code to the hosts that do not have it yet; return how many these are.

    Raises:
        HostsError: it could not be unpacked somewhere; nothing has been started.
    """
    missing = [agent for agent, fact in zip(agents, facts, strict=True) if not fact["bundle_present"]]
    return _send(bundle, missing)


def stage_if_missing(
    bundle: Bundle, agents: Sequence[Agent], path: str | None = None, say: Say = lambda _: None
) -> int:
    """Send a bundle to the hosts that do not have it; return how many these are.

    path: a file or object that the hosts may be able to read, from which they take it by themselves.

    Raises:
        HostsError: as of `stage`.
    """
    agents = _distinct(agents)
    request = {"sha256": bundle.sha256, **({"archive_path": path} if path else {})}
    answers = ask_all(agents, "stage", [request] * len(agents), timeout_s=STAGE_LIMIT_S)
    present = all_or_error("the folder could not be sent:", answers)
    missing = [agent for agent, state in zip(agents, present, strict=True) if not state["present"]]
    if problem := next((state["problem"] for state in present if state.get("problem")), None):
        say(f"{problem}; {counted(len(missing), 'host')} get it from this machine instead")
    return sum(bool(state["sent"]) for state in present) + _send(bundle, missing)


def _distinct(agents: Sequence[Agent]) -> list[Agent]:
    """Return one agent for each directory: hosts that share one (the local target's) need what is sent once."""
    return list({(agent.root, agent.link): agent for agent in agents}.values())


def _send(bundle: Bundle, missing: Sequence[Agent]) -> int:
    missing, size_bytes = _distinct(missing), len(bundle.archive)
    at_once = max(1, MOST_BYTES_SENT // min(size_bytes, PIECE_BYTES))
    for batch in itertools.batched(missing, at_once):
        for offset in range(0, size_bytes, PIECE_BYTES):
            piece = base64.b64encode(bundle.archive[offset : offset + PIECE_BYTES]).decode()
            at = {"offset": offset, "size_bytes": size_bytes}
            request = {"sha256": bundle.sha256, "archive_base64": piece, **at}
            answers = ask_all(batch, "stage", [request] * len(batch), timeout_s=STAGE_LIMIT_S)
            all_or_error("the code could not be sent:", answers)
    return len(missing)


def pull(
    plan: Plan, agents: Sequence[Agent], facts: Sequence[Mapping[str, Any]], say: Callable[[str], None]
) -> None:
    """Fetch the image where it is missing; each host does so for itself, all at once.

    Raises:
        HostsError: it could not be had somewhere; nothing has been started.
    """
    if plan.container is None:
        return
    missing = {
        (agent.root, agent.link): (agent, fact["image_needs_bytes"])
        for agent, fact in zip(agents, facts, strict=True)
        if not fact["image_present"]
    }
    if not missing:
        return
    image = plan.container.image
    requests = [
        {"image": image, "attempts": PULL_ATTEMPTS, "min_free_bytes": needs, "limit_s": PULL_LIMIT_S}
        for _, needs in missing.values()
    ]
    say(f"pulling {image} on {len(missing)} of {len(agents)} hosts …")
    began_s = time.monotonic()
    answers = ask_all([agent for agent, _ in missing.values()], "pull", requests, timeout_s=PULL_LIMIT_S + 60)
    all_or_error("the image could not be had everywhere, nothing was started:", answers)
    say(f"the image is there after {spoken(time.monotonic() - began_s)}")


def start(plan: Plan, agents: Sequence[Agent]) -> None:
    """Start every process, all at once.

    Raises:
        HostsError: some could not be started; those that were have been stopped again.
    """
    answers = ask_all(agents, "start", [plans.start(plan, index) for index in range(plan.processes)])
    if any(isinstance(answer, HostError) for answer in answers):
        stop_processes(agents, plan.run_id, plan.attempt, grace_s=STOP_NOW_S)
        all_or_error("the run could not be started everywhere, so it was stopped again:", answers)
