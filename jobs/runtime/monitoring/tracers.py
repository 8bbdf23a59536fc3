"""The frameworks' own profilers, as `profile.Profile` uses them. Each imports its framework when it is made.

    profile/plugins/profile/steps-A-B/host-I.xplane.pb   JAX, TensorFlow: every process's own devices and threads
    profile/steps-A-B-host-I.perfetto.json.gz            JAX, PyTorch: the same for Perfetto (ui.perfetto.dev)

XProf (TensorBoard's Profile tab) takes the files of one folder for the hosts of one session, so all processes write
into the same. Of PyTorch on a TPU and on XLA there is the host's side alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs.runtime.monitoring.profile import PROFILE, STEP, Steps

type Files = Iterator[tuple[Path, str]]

PYTHON_CALLS = {"python_tracer_level": 0}
"""Not traced: every call of a Python function would be an event: megabytes, and a loop that is slower than without."""


def _for_xprof(folder: Path, traced: Steps, process_id: int) -> tuple[Path, str]:
    (written,) = (folder / "plugins" / "profile").glob("*/*.xplane.pb")
    return written, f"{PROFILE}/plugins/profile/steps-{traced}/host-{process_id}.xplane.pb"


def _for_perfetto(written: Path, traced: Steps, process_id: int) -> tuple[Path, str]:
    return written, f"{PROFILE}/steps-{traced}-host-{process_id}.perfetto.json.gz"


class JaxTracer:
    def __init__(self) -> None:
        import jax

        self._profiler = jax.profiler

    def start(self, folder: str) -> None:
        options = self._profiler.ProfileOptions()
        for name, value in PYTHON_CALLS.items():
            setattr(options, name, value)
        self._profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)

    def step(self, step: int) -> contextlib.AbstractContextManager[Any]:
        return self._profiler.StepTraceAnnotation(STEP, step_num=step)

    def stop(self) -> None:
        self._profiler.stop_trace()

    def files(self, folder: Path, traced: Steps, process_id: int) -> Files:
        for_xprof = _for_xprof(folder, traced, process_id)
        yield for_xprof
        yield _for_perfetto(for_xprof[0].with_name("perfetto_trace.json.gz"), traced, process_id)


class TensorFlowTracer:
    def __init__(self) -> None:
        import tensorflow as tf

        self._profiler: Any = tf.profiler.experimental

    def start(self, folder: str) -> None:
        self._profiler.start(folder, self._profiler.ProfilerOptions(**PYTHON_CALLS))

    def step(self, step: int) -> contextlib.AbstractContextManager[Any]:
        named: contextlib.AbstractContextManager[Any] = self._profiler.Trace(STEP, step_num=step, _r=1)
        return named

    def stop(self) -> None:
        self._profiler.stop()

    def files(self, folder: Path, traced: Steps, process_id: int) -> Files:
        yield _for_xprof(folder, traced, process_id)


class TorchTracer:
    def __init__(self) -> None:
        import torch

        self._torch = torch

    def start(self, folder: str) -> None:
        self._path = Path(folder) / "trace.json.gz"
        # By default what the devices here can do: a CPU's operations, a GPU's kernels.
        self._profiler = self._torch.profiler.profile()
        self._profiler.start()

    def step(self, step: int) -> contextlib.AbstractContextManager[Any]:
        named: contextlib.AbstractContextManager[Any] = self._torch.profiler.record_function(f"{STEP} {step}")
        return named

    def stop(self) -> None:
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self._path))

    def files(self, _folder: Path, traced: Steps, process_id: int) -> Files:
        yield _for_perfetto(self._path, traced, process_id)
