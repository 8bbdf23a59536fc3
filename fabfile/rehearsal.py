"""The task of the rehearsal: a cloud on this machine that can be played with."""

from __future__ import annotations

import os
from typing import Any

from fabfile.terminal import reported, task, whole

ACTIONS = (
    "up, down, status, env, acts; or an act such as kill, cut, preempt (`fab rehearsal acts` lists them)"
)


@task(
    positional=["action"],
    help={
        "action": ACTIONS,
        "hosts": "how many hosts `up` makes (default: 2)",
        "docker": "with `up`: hosts with Docker, and an image registry",
        "host": 'the target of a fault: a host\'s index or name, or "share"',
        "amount": "the amount of a fault: seconds or milliseconds",
        "for_good": "a host that is killed is not started again",
    },
)
@reported
def rehearsal(
    c: Any,
    action: str,
    hosts: str = "2",
    docker: bool = False,
    host: str = "",
    amount: str = "",
    for_good: bool = False,
) -> int:
    """Run a simulated cloud on this machine, and inject faults."""
    from contracts.errors import RequestError
    from rehearsal.daemon.cli import Typed, carry_out
    from rehearsal.state import RehearsalError

    count = whole("--hosts", hosts, least=1) or 0
    typed = Typed(
        action=action,
        hosts=count,
        kind="docker" if docker else "plain",
        host=host,
        amount=amount,
        for_good=for_good,
    )
    try:
        carry_out(typed, os.environ, lambda line: print(line, flush=True))
    except RehearsalError as error:
        raise RequestError(str(error)) from None
    return 0
