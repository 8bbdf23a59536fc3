"""What the launching side, the agent and the processes of a host agree on: device nodes, variables of secrets, files of
the control directory. The agent imports it for every request, so it imports only what loads quickly."""

from __future__ import annotations

import glob
import re

from contracts.errors import RequestError

PROTOCOL_VERSION = 1
"""Of the agent's questions and answers."""
SHELL = ("sh", "-c", "exec $(command -v bash || echo sh)")
"""What `fab ssh` opens in the place of a run's process: the best shell that is there."""

DEVICE_GLOBS: dict[str, tuple[str, ...]] = {
    "tpu": ("/dev/accel*", "/dev/vfio/[0-9]*"),
    "gpu": ("/dev/nvidia[0-9]*",),
    "cpu": (),
}
VFIO_CONTAINER = "/dev/vfio/vfio"
"""What a process that opens a node of /dev/vfio has to open too."""

SECRETS_FILE, SECRET_NAMES = "RUN_SECRETS_FILE", "RUN_SECRETS"
"""Variables about secrets: of a rank supervisor, the file in memory that has their values; of a rank, their names."""
SECRET_MANAGER = "SECRET_MANAGER_EMULATOR_HOST"
"""Names what stands for Secret Manager, by its URL."""
SHORTEST_SECRET = 6
"""Characters. A shorter one cannot be masked: it stands in other words too."""
SET_BY_IMAGE = re.compile("HOME|PATH|LD_.*|DOCKER_.*")
"""Variables that a process in a container cannot be given: Docker's client takes the values of a container's variables
from its own environment, and these would steer the client."""

HANG_FLOOR_S = 120.0
"""Shortest time without progress after which a run counts as hung, however quick its steps are."""
HEARTBEAT_LIMIT_S = 300.0
"""Time without a heartbeat after which a run counts as hung, whatever it is doing."""
STOP_GRACE_S = 120.0
"""For a checkpoint, between the signal to stop and the end."""

PROFILE_REQUEST = "profile-request.json"
"""In the control directory of a process: which of its next steps its ranks are to trace."""
MOST_TRACED_STEPS = 100
"""A trace is kept in memory until it is written, and what opens it shows a million events; some ten steps tell all."""


def profile_answer(local_rank: int) -> str:
    """Beside it, what became of that at one rank of the host."""
    return f"profile-answer-{local_rank}.json"


def required(platform: str) -> None:
    """Make sure that this host has devices of a platform.

    Raises:
        RequestError: it has none, and a job would fall back to the CPU.
    """
    patterns = DEVICE_GLOBS[platform]
    if patterns and not any(glob.glob(pattern) for pattern in patterns):
        raise RequestError(
            f"RUN_PLATFORM is {platform}, but this host has none: no file like {' or '.join(patterns)}; "
            f"run on a host with a {platform.upper()} or ask for `--platform cpu`"
        )
