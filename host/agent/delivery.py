"""How files are put into a bucket: by the job's own Python, in its own surroundings, which know how to."""

from __future__ import annotations

import itertools
import os

from . import container_command as command
from . import engine
from .container import Container, name_of
from .process import plain_environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json

MODULE = ["-P", "-m", "jobs.runtime.deliver"]
_numbers = itertools.count()


class Delivery:
    """A program that reads from stdin what is to be written; `clear` ends what is left of one that took too long."""

    def __init__(
        self, argv: list[str], cwd: str, environment: dict[str, str], container: Container | None
    ) -> None:
        self.argv, self.cwd, self.environment = argv, cwd, environment
        self._container = container

    def clear(self) -> None:
        if self._container is not None:
            self._container.remove()


def delivery(request: Json, url: str) -> Delivery:
    """The program for a start request's process, bare or in a container of the same image."""
    from .facts import user_name

    argv = [request["argv"][0], *MODULE, url]
    if request["container"] is None:
        return Delivery(argv, request["cwd"], {**plain_environment(), **request["env"]}, None)
    docker = engine.required_program()
    environment = command.environment(request["env"], os.environ, user_name())
    process = name_of(request["run_id"], request["attempt"], request["process_id"])
    name = f"{process}-deliver-{os.getpid()}-{next(_numbers)}"
    return Delivery(
        [docker, *command.deliver(request, name, os.getuid(), os.getgid(), argv, environment)],
        "/",
        {**engine.client_environment(os.environ), **environment},
        Container(name, docker),
    )
