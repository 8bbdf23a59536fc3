"""The `docker` command as this user meets it, never without a limit; its complaints; and one container by its name."""

from __future__ import annotations

import json
import os
import re
import signal

from contracts import atomic

from ..proc import NO_MEMORY, children, user_name, wait_until
from ..protocol import Failed
from ..storage.host_files import last_lines, note, read_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..protocol import Json


ANSWER_LIMIT_S = 15.0
STARTING = "`sudo systemctl start docker`; why it does not run: `journalctl --unit docker`"
# What the command says → what to do about it. The first that is found counts; {user} is whoever runs the agent.
REMEDIES = (
    ("permission denied while trying to connect", "`sudo usermod --append --groups docker {user}`, then log in again"),
    ("dial unix .* permission denied", "`sudo usermod --append --groups docker {user}`, then log in again"),
    ("cannot connect to the docker daemon|is the docker daemon running", STARTING),
    ("unexpected eof|connection reset by peer", f"Docker went away meanwhile; {STARTING}"),
    ("no such image|unable to find image", "pull it; one that was built on this host: `fab build`"),
    ("could not select device driver.*gpu", "install the NVIDIA Container Toolkit on this host, and restart Docker"),
    ("gathering device information", "the device is gone; see `dmesg` on this host, or choose another one"),
    ("bind source path does not exist", "make that directory, or leave it out of the mounts"),
    ("tini.*executable file not found", "this is no image of `fab build`: those have tini; build or name another"),
    ("setpriv.*executable file not found", "your user id is larger than Docker takes: the image needs util-linux"),
    ("no space left on device", "`docker image ls` and `docker image rm` on this host, or a larger disk"),
)  # fmt: skip
# What the client itself reads; the rest of this agent's environment is none of its business.
READ_BY_CLIENT = re.compile("HOME|PATH|LANG|DOCKER_.*|XDG_.*|SSH_AUTH_SOCK")


class Answer:
    """The output of the command. code: 0 is success; None: there was no answer within the limit."""

    def __init__(self, code: int | None, out: str, complaint: str) -> None:
        self.code, self.out, self.complaint = code, out, complaint

    @property
    def is_good(self) -> bool:
        return self.code == 0


def program() -> str | None:
    """The `docker` command by its absolute path, if there is one."""
    import shutil

    path = shutil.which("docker")
    return None if path is None else os.path.abspath(path)


def required_program() -> str:
    path = program()
    if path is None:
        raise Failed(
            "there is no `docker` on this host's PATH", "`fab deploy` installs it; or `--runtime bare`"
        )
    return path


def client_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of this agent's environment that the client needs, without the host's other secrets."""
    return {name: value for name, value in environ.items() if READ_BY_CLIENT.fullmatch(name)}


def ask(arguments: list[str], limit_s: float = ANSWER_LIMIT_S, docker: str | None = None) -> Answer:
    """Run `docker` with these arguments; a client that does not end within the limit is killed.

    Raises:
        Failed: there is no such command on this host.
    """
    import subprocess  # not at the top: every verb loads this file, and few ask Docker

    try:
        done = subprocess.run(
            [docker or required_program(), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            env=client_environment(os.environ),
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(None, "", f"Docker gave no answer within {limit_s:g} s")
    except OSError as error:
        raise Failed(
            f"{docker} cannot be run: {error.strerror}", "install Docker anew on this host"
        ) from None
    return Answer(
        done.returncode, done.stdout.decode(errors="replace"), core(done.stderr.decode(errors="replace"))
    )


def core(complaint: str) -> str:
    """The error in one line, without the command's introduction and warnings."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    relevant = [line for line in lines if not re.match("WARNING|DEPRECATED|See '|Run '|time=", line)] or lines
    joined = " ".join(relevant[-3:])
    return re.sub(r"^(docker: )?(Error response from daemon: |Error: )?", "", joined)[:600]


def docker_remedy(complaint: str, user: str, otherwise: str = STARTING) -> str:
    """The remedy for a complaint of Docker's. Pure."""
    for pattern, remedy in REMEDIES:
        if re.search(pattern, complaint, re.IGNORECASE | re.DOTALL):
            return remedy.format(user=user)
    return otherwise


def is_no_answer(complaint: str) -> bool:
    """Whether Docker is not there to be asked, as while it is being installed or restarted. Pure."""
    rule = "cannot connect to the docker|docker daemon running|no answer within|no `docker` on|unexpected eof"
    return re.search(rule, complaint, re.IGNORECASE) is not None


def failure(action: str, complaint: str) -> Failed:
    otherwise = "see what Docker says there; `docker info` on that host"
    return Failed(f"{action}: {complaint}", docker_remedy(complaint, user_name(), otherwise))


CONTAINER_LIMIT_S = 10.0
REMOVAL_LIMIT_S = 10.0
"""A daemon that hangs: a stop ends the processes by itself, and says in time that Docker has kept its books."""
RUNNING_LIMIT_S = 20.0
"""From made to running, beside whatever else keeps the host busy; a stop that gave up earlier would never arrive."""
MARKER = "container.json"
NO_SUCH_CONTAINER = "No such container"


class Container:
    """A container that this agent has made, or is about to make, for the process of a control directory.

    as_root: its process is another user's, whom only Docker can reach.
    """

    def __init__(self, name: str, docker: str, as_root: bool = False, marker: str | None = None) -> None:
        self.name, self.docker, self.as_root, self._marker = name, docker, as_root, marker

    def state(self) -> Json:
        """Docker's state of the container (Status, Running, Pid, ExitCode, OOMKilled, Error, StartedAt); empty if none.

        Raises:
            Failed: Docker does not answer.
        """
        answer = self._ask(["container", "inspect", "--format", "{{json .State}}", self.name])
        if answer.is_good:
            return dict(json.loads(answer.out))
        if NO_SUCH_CONTAINER.lower() in answer.complaint.lower():
            return {}
        raise failure(f"the container {self.name} cannot be looked at", answer.complaint)

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
        """Kill the container and remove it. Returns why that failed, or None."""
        problem: str | None = None

        def is_removed() -> bool:
            nonlocal problem
            answer = self._ask(["rm", "--force", "--volumes", self.name], limit_s)
            is_gone = answer.is_good or NO_SUCH_CONTAINER.lower() in answer.complaint.lower()
            problem = None if is_gone else answer.complaint
            return is_gone or answer.code is None or "is already in progress" not in answer.complaint

        try:
            wait_until(is_removed, limit_s, 0.2)
        except Failed as failure:
            problem = failure.message
        if problem is None and self._marker is not None:
            atomic.remove(self._marker)
        return problem

    def _ask(self, arguments: list[str], limit_s: float = CONTAINER_LIMIT_S) -> Answer:
        return ask(arguments, limit_s, docker=self.docker)


def container_name(run_id: str, attempt: int, process_id: int) -> str:
    return f"tpu-stack-{run_id}-{attempt}-{process_id}"


def recorded_container(control_dir: str) -> Container | None:
    """The container that was recorded for a control directory's process; None if there is none to end."""
    marker = os.path.join(control_dir, MARKER)
    marked = read_json(marker)
    return Container(marked["name"], marked["docker"], marked["as_root"], marker) if marked else None


DOCKERS_OWN = 125
"""Exit code of the client where Docker, and not the job, has failed."""
NEVER = "0001-01-01"


def look_back(container: Container, ended: Json, log_path: str) -> None:
    """Put the job's own exit code and signal into `ended`, and an explanation where Docker caused the end."""
    state: Json | None = None
    try:
        state = container.state()
    except Failed as failure:
        note(failure.message)
    complaint = core("\n".join(last_lines(log_path)[-3:]))
    ended.update(judged(ended["code"], ended["signal"], state, complaint))


def judged(code: int | None, signum: int | None, state: Json | None, complaint: str) -> Json:
    """Exit code, signal, and an explanation of an end that is not the job's own. Pure.

    code, signum: the client's. state: Docker's of the container; empty if there is none, None if Docker is silent.
    """
    if signum is not None:
        return {"code": None, "signal": signum}
    if state and state["StartedAt"].startswith(NEVER):
        explanation = f"Docker could not start the container: {state['Error'] or complaint}"
        return {"code": DOCKERS_OWN, "signal": None, "words": explanation}
    if state and state["Running"]:
        return {"code": DOCKERS_OWN, "signal": None, "words": f"Docker lost the container: {complaint}"}
    if state and (code != DOCKERS_OWN or state["ExitCode"] == code):
        ending = as_bare(state["ExitCode"])
        if state["OOMKilled"]:
            ending["words"] = NO_MEMORY
        return ending
    if code == DOCKERS_OWN:
        return {"code": code, "signal": None, "words": f"Docker went away while the job ran: {complaint}"}
    return as_bare(code)


def as_bare(code: int | None) -> Json:
    """An init that ends for a signal to its child says so by its exit code; a bare process would have it in its end."""
    if code is not None and 128 < code <= 128 + 64:
        return {"code": None, "signal": code - 128}
    return {"code": code, "signal": None}
