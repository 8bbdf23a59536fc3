"""Traces for XProf (TensorBoard's Profile tab) and Perfetto, by JAX's profiler.

    profile/plugins/profile/steps-A-B/host-I.xplane.pb   every process's own devices and threads, for XProf
    profile/steps-A-B-host-I.perfetto.json.gz            the same for ui.perfetto.dev

XProf takes the files of one folder for the hosts of one session, so all processes write into the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jobs.runtime.monitoring.profile import PROFILE, STEP, Steps


class Tracer:
    """See `jobs.runtime.monitoring.profile.Tracer`."""

    def start(self, folder: str) -> None:
        options = jax.profiler.ProfileOptions()
        # Every call of a Python function would be an event: megabytes, and a loop that is slower than without.
        options.python_tracer_level = 0
        jax.profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)

    def step(self, step: int) -> contextlib.AbstractContextManager[Any]:
        return jax.profiler.StepTraceAnnotation(STEP, step_num=step)

    def stop(self) -> None:
        jax.profiler.stop_trace()

    def files(self, folder: Path, traced: Steps, process_id: int) -> Iterator[tuple[Path, str]]:
        (session,) = (folder / "plugins" / "profile").iterdir()
        (for_xprof,) = session.glob("*.xplane.pb")
        yield for_xprof, f"{PROFILE}/plugins/profile/steps-{traced}/host-{process_id}.xplane.pb"
        for_perfetto = session / "perfetto_trace.json.gz"
        yield for_perfetto, f"{PROFILE}/steps-{traced}-host-{process_id}.perfetto.json.gz"
