"""What is done about checkpoints that cannot be read, whatever wrote them."""

from __future__ import annotations

import time
from collections.abc import Mapping

from contracts.errors import RequestError
from contracts.run_directory import CHECKPOINTS, RunDirectory
from jobs.runtime.bucket_files import files_of

TORN = "checkpoints-torn"

type Torn = Mapping[int, str]
"""Steps whose checkpoint cannot be read, and why."""


def none_readable(torn: Torn) -> RequestError:
    """What is said where all of a run's checkpoints are torn; they are left where they are."""
    said = "; ".join(f"{step}: {reason}" for step, reason in torn.items())
    return RequestError(
        f"none of the run's {len(torn)} checkpoints can be read by this code, and nothing was changed: {said}; "
        "resume with the code that wrote them (run.json has the commit), or start a new run"
    )


def put_aside(directory: RunDirectory, torn: Torn, used: int, *, moves: bool) -> None:
    """Say of each that it is put aside in TORN, and do it in the one process that `moves`. used: taken instead."""
    for step, reason in torn.items():
        print(
            f"checkpoint {step} cannot be read ({reason}); it is put aside in {TORN}/ and {used} is used",
            flush=True,
        )
        if moves:
            folder = directory.path(f"{CHECKPOINTS}/{step}")
            files_of(folder).move(folder, directory.path(f"{TORN}/{step}-{time.time_ns()}"))
