"""The container of a job's process, made ready to be started: its directories, its name, itself."""

from __future__ import annotations

import json
import os

from . import container_command as command
from . import engine
from .container import GONE, MARKER, Container, name_of, of
from .container_access import NODE_GLOBS, access, nodes, privileged
from .facts import user_name
from .files import tail_of, write_json
from .notes import note
from .process import Process
from .protocol import Failed, remedy_for
from .waiting import wait_until

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json

MADE_LIMIT_S = 30.0
"""Docker writes a few files for a container and fetches nothing; but it may be busy with the images of others."""


class Enclosure:
    """A container that is there as soon as `argv` has been run with `environment`.

    words: what the run's log begins with. made: the file that is there then.
    """

    def __init__(
        self, name: str, argv: list[str], environment: dict[str, str], words: str | None, made: str
    ) -> None:
        self.name, self.argv, self.environment, self.words, self._made = name, argv, environment, words, made

    def wait(self, client: int, log_path: str) -> None:
        """Until Docker has made the container. client: the pid of what was run.

        Raises:
            Failed: it could not, or took too long.
        """

        def has_ended() -> bool:
            return os.waitid(os.P_PID, client, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

        def is_made() -> bool:
            return os.path.exists(self._made) and os.path.getsize(self._made) > 0

        wait_until(lambda: is_made() or has_ended(), MADE_LIMIT_S)
        if not is_made():
            complaint = engine.core("\n".join(tail_of(log_path)[-5:])) or "it says nothing"
            if not has_ended():
                complaint = f"no answer within {MADE_LIMIT_S:g} s"
            raise engine.failure("start: Docker could not make the container", complaint)


def enclose(process: Process, request: Json) -> Enclosure:
    """Get ready for the container of a process. It is on this host's books before it is on Docker's.

    Raises:
        Failed: Docker does not answer, the name is taken, or a directory is not there; nothing has been started.
    """
    docker = engine.required_program()
    platform = request["container"]["platform"]
    make_mounts(process, request)
    devices = nodes(NODE_GLOBS[platform])
    if platform == "tpu" and not devices:
        raise Failed(
            "start: this host has no TPU", "choose a host that has one, or another platform than tpu"
        )
    if request["container"].get("access") == "privileged":
        who = privileged(platform)
    else:
        who = access(platform, devices, os.getuid(), os.getgid(), sorted(os.getgroups()))
    environment = command.environment(request["env"], os.environ, user_name())
    environment["RUN_CONTROL_DIR"] = process.dir
    root = root_of(process)
    name = name_of(process.run_id, process.attempt, process.process_id)
    own = command.labels(request, root, os.uname().nodename)
    free_name(Container(name, docker), root)
    sweep(root, docker)
    marker = os.path.join(process.dir, MARKER)
    write_json(marker, {"name": name, "docker": docker, "as_root": who.as_root})
    return Enclosure(
        name,
        [docker, *command.run(request, name, process.dir, own, who, environment)],
        {**engine.client_environment(os.environ), **environment},
        None if who.note is None else f"tpu-stack: {who.note}\n",
        os.path.join(process.dir, command.CID),
    )


def root_of(process: Process) -> str:
    return os.path.dirname(os.path.dirname(os.path.dirname(process.dir)))


def make_mounts(process: Process, request: Json) -> None:
    """Make the directories that are the agent's or the run's own; Docker would make them root's.

    Raises:
        Failed: another one is not there, or the working directory is in none of them.
    """
    found = command.mounts(request["container"], process.dir)
    own = [root_of(process), request["run_dir"], request["env"].get("RUN_CACHE_DIR")]
    for path, is_read_only in found.items():
        if os.path.exists(path):
            continue
        if is_read_only or not any(is_within(path, place) for place in own if place):
            raise Failed(
                f"start: {path} is to be seen in the container and is not on this host",
                "stage the bundle first; mount or make that directory",
            )
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise Failed(f"start: {path} cannot be made: {error.strerror}", remedy_for(error)) from None
    if not any(is_within(request["cwd"], path) for path in found):
        raise Failed(
            f"start: cwd {request['cwd']} is in none of the container's mounts, {', '.join(found)}",
            "add it to them, or correct cwd",
        )


def is_within(path: str, place: str) -> bool:
    return f"{os.path.normpath(path)}/".startswith(f"{os.path.normpath(place).rstrip('/')}/")


def free_name(taken: Container, root: str) -> None:
    """Remove the container that has the name, if any, where it is this agent's own, or an ended one of another's.

    Raises:
        Failed: it is somebody else's, or cannot be removed.
    """
    form = "[{{json .Config.Labels}}, {{json .State.Running}}, {{json .Id}}]"
    found = engine.ask(["container", "inspect", "--format", form, taken.name], docker=taken.docker)
    if not found.is_good:
        if GONE.lower() in found.complaint.lower():
            return
        raise engine.failure("start: Docker could not make the container", found.complaint)
    labels, is_running, number = json.loads(found.out)
    labels = labels or {}
    own = labels.get("tpu-stack.root") == root and labels.get("tpu-stack.host") == os.uname().nodename
    if not own and (is_running or "tpu-stack.run" not in labels):
        how = "runs and" if is_running else "has ended and"
        raise Failed(
            f"start: the name {taken.name} is taken by the container {number[:12]}, which {how} is not this agent's",
            f"if nobody needs it: `docker rm --force {number[:12]}` on this host",
        )
    problem = taken.remove()
    if problem is not None:
        raise engine.failure(f"start: the old container {taken.name} cannot be removed", problem)
    note(f"removed the container {taken.name}, left over from an earlier start")


def sweep(root: str, docker: str) -> None:
    """Remove what ended without a supervisor, as in a restart of this host: Docker keeps such a container for ever."""
    arguments = ["ps", "--all", "--filter", f"label=tpu-stack.root={root}"]
    arguments += ["--filter", f"label=tpu-stack.host={os.uname().nodename}"]
    for status in ("exited", "created", "dead"):
        arguments += ["--filter", f"status={status}"]
    form = "\t".join(f'{{{{.Label "tpu-stack.{name}"}}}}' for name in ("run", "attempt", "process"))
    found = engine.ask([*arguments, "--format", form], docker=docker)
    for line in found.out.splitlines() if found.is_good else ():
        run_id, attempt, process_id = line.split("\t")
        other = Process(root, run_id, int(attempt), int(process_id))
        if other.is_supervised() or other.is_starting():
            continue
        left = of(other.dir) or Container(name_of(run_id, other.attempt, other.process_id), docker)
        problem = left.remove()
        note(f"removed {left.name}, which nobody watched" if problem is None else f"{left.name}: {problem}")
