"""One container by its name: how it fares, signals to it, its end, and how the job's own end is told from it."""

from __future__ import annotations

import json
import os
import signal

from contracts import atomic

from . import docker_client
from .files import read_json, tail_of
from .proc import children, wait_until
from .protocol import Failed
from .supervisor_log import note

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
        raise docker_client.failure(f"the container {self.name} cannot be looked at", found.complaint)

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
            atomic.remove(self._marker)
        return problem

    def _ask(self, arguments: list[str], limit_s: float = ANSWER_LIMIT_S) -> docker_client.Answer:
        return docker_client.ask(arguments, limit_s, docker=self.docker)


def name_of(run_id: str, attempt: int, process_id: int) -> str:
    return f"tpu-stack-{run_id}-{attempt}-{process_id}"


def of(control_dir: str) -> Container | None:
    """The container that Docker may still have of a control directory's process; None: there is none to end."""
    marker = os.path.join(control_dir, MARKER)
    said = read_json(marker)
    return Container(said["name"], said["docker"], said["as_root"], marker) if said else None


DOCKERS_OWN = 125
"""Exit code of the client where Docker, and not the job, has failed."""
NEVER = "0001-01-01"


def look_back(container: Container, ended: Json, log_path: str) -> None:
    """Put into `ended` what the job's own end was, and say it in words where Docker had a part in it."""
    state: Json | None = None
    try:
        state = container.state()
    except Failed as failure:
        note(failure.message)
    said = docker_client.core("\n".join(tail_of(log_path)[-3:]))
    ended.update(judged(ended["code"], ended["signal"], state, said))


def judged(code: int | None, signum: int | None, state: Json | None, said: str) -> Json:
    """Exit code, signal, and the words for an end that is not the job's own. Pure.

    code, signum: the client's. state: Docker's of the container; empty if there is none, None if Docker is silent.
    """
    if signum is not None:
        return {"code": None, "signal": signum}
    if state and state["StartedAt"].startswith(NEVER):
        words = f"Docker could not start the container: {state['Error'] or said}"
        return {"code": DOCKERS_OWN, "signal": None, "words": words}
    if state and state["Running"]:
        return {"code": DOCKERS_OWN, "signal": None, "words": f"Docker lost the container: {said}"}
    if state and (code != DOCKERS_OWN or state["ExitCode"] == code):
        found = as_bare(state["ExitCode"])
        if state["OOMKilled"]:
            found["words"] = "the kernel killed it for want of memory (OOMKilled)"
        return found
    if code == DOCKERS_OWN:
        return {"code": code, "signal": None, "words": f"Docker went away while the job ran: {said}"}
    return as_bare(code)


def as_bare(code: int | None) -> Json:
    """An init that ends for a signal to its child says so by its exit code; a bare process would have it in its end."""
    if code is not None and 128 < code <= 128 + 64:
        return {"code": None, "signal": code - 128}
    return {"code": code, "signal": None}
