"""Traces for XProf (TensorBoard's Profile tab), by TensorFlow's profiler.

    profile/plugins/profile/steps-A-B/host-I.xplane.pb   every process's own devices and threads

XProf takes the files of one folder for the hosts of one session, so all processes write into the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from jobs.runtime.monitoring.profile import PROFILE, STEP, Steps


class Tracer:
    """See `jobs.runtime.monitoring.profile.Tracer`."""

    def start(self, folder: str) -> None:
        # Every call of a Python function would be an event: megabytes, and a loop that is slower than without.
        options = tf.profiler.experimental.ProfilerOptions(python_tracer_level=0)
        tf.profiler.experimental.start(folder, options)

    def step(self, step: int) -> contextlib.AbstractContextManager[Any]:
        named: contextlib.AbstractContextManager[Any] = tf.profiler.experimental.Trace(
            STEP, step_num=step, _r=1
        )
        return named

    def stop(self) -> None:
        tf.profiler.experimental.stop()

    def files(self, folder: Path, traced: Steps, process_id: int) -> Iterator[tuple[Path, str]]:
        (for_xprof,) = (folder / "plugins" / "profile").glob("*/*.xplane.pb")
        yield for_xprof, f"{PROFILE}/plugins/profile/steps-{traced}/host-{process_id}.xplane.pb"
