"""Prepares a container: its directories, its name, its user, and the arguments of `docker run`."""

from __future__ import annotations

import json
import os
import re
import stat

from contracts import atomic
from contracts.errors import remedy_for
from contracts.host_interface import DEVICE_GLOBS, SET_BY_IMAGE, VFIO_CONTAINER

from ..attempt_process import Process
from ..proc import user_name, wait_until
from ..protocol import Failed
from ..storage.host_files import last_lines, note
from . import docker_command
from .docker_command import MARKER, NO_SUCH_CONTAINER, Container, container_name, recorded_container

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..protocol import Json


MADE_LIMIT_S = 30.0
"""Docker writes a few files for a container and fetches nothing; but it may be busy with the images of others."""


class ContainerStart:
    """A container that exists once `argv` has been run with `environment`.

    log_preamble: what the run's log begins with. created_path: the file that is there then.
    """

    def __init__(
        self,
        name: str,
        argv: list[str],
        environment: dict[str, str],
        log_preamble: str | None,
        created_path: str,
    ) -> None:
        self.name, self.argv, self.environment, self.log_preamble, self._created_path = (
            name,
            argv,
            environment,
            log_preamble,
            created_path,
        )

    def wait(self, client: int, log_path: str) -> None:
        """Wait until Docker has made the container. client: the pid of the `docker` process.

        Raises:
            Failed: it could not, or took too long.
        """

        def has_ended() -> bool:
            return os.waitid(os.P_PID, client, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

        def is_made() -> bool:
            return os.path.exists(self._created_path) and os.path.getsize(self._created_path) > 0

        wait_until(lambda: is_made() or has_ended(), MADE_LIMIT_S)
        if not is_made():
            complaint = docker_command.core("\n".join(last_lines(log_path)[-5:])) or "it says nothing"
            if not has_ended():
                complaint = f"no answer within {MADE_LIMIT_S:g} s"
            raise docker_command.failure("start: Docker could not make the container", complaint)


def prepare_container(process: Process, request: Json) -> ContainerStart:
    """Prepare the container of a process. The agent records it before Docker makes it.

    Raises:
        Failed: Docker does not answer, the name is taken, or a directory is not there; nothing has been started.
    """
    docker = docker_command.required_program()
    platform = request["container"]["platform"]
    make_mounts(process, request)
    devices = nodes([*DEVICE_GLOBS["tpu"], VFIO_CONTAINER]) if platform == "tpu" else []
    if platform == "tpu" and not devices:
        raise Failed(
            "start: this host has no TPU", "choose a host that has one, or another platform than tpu"
        )
    if request["container"].get("access") == "privileged":
        permissions = privileged(platform)
    else:
        permissions = access(platform, devices, os.getuid(), os.getgid(), sorted(os.getgroups()))
    environment = image_environment(request["env"], os.environ, user_name())
    environment["RUN_CONTROL_DIR"] = process.dir
    root = agent_root(process)
    name = container_name(process.run_id, process.attempt, process.process_id)
    own = label_arguments(request, root, os.uname().nodename)
    free_name(Container(name, docker), root)
    sweep(root, docker)
    marker = os.path.join(process.dir, MARKER)
    atomic.write_json(marker, {"name": name, "docker": docker, "as_root": permissions.as_root})
    return ContainerStart(
        name,
        [docker, *run_arguments(request, name, process.dir, own, permissions, environment)],
        {**docker_command.client_environment(os.environ), **environment},
        None if permissions.note is None else f"tpu-stack: {permissions.note}\n",
        os.path.join(process.dir, CID),
    )


def agent_root(process: Process) -> str:
    return os.path.dirname(os.path.dirname(os.path.dirname(process.dir)))


def make_mounts(process: Process, request: Json) -> None:
    """Make the mounted directories that belong to the agent or the run; Docker would make them root's.

    Raises:
        Failed: another mounted directory does not exist, or the working directory is in none of them.
    """
    mounts = container_mounts(request["container"], process.dir)
    own = [agent_root(process), request["run_dir"], request["env"].get("RUN_CACHE_DIR")]
    for path, is_read_only in mounts.items():
        if os.path.exists(path):
            continue
        if is_read_only or not any(is_within(path, place) for place in own if place):
            raise Failed(
                f"start: {path} is a mount of the container and does not exist on this host",
                "stage the bundle first; mount or make that directory",
            )
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise Failed(f"start: {path} cannot be made: {error.strerror}", remedy_for(error)) from None
    if not any(is_within(request["cwd"], path) for path in mounts):
        raise Failed(
            f"start: cwd {request['cwd']} is in none of the container's mounts, {', '.join(mounts)}",
            "add it to them, or correct cwd",
        )


def is_within(path: str, place: str) -> bool:
    return f"{os.path.normpath(path)}/".startswith(f"{os.path.normpath(place).rstrip('/')}/")


def free_name(taken: Container, root: str) -> None:
    """Remove a container that has the name, if it is this agent's own, or another agent's that has ended.

    Raises:
        Failed: it is somebody else's, or cannot be removed.
    """
    form = "[{{json .Config.Labels}}, {{json .State.Running}}, {{json .Id}}]"
    answer = docker_command.ask(["container", "inspect", "--format", form, taken.name], docker=taken.docker)
    if not answer.is_good:
        if NO_SUCH_CONTAINER.lower() in answer.complaint.lower():
            return
        raise docker_command.failure("start: Docker could not make the container", answer.complaint)
    labels, is_running, number = json.loads(answer.out)
    labels = labels or {}
    own = labels.get("tpu-stack.root") == root and labels.get("tpu-stack.host") == os.uname().nodename
    if not own and (is_running or "tpu-stack.run" not in labels):
        condition = "runs and" if is_running else "has ended and"
        raise Failed(
            f"start: the name {taken.name} is taken by the container {number[:12]}, which {condition} is not this "
            "agent's",
            f"if nobody needs it: `docker rm --force {number[:12]}` on this host",
        )
    problem = taken.remove()
    if problem is not None:
        raise docker_command.failure(f"start: the old container {taken.name} cannot be removed", problem)
    note(f"removed the container {taken.name}, left over from an earlier start")


def sweep(root: str, docker: str) -> None:
    """Remove containers that ended without a supervisor, as in a restart of this host: Docker keeps them for ever."""
    arguments = ["ps", "--all", "--filter", f"label=tpu-stack.root={root}"]
    arguments += ["--filter", f"label=tpu-stack.host={os.uname().nodename}"]
    for status in ("exited", "created", "dead"):
        arguments += ["--filter", f"status={status}"]
    form = "\t".join(f'{{{{.Label "tpu-stack.{name}"}}}}' for name in ("run", "attempt", "process"))
    answer = docker_command.ask([*arguments, "--format", form], docker=docker)
    for line in answer.out.splitlines() if answer.is_good else ():
        run_id, attempt, process_id = line.split("\t")
        ended_process = Process(root, run_id, int(attempt), int(process_id))
        if ended_process.is_supervised() or ended_process.is_starting():
            continue
        left = recorded_container(ended_process.dir) or Container(
            container_name(run_id, ended_process.attempt, ended_process.process_id), docker
        )
        problem = left.remove()
        note(
            f"removed {left.name}, which no supervisor watched"
            if problem is None
            else f"{left.name}: {problem}"
        )


SAVE_LIMIT_S = 60
"""How long a job may save after Docker's daemon was told to end, as at a shutdown."""
CID = "container.id"
"""The file, in the control directory, that is there once Docker has made the container."""
# Of the host's environment: how a job gets out, where its buckets are, and what its framework is set to.
PASSED_ON = re.compile(
    "(STORAGE|SECRET_MANAGER)_EMULATOR_HOST|TENSORSTORE_GCS_HTTP_URL|GCSFS_.+|NO_GCE_CHECK|(HTTPS?|NO)_PROXY|(https?|no)_proxy|(JAX|XLA|LIBTPU|TPU|TF|PJRT|TORCH|NCCL|GLOO)_.+"
)
NETWORK = ["--network", "host", "--log-driver", "none", "--pull", "never"]


def run_arguments(
    request: Json,
    name: str,
    control_dir: str,
    own: list[str],
    access: Access,
    environment: Iterable[str],
) -> list[str]:
    """`docker run` for one process of an attempt; its end leaves the container, which says more than an exit code.

    own: its labels. environment: names.
    """
    container = request["container"]
    cpus = request["cpus"]
    shm = container.get("shm_bytes")
    return [
        *["run", "--name", name, "--cidfile", os.path.join(control_dir, CID)],
        *own,
        *NETWORK,
        *["--stop-timeout", str(SAVE_LIMIT_S)],
        # An accelerator's driver pins what it transfers; a Docker inside of a container may not raise the limit.
        *([] if container["platform"] == "cpu" else ["--ulimit", "memlock=-1"]),
        *access.arguments,
        *([] if shm is None else ["--shm-size", str(shm)]),
        *([] if cpus is None else ["--cpuset-cpus", ",".join(map(str, sorted(set(cpus))))]),
        *mount_arguments(container_mounts(container, control_dir)),
        *["--workdir", request["cwd"]],
        *named(environment),
        *program_words(container["image"], request["argv"], access.become),
    ]


def deliver_arguments(
    request: Json, name: str, uid: int, gid: int, arguments: list[str], environment: Iterable[str]
) -> list[str]:
    """`docker run` for a short program of the same image that reads its work from stdin."""
    user_arguments, become = as_user(uid, gid)
    container = request["container"]
    visible = [*container["read_only_mounts"], os.path.dirname(request["log_path"])]
    return [
        *["run", "--rm", "--interactive", "--name", name, *NETWORK, *user_arguments],
        *mount_arguments(container_mounts({"mounts": [], "read_only_mounts": visible})),
        *named(environment),
        *program_words(container["image"], arguments, become),
    ]


def label_arguments(request: Json, root: str, host: str) -> list[str]:
    labels = {"run": request["run_id"], "attempt": request["attempt"], "process": request["process_id"]}
    labels.update(root=root, host=host)
    return [word for name, value in labels.items() for word in ("--label", f"tpu-stack.{name}={value}")]


def program_words(image: str, argv: list[str], become: list[str]) -> list[str]:
    """The image's own tini is the first process: it passes on signals, which a first process itself may not get.

    become: the words that run first, and are replaced by tini.
    """
    command = [*become, "tini", "--", *argv]
    return ["--entrypoint", command[0], image, *command[1:]]


def container_mounts(container: Json, *own: str) -> dict[str, bool]:
    """Path → whether it is read-only, of all that the container mounts from the host under the same path."""
    mounts = {os.path.normpath(path): True for path in container["read_only_mounts"]}
    for path in [*container["mounts"], *own]:
        mounts[os.path.normpath(path)] = False
    return dict(sorted(mounts.items()))


def mount_arguments(mounts: Mapping[str, bool]) -> list[str]:
    arguments = []
    for path, is_read_only in mounts.items():
        fields = ["type=bind", _field(f"source={path}"), _field(f"target={path}")]
        arguments += ["--mount", ",".join([*fields, *(["readonly"] if is_read_only else [])])]
    return arguments


def _field(text: str) -> str:
    """A field of the comma-separated line that --mount takes."""
    return '"{}"'.format(text.replace('"', '""')) if re.search('[",\n\r]', text) else text


def named(names: Iterable[str]) -> list[str]:
    """Arguments that name variables: the client takes their values from its environment; no command line shows them."""
    return [word for name in sorted(set(names)) for word in ("--env", name)]


def image_environment(
    request_env: Mapping[str, str], host_env: Mapping[str, str], user: str
) -> dict[str, str]:
    """The environment of a process in an image: the request's, and the host's variables that a job needs.

    Raises:
        Failed: the request sets what would steer Docker's client instead.
    """
    wrong = sorted(name for name in request_env if SET_BY_IMAGE.fullmatch(name))
    if wrong:
        message = f"start: env {', '.join(wrong)} is the image's to set, and would steer Docker's client"
        raise Failed(message, "leave it out, or `--runtime bare`")
    from_host = {name: value for name, value in host_env.items() if PASSED_ON.fullmatch(name)}
    return {"USER": user, "LOGNAME": user, **from_host, **request_env}


if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NamedTuple

    class Node(NamedTuple):
        path: str
        mode: int
        uid: int
        gid: int

    class Access(NamedTuple):
        """become: what runs in the container before the job's init, as root, to become its user."""

        arguments: list[str]
        as_root: bool
        note: str | None
        become: list[str]
else:
    from collections import namedtuple

    Node = namedtuple("Node", "path mode uid gid")
    Access = namedtuple("Access", "arguments as_root note become")

LARGEST_ID = 2**31 - 1
"""What Docker takes for a user or a group. OS Login gives ids up to 2**32 (3721906406 was seen)."""


def nodes(patterns: Sequence[str]) -> list[Node]:
    """The device nodes of this host that match, sorted; other files of such a name are left out."""
    import glob

    device_nodes = []
    for path in sorted({path for pattern in patterns for path in glob.glob(pattern)}):
        status = os.stat(path)
        if stat.S_ISCHR(status.st_mode):
            device_nodes.append(Node(path, status.st_mode, status.st_uid, status.st_gid))
    return device_nodes


def access(platform: str, devices: Sequence[Node], uid: int, gid: int, groups: Sequence[int]) -> Access:
    """User, groups, capabilities and devices of a container, as arguments of `docker create`. Pure.

    The user is the agent's own. A node that this user may not open is opened by its group; one that its owner alone
    may open, by root, who then needs to get past the owners of files as well: the run directory is the user's.
    """
    may = {node: _may_open(node, uid, {gid, *groups}) for node in devices}
    by_group = {node.gid for node in devices if not may[node] and node.mode & 0o060 == 0o060}
    closed = [node.path for node in devices if not may[node] and node.mode & 0o060 != 0o060]
    other_groups = sorted({*groups, *by_group} - {gid})
    become: list[str] = []
    if closed:
        # Root gets past the groups of files too, so that those that Docker does not take are not missed.
        fit = [group for group in other_groups if group <= LARGEST_ID]
        arguments = [*_user("0:0", fit), "--cap-add", "DAC_OVERRIDE"]
    else:
        arguments, become = as_user(uid, gid, other_groups)
    for node in devices:
        arguments += ["--device", node.path]
    if platform == "gpu":
        arguments += ["--gpus", "all"]
    note = None
    if closed:
        note = (
            f"only their owner may open {', '.join(closed)}, so the container runs as root, whose its files are;"
            " a udev rule that gives them a group, or mode 0666, mends it"
        )
    return Access(arguments, bool(closed), note, become)


def as_user(uid: int, gid: int, groups: Sequence[int] = ()) -> tuple[list[str], list[str]]:
    """Arguments by which a container's process is a user, and the words in front of its program. Pure.

    Docker refuses an id above 2147483647, the kernel takes it. Then the container begins as root with the two
    capabilities that it takes to change ids, and the first program, `setpriv` of the image's util-linux, becomes the
    user and is replaced by the job's init: of root nothing is left, the process and its files are the user's.
    """
    if max(uid, gid, *groups) <= LARGEST_ID:
        return _user(f"{uid}:{gid}", groups), []
    group_arguments = ["--groups", ",".join(map(str, groups))] if groups else ["--clear-groups"]
    capabilities = ["--cap-add", "SETUID", "--cap-add", "SETGID"]
    return [*_user("0:0", []), *capabilities], [
        "setpriv",
        "--reuid",
        str(uid),
        "--regid",
        str(gid),
        *group_arguments,
        "--",
    ]


def _user(user: str, groups: Sequence[int]) -> list[str]:
    added = [word for group in groups for word in ("--group-add", str(group))]
    return ["--user", user, *added, "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]


def privileged(platform: str) -> Access:
    """The same for `--container-access privileged`, if devices alone are not enough: all rights of the host's root."""
    gpus = ["--gpus", "all"] if platform == "gpu" else []
    note = "the container is privileged and runs as the host's root, whose the files are that it makes"
    return Access(["--user", "0:0", "--privileged", *gpus], True, note, [])


def _may_open(node: Node, uid: int, groups: set[int]) -> bool:
    if node.uid == uid:
        return node.mode & 0o600 == 0o600
    if node.gid in groups:
        return node.mode & 0o060 == 0o060
    return node.mode & 0o006 == 0o006
