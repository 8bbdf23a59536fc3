"""Traces for Perfetto (ui.perfetto.dev) by torch's profiler: profile/steps-A-B-host-I.json.gz of every process.

On a TPU and on XLA it has the host's side alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from jobs.runtime.monitoring.profile import PROFILE, STEP, Steps

TRACE = "trace.json.gz"


class Tracer:
    """See `jobs.runtime.monitoring.profile.Tracer`."""

    def start(self, folder: str) -> None:
        self._path = Path(folder) / TRACE
        # By default what the devices here can do: a CPU's operations, a GPU's kernels.
        self._profiler = torch.profiler.profile()
        self._profiler.start()

    def step(self, step: int) -> contextlib.AbstractContextManager[Any]:
        named: contextlib.AbstractContextManager[Any] = torch.profiler.record_function(f"{STEP} {step}")
        return named

    def stop(self) -> None:
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self._path))

    def files(self, folder: Path, traced: Steps, process_id: int) -> Iterator[tuple[Path, str]]:
        yield folder / TRACE, f"{PROFILE}/steps-{traced}-host-{process_id}.perfetto.json.gz"
