"""One container by its name: how it fares, signals to it, and its end, after which Docker has nothing left of it."""

from __future__ import annotations

import json
import os
import signal

from . import engine
from .files import read_json, remove
from .proc import children
from .protocol import Failed
from .waiting import wait_until

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .protocol import Json

ANSWER_LIMIT_S = 10.0
REMOVAL_LIMIT_S = 10.0
"""A daemon that hangs: a stop ends the processes by itself, and says in time that Docker has kept its books."""
RUNNING_LIMIT_S = 5.0
MARKER = "container.json"
GONE = "No such container"


class Container:
    """A container that this agent has made, or is about to make, for the process of a control directory.

    as_root: its process is another user's, whom only Docker can reach.
    """

    def __init__(self, name: str, docker: str, as_root: bool = False, marker: str | None = None) -> None:
        self.name, self.docker, self.as_root, self._marker = name, docker, as_root, marker

    def state(self) -> Json:
        """Docker's own words (Status, Running, Pid, ExitCode, OOMKilled, Error, StartedAt); empty: there is none.

        Raises:
            Failed: Docker does not answer.
        """
        found = self._ask(["container", "inspect", "--format", "{{json .State}}", self.name])
        if found.is_good:
            return dict(json.loads(found.out))
        if GONE.lower() in found.complaint.lower():
            return {}
        raise engine.failure(f"the container {self.name} cannot be looked at", found.complaint)

    def signal(self, signum: int, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Send a signal to the job, by way of its init; whether it was sent.

        One that has been made and does not run yet gets it as soon as it does.
        """
        sent = False

        def is_settled() -> bool:
            nonlocal sent
            answer = self._ask(["kill", "--signal", signal.Signals(signum).name, self.name])
            sent = answer.is_good
            return sent or "is not running" not in answer.complaint or not is_wanted()

        wait_until(is_settled, RUNNING_LIMIT_S, 0.1)
        return sent

    def job_pid(self) -> int | None:
        """The job's process as this host numbers it: the child of the container's init. None: it has none yet."""
        init = self.state().get("Pid") or 0
        return min(children(init), default=None) if init else None

    def remove(self, limit_s: float = REMOVAL_LIMIT_S) -> str | None:
        """End it and take it out of Docker's books; why that could not be done, if it could not."""
        problem: str | None = None

        def is_removed() -> bool:
            nonlocal problem
            answer = self._ask(["rm", "--force", "--volumes", self.name], limit_s)
            gone = answer.is_good or GONE.lower() in answer.complaint.lower()
            problem = None if gone else answer.complaint
            return gone or answer.code is None or "is already in progress" not in answer.complaint

        try:
            wait_until(is_removed, limit_s, 0.2)
        except Failed as failure:
            problem = failure.message
        if problem is None and self._marker is not None:
            remove(self._marker)
        return problem

    def _ask(self, arguments: list[str], limit_s: float = ANSWER_LIMIT_S) -> engine.Answer:
        return engine.ask(arguments, limit_s, docker=self.docker)


def name_of(run_id: str, attempt: int, process_id: int) -> str:
    return f"tpu-stack-{run_id}-{attempt}-{process_id}"


def of(control_dir: str) -> Container | None:
    """The container that Docker may still have of a control directory's process; None: there is none to end."""
    marker = os.path.join(control_dir, MARKER)
    said = read_json(marker)
    return Container(said["name"], said["docker"], said["as_root"], marker) if said else None
