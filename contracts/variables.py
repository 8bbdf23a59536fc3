"""Names of environment variables that the launching side, the agent and the processes agree on; light enough for the
agent to import."""

from __future__ import annotations

import re

SECRETS_FILE, SECRET_NAMES = "RUN_SECRETS_FILE", "RUN_SECRETS"
"""Variables about secrets: of a rank supervisor, the file in memory that has their values; of a rank, their names."""
SHORTEST_SECRET = 6
"""Characters. A shorter one cannot be masked: it stands in other words too."""
SET_BY_IMAGE = re.compile("HOME|PATH|LD_.*|DOCKER_.*")
"""Variables that a process in a container cannot be given: Docker's client takes the values of a container's variables
from its own environment, and these would steer the client."""
