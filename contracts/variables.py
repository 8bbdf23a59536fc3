"""Names of environment variables and files that the launching side, the agent and the processes agree on; light enough
for the agent to import."""

from __future__ import annotations

import re

SECRETS_FILE, SECRET_NAMES = "RUN_SECRETS_FILE", "RUN_SECRETS"
"""Variables about secrets: of a rank supervisor, the file in memory that has their values; of a rank, their names."""
SHORTEST_SECRET = 6
"""Characters. A shorter one cannot be masked: it stands in other words too."""
SET_BY_IMAGE = re.compile("HOME|PATH|LD_.*|DOCKER_.*")
"""Variables that a process in a container cannot be given: Docker's client takes the values of a container's variables
from its own environment, and these would steer the client."""

PROFILE_REQUEST = "profile-request.json"
"""In the control directory of a process: which of its next steps its ranks are to trace."""
MOST_TRACED_STEPS = 100
"""A trace is kept in memory until it is written, and what opens it shows a million events; some ten steps tell all."""


def profile_answer(local_rank: int) -> str:
    """Beside it, what became of that at one rank of the host."""
    return f"profile-answer-{local_rank}.json"
