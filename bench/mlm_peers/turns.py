"""How a program steps in turn with others: a request on each line of input, what it measured on each of output.

    {"do": "compile"}            take the first step, whose time says nothing
    {"do": "step", "steps": 5}   take so many
    {"do": "multiply"}           measure what this machine's matrix product comes to

Standard library only: it runs in environments that have nothing of ours."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
CLEAR_PEAK = "5"
"""Linux, proc(5): written to clear_refs, the peak of resident memory is set back to what is resident now."""


def answer(
    take: Callable[[int], Any],
    facts: Mapping[str, Any],
    multiply: Callable[[], float] | None = None,
) -> None:
    """Until the input ends.

    Args:
        take: step number (from 0) → loss that can be made a float, which waits for the step.
        facts: what every answer holds too.
        multiply: operations per second.
    """
    step, compiling_peak = 0, None
    for line in sys.stdin:
        request = json.loads(line)
        measured: dict[str, Any] = dict(facts)
        if request["do"] == "multiply":
            measured["machine_flops_per_s"] = None if multiply is None else multiply()
        else:
            steps = request.get("steps", 1)
            began_s, used_s = time.perf_counter(), time.process_time()
            for _ in range(steps):
                loss = take(step)
                step += 1
            measured["loss"] = float(loss)
            measured["wall_s"] = (time.perf_counter() - began_s) / steps
            measured["cpu_s"] = (time.process_time() - used_s) / steps
        if request["do"] == "compile":
            compiling_peak = resident_bytes("VmHWM")
            if compiling_peak is not None:
                CLEAR.write_text(CLEAR_PEAK)
        measured["step"] = step
        measured["compiling_peak_bytes"] = compiling_peak
        measured["stepping_peak_bytes"] = resident_bytes("VmHWM")
        sys.stdout.write(json.dumps(measured) + "\n")
        sys.stdout.flush()


def resident_bytes(field: str = "VmRSS") -> int | None:
    """Of this process: memory that is resident now, or its peak (VmHWM); None where there is no Linux to say it."""
    if not STATUS.exists():
        return None
    match = re.search(rf"^{field}:\s+(\d+) kB", STATUS.read_text(), flags=re.MULTILINE)
    return int(match[1]) * 1024 if match else None
