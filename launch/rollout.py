"""All or nothing: preflight on every host, stage, start, joined; or everything that was started is stopped again.

Each phase is one question to every host, asked of all at once.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launch import plan as plans
from launch.hosts import Agent, HostError, HostsError, all_or_error, ask_all
from launch.jobs import Bundle
from launch.plan import Plan

JOIN_LIMIT_S = {"cpu": 180.0, "gpu": 180.0, "tpu": 600.0}
"""By platform, from the start until all are in the group: the first start of a TPU's runtime takes minutes."""
PULL_ATTEMPTS = 5
PULL_LIMIT_S = 3600.0
"""Gigabytes on every host of a large slice, with the pauses between attempts."""
STOP_LIMIT_S = 60.0
"""Beyond the grace: a process is killed within seconds, and a Docker that does not answer is waited for 20 s."""
STOP_NOW_S = 2.0
"""Grace for processes that have nothing to save: they have not joined, or have lost a sibling."""


AGENTS_LIMIT_S = 4.0
"""How long the agents of a run in which a process failed have to end the others and to say what happened; they need
about two seconds. After that the launcher stops what is left."""


class NotJoined(Exception):
    """Not every process entered the group.

    outcome: what the run's is: failed, or that somebody stopped it meanwhile.
    """

    def __init__(self, message: str, outcome: str = "failed") -> None:
        super().__init__(message)
        self.outcome = outcome


def preflight(plan: Plan, agents: Sequence[Agent]) -> list[dict[str, Any]]:
    """Ask every host whether the run can start there; the facts of each.

    Raises:
        HostsError: listing every failed check of every host; nothing has been started.
    """
    requests = [plans.preflight(plan, index, now_s=time.time()) for index in range(plan.processes)]
    answers = ask_all(agents, "preflight", requests)
    errors: list[HostError] = []
    for agent, answer in zip(agents, answers, strict=True):
        if isinstance(answer, HostError):
            errors.append(answer)
            continue
        errors += [
            HostError(host=agent.host, reason=check["message"], remedy=check["remedy"] or "")
            for check in answer["checks"]
            if not check["ok"]
        ]
    if errors:
        raise HostsError("preflight failed, nothing was started:", errors)
    return [answer["facts"] for answer in answers if not isinstance(answer, HostError)]


def stage(plan: Plan, bundle: Bundle, agents: Sequence[Agent], facts: Sequence[dict[str, Any]]) -> int:
    """Send the code to the hosts that do not have it yet; how many that were.

    Raises:
        HostsError: it could not be unpacked somewhere; nothing has been started.
    """
    missing = [agent for agent, known in zip(agents, facts, strict=True) if not known["bundle_present"]]
    # Hosts that share one directory (the local target's) need it once.
    missing = list({(agent.root, agent.link): agent for agent in missing}.values())
    archive = base64.b64encode(bundle.archive).decode()
    request = {"sha256": plan.bundle_sha256, "archive_base64": archive}
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
    say(f"the image is there after {time.monotonic() - began_s:.0f} s")


def start(plan: Plan, agents: Sequence[Agent]) -> None:
    """Start every process, all at once.

    Raises:
        HostsError: some could not be started; those that were have been stopped again.
    """
    answers = ask_all(agents, "start", [plans.start(plan, index) for index in range(plan.processes)])
    if any(isinstance(answer, HostError) for answer in answers):
        stop(agents, plan.run_id, plan.attempt, grace_s=STOP_NOW_S)
        all_or_error("the run could not be started everywhere, so it was stopped again:", answers)


def join(plan: Plan, agents: Sequence[Agent], *, limit_s: float | None = None) -> None:
    """Wait until every process has entered the group. Whoever started them stops them where this raises.

    limit_s: None is JOIN_LIMIT_S of the platform.

    Each host waits for its own process and answers once: watching them costs one journey, however long it takes.

    Raises:
        NotJoined: one failed, or the time ran out: the message says who is missing.
    """
    limit_s = JOIN_LIMIT_S[plan.platform] if limit_s is None else limit_s
    requests = [{**plan.process(index), "limit_s": limit_s} for index in range(plan.processes)]
    answers = ask_all(agents, "join", requests, timeout_s=limit_s + AGENTS_LIMIT_S + 30)
    silent = [str(answer) for answer in answers if isinstance(answer, HostError)]
    if silent:
        raise NotJoined("; ".join(silent))
    answered = [answer for answer in answers if not isinstance(answer, HostError)]
    told = {agent.host: answer["state"] for agent, answer in zip(agents, answered, strict=True)}
    for outcome in ("stopped", "preempted"):
        hosts = [host for host, state in told.items() if state == outcome]
        if hosts:
            raise NotJoined(f"{', '.join(hosts)} left before all had joined: told to stop", outcome)
    if any(_has_failed(answer) for answer in answered):
        raise NotJoined("a process failed before all had joined")
    missing = [
        agent.host for agent, answer in zip(agents, answered, strict=True) if answer["state"] == "starting"
    ]
    if missing:
        raise NotJoined(f"{', '.join(missing)} did not join within {limit_s:.0f} s")


def _has_failed(answer: Mapping[str, Any]) -> bool:
    ended = answer["process"]["state"] not in ("starting", "running")
    return answer["state"] == "failed" or (ended and answer["state"] != "done")


def stop(
    agents: Sequence[Agent], run_id: str, attempt: int, *, grace_s: float
) -> list[dict[str, Any] | HostError]:
    """Stop the attempt's process on every host, in worker order; the agents' answers, errors included."""
    requests = [
        {"run_id": run_id, "attempt": attempt, "process_id": index, "grace_s": grace_s}
        for index in range(len(agents))
    ]
    return ask_all(agents, "stop", requests, timeout_s=grace_s + STOP_LIMIT_S)
