"""What Docker is told of a job's container: argument lists and environments. Pure."""

from __future__ import annotations

import os
import re

from .container_access import as_user
from .protocol import Failed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .container_access import Access
    from .protocol import Json

SAVE_LIMIT_S = 60
"""How long a daemon that is told to end, as at a shutdown, lets a job save."""
CID = "container.id"
"""The file, in the control directory, that is there once Docker has made the container."""
# Of the host's environment: how a job gets out, where its buckets are, and what its framework is set to.
PASSED_ON = re.compile(
    "STORAGE_EMULATOR_HOST|TENSORSTORE_GCS_HTTP_URL|(HTTPS?|NO)_PROXY|(https?|no)_proxy|(JAX|XLA|LIBTPU|TPU|TF|PJRT)_.+"
)
STEERS_CLIENT = re.compile("HOME|PATH|LD_.*|DOCKER_.*")
NETWORK = ["--network", "host", "--log-driver", "none", "--pull", "never"]


def run(
    request: Json, name: str, control_dir: str, own: list[str], access: Access, environment: Iterable[str]
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
        *mount_arguments(mounts(container, control_dir)),
        *["--workdir", request["cwd"]],
        *named(environment),
        *program(container["image"], request["argv"], access.become),
    ]


def deliver(
    request: Json, name: str, uid: int, gid: int, arguments: list[str], environment: Iterable[str]
) -> list[str]:
    """`docker run` for a short program of the same image that reads its work from stdin."""
    who, become = as_user(uid, gid)
    container = request["container"]
    seen = [*container["read_only_mounts"], os.path.dirname(request["log_path"])]
    return [
        *["run", "--rm", "--interactive", "--name", name, *NETWORK, *who],
        *mount_arguments(mounts({"mounts": [], "read_only_mounts": seen})),
        *named(environment),
        *program(container["image"], arguments, become),
    ]


def labels(request: Json, root: str, host: str) -> list[str]:
    found = {"run": request["run_id"], "attempt": request["attempt"], "process": request["process_id"]}
    found.update(root=root, host=host)
    return [word for name, value in found.items() for word in ("--label", f"tpu-stack.{name}={value}")]


def program(image: str, argv: list[str], become: list[str]) -> list[str]:
    """The image's own tini is the first process: it passes on signals, which a first process itself may not get.

    become: the words that run first, and are replaced by tini.
    """
    words = [*become, "tini", "--", *argv]
    return ["--entrypoint", words[0], image, *words[1:]]


def mounts(container: Json, *own: str) -> dict[str, bool]:
    """Path → whether it is read-only, of everything that the container sees of the host under the same name."""
    found = {os.path.normpath(path): True for path in container["read_only_mounts"]}
    for path in [*container["mounts"], *own]:
        found[os.path.normpath(path)] = False
    return dict(sorted(found.items()))


def mount_arguments(found: Mapping[str, bool]) -> list[str]:
    arguments = []
    for path, is_read_only in found.items():
        fields = ["type=bind", _field(f"source={path}"), _field(f"target={path}")]
        arguments += ["--mount", ",".join([*fields, *(["readonly"] if is_read_only else [])])]
    return arguments


def _field(text: str) -> str:
    """A field of the comma-separated line that --mount takes."""
    return '"{}"'.format(text.replace('"', '""')) if re.search('[",\n\r]', text) else text


def named(names: Iterable[str]) -> list[str]:
    """By name alone: the client takes the values from its own environment, and no command line shows them."""
    return [word for name in sorted(set(names)) for word in ("--env", name)]


def environment(request_env: Mapping[str, str], host_env: Mapping[str, str], user: str) -> dict[str, str]:
    """What a process of the image finds: the request's, and of the host's what a job needs, where that is silent.

    Raises:
        Failed: the request sets what would steer Docker's client instead.
    """
    wrong = sorted(name for name in request_env if STEERS_CLIENT.fullmatch(name))
    if wrong:
        message = f"start: env {', '.join(wrong)} is the image's to set, and would steer Docker's client"
        raise Failed(message, "leave it out, or `--runtime bare`")
    of_host = {name: value for name, value in host_env.items() if PASSED_ON.fullmatch(name)}
    return {"USER": user, "LOGNAME": user, **of_host, **request_env}
