"""How a program steps in turn with others: a number of steps on each line of input, what it measured on each of output.

Standard library alone: it runs in environments that have nothing of ours."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


def answer(take: Callable[[int], Any], facts: Mapping[str, float]) -> None:
    """Until the input ends. take: step number (from 0) → loss that can be made a float, which waits for the step."""
    step = 0

    def take_and_wait() -> float:
        return float(take(step))

    for line in sys.stdin:
        steps = int(line)
        measured = dict(facts)
        if step == 0:
            measured["loss"] = take_and_wait()
            step = 1
        if steps:
            began_s, used_s = time.perf_counter(), time.process_time()
            for _ in range(steps - 1):
                take(step)
                step += 1
            measured["loss"] = take_and_wait()
            step += 1
            measured["wall_s"] = (time.perf_counter() - began_s) / steps
            measured["cpu_s"] = (time.process_time() - used_s) / steps
        measured["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        sys.stdout.write(json.dumps(measured) + "\n")
        sys.stdout.flush()
