"""Launching of runs on hosts that are there: each is asked whether it is ready, and told to start its process."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from contracts.durations import spoken
from contracts.errors import RequestError
from launch import plan as plans
from launch.backend import Say
from launch.bundles import Bundle
from launch.hosts import STOP_NOW_S, Agent, HostError, HostsError, all_or_error, ask_all, stop_processes
from launch.plan import Plan
from launch.targets import Target

if TYPE_CHECKING:
    from launch.launch import Request

PULL_ATTEMPTS = 5
PULL_LIMIT_S = 3600.0
"""Gigabytes on every host of a large slice, with the pauses between attempts."""
IN_USE = ("device", "lockfile", "leftovers")
"""Checks that fail of a host that is at work, which is no fault of the host."""
MOST_NAMED = 4


class HostLauncher:
    """A `launch.backend.Launcher` of runs on hosts: preflight, code and image at all of them, then all processes."""

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
        facts = preflight(plan, agents, now_s)
        code, *folders = bundles
        sent = stage(code, agents, facts)
        sent += sum(stage_if_missing(folder, agents) for folder in folders)
        pull(plan, agents, facts, say)
        name = " and ".join(
            ["code " + code.sha256[:12], *("folder " + folder.sha256[:12] for folder in folders)]
        )
        is_there = "are there" if folders else "is there"
        say(f"preflight passed on {_named(plan.target)}, {name} {'sent' if sent else is_there}")
        return plans.settled(plan, facts, token=secrets.token_hex(16))

    def begin(self, plan: Plan, say: Say) -> None:  # noqa: ARG002 - hosts start at once
        start(plan, plan.target.agents)


def launcher_of(target: Target, request: Request) -> HostLauncher:
    """Return the launcher of a request. Raises RequestError: it asks for what hosts that stay do not have."""
    if request.queue is not None or request.wait_s is not None:
        raise RequestError(
            f"--queue, --wait: the slice {target.slice.name} is no node pool of a cluster; leave them out"
        )
    return HostLauncher()


def _named(target: Target) -> str:
    names = [host.name for host in target.hosts]
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
    missing = [agent for agent, known in zip(agents, facts, strict=True) if not known["bundle_present"]]
    return _send(bundle, missing)


def stage_if_missing(bundle: Bundle, agents: Sequence[Agent]) -> int:
    """Send a folder to the hosts that do not have it; return how many these are.

    Raises:
        HostsError: as of `stage`.
    """
    answers = ask_all(agents, "stage", [{"sha256": bundle.sha256}] * len(agents))
    there = all_or_error("the folder could not be sent:", answers)
    return _send(bundle, [agent for agent, it in zip(agents, there, strict=True) if not it["present"]])


def _send(bundle: Bundle, missing: Sequence[Agent]) -> int:
    # Hosts that share one directory (the local target's) need it once.
    missing = list({(agent.root, agent.link): agent for agent in missing}.values())
    request = {"sha256": bundle.sha256, "archive_base64": bundle.text}
    all_or_error("the code could not be sent:", ask_all(missing, "stage", [request] * len(missing)))
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
        (agent.root, agent.link): (agent, known["image_needs_bytes"])
        for agent, known in zip(agents, facts, strict=True)
        if not known["image_present"]
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
