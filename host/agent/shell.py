"""A shell in the place of a run's process: the verb shell says how to begin one, and `enter` becomes it."""

from __future__ import annotations

import contextlib
import os
import sys

from contracts.host_interface import SECRET_NAMES, SET_BY_IMAGE, SHELL

from .attempt_process import Process
from .containers.docker_command import client_environment
from .protocol import Failed
from .stack_traces import process_environment, processes_of_ranks, running_process
from .start import ENTRY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from .containers.docker_command import Container
    from .protocol import Json

CONTROL_DIR_VARIABLE = "RUN_CONTROL_DIR"
"""By this variable the agent knows the processes of a run, which it kills at its end."""


def shell(request: Json) -> Json:
    """The command that becomes a shell in the place of a running process."""
    process = running_process(request)
    key = [process.run_id, str(process.attempt), str(process.process_id)]
    return {"argv": [sys.executable, "-S", "-E", ENTRY, "_shell", request["root"], *key]}


def enter(root: str, run_id: str, attempt: str, process_id: str) -> NoReturn:
    """Become a shell in the working directory and with the variables of a process's first rank, but for its secrets;
    in its container, where it has one."""
    process = Process(root, run_id, int(attempt), int(process_id))
    try:
        container, pids = process.container, processes_of_ranks(process)
    except Failed as failure:
        sys.exit(f"{failure.message}; {failure.remedy}")
    folder, environment = None, {}
    if pids:
        environment = process_environment(pids[0])
        with contextlib.suppress(OSError):  # it is another user's
            folder = os.readlink(f"/proc/{pids[0]}/cwd")
    secrets = [name for name in environment.get(SECRET_NAMES, "").split(",") if name]
    for name in (*secrets, SECRET_NAMES, CONTROL_DIR_VARIABLE):
        environment.pop(name, None)
    place = f"{folder or '/'}{'' if container is None else ' in its container'}"
    lacking = f", but for {', '.join(secrets)}" if secrets else ""
    owner = f"rank {environment.get('RUN_PROCESS_ID')}" if environment else "the container"
    print(f"{run_id}: {place}, with the variables of {owner}{lacking}", file=sys.stderr, flush=True)
    if "TERM" in os.environ:
        environment["TERM"] = os.environ["TERM"]
    if container is None:
        os.chdir(folder or "/")
        os.execvpe(SHELL[0], SHELL, environment)
    command = in_container(container, environment, folder, sys.stdin.isatty())
    os.execve(command[0], command, {**environment, **client_environment(os.environ)})


def in_container(
    container: Container, environment: dict[str, str], folder: str | None, has_terminal: bool
) -> list[str]:
    """The command for a shell in a container. Docker's client takes the values from its own environment. Pure."""
    names = [name for name in environment if not SET_BY_IMAGE.fullmatch(name)]
    path = ["--env", f"PATH={environment['PATH']}"] if "PATH" in environment else []
    return [
        *(container.docker, "exec", "--interactive", *(["--tty"] if has_terminal else [])),
        *([] if folder is None else ["--workdir", folder]),
        *(word for name in names for word in ("--env", name)),
        *path,
        container.name,
        *SHELL,
    ]
