"""What earlier runs have left alive on this host."""

from __future__ import annotations

import os
import re
import time

from . import engine
from .checks import check
from .proc import controlled, described, start_ticks
from .protocol import Failed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json


def check_leftovers(root: str, with_containers: bool = False) -> list[Json]:
    """A finding for each run of this agent's that still has processes here, or one that there is none.

    with_containers: whether Docker is asked as well, which alone knows of a container that is root's.
    """
    runs: dict[str, list[int]] = {}
    for pid, directory in controlled():
        own = re.fullmatch(re.escape(os.path.join(root, "runs")) + r"/([^/]+)/\d+-\d+", directory)
        if own:
            runs.setdefault(own.group(1), []).append(pid)
    found = [
        check("leftovers", message_of(run_id, alive), f"`fab stop --run {run_id}`")
        for run_id, alive in sorted(runs.items())
    ]
    for run_id, name in running_containers(root) if with_containers else ():
        if run_id not in runs:
            message = f"{run_id} is still alive here: the container {name}"
            found.append(check("leftovers", message, f"`fab stop --run {run_id}`"))
    return found or [check("leftovers", "no earlier run has left a process")]


def running_containers(root: str) -> list[tuple[str, str]]:
    """Run and name of each container of this agent's that runs; none where Docker does not answer, which shows."""
    form = '{{.Label "tpu-stack.run"}}\t{{.Names}}'
    arguments = ["ps", "--format", form, "--filter", f"label=tpu-stack.root={root}"]
    try:
        found = engine.ask([*arguments, "--filter", f"label=tpu-stack.host={os.uname().nodename}"])
    except Failed:
        return []
    rows = [line.split("\t") for line in found.out.splitlines()] if found.is_good else []
    return sorted((run_id, name) for run_id, name in rows)


def message_of(run_id: str, alive: list[int]) -> str:
    first = min(alive)
    ticks = start_ticks(first)
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    age = "just ended" if ticks is None else f"for {spoken(now_s - ticks / os.sysconf('SC_CLK_TCK'))}"
    more = f" and {len(alive) - 1} more" if len(alive) > 1 else ""
    return f"{run_id} is still alive here: {described([first], '/proc')}, {age}{more}"


def spoken(age_s: float) -> str:
    """An age in the unit that a person would choose."""
    for unit, length_s in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if age_s >= 2 * length_s:
            return f"{age_s / length_s:.0f} {unit}"
    return f"{age_s:.0f} seconds"
