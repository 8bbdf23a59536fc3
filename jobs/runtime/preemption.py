"""SIGTERM on any host: all hosts stop after the same step.

JAX's own protocol carries the notice: the host that got the signal tells the coordinator, which
names one step that every host will reach (jax.experimental.multihost_utils.reached_preemption_sync_point).
"""

from __future__ import annotations

from pathlib import Path

from jax.experimental import multihost_utils

STOP_REQUESTED = "stop-requested"
"""The file that the agent leaves in the control directory before it sends SIGTERM for a stop that somebody wanted."""


class Preempted(Exception):
    """The run has been saved after `step` and can be resumed from there."""

    def __init__(self, step: int) -> None:
        super().__init__(f"saved after step {step}")
        self.step = step


def notified(step: int) -> bool:
    """Whether all hosts are to save after `step` and leave. Called by every host after every step, in order."""
    return bool(multihost_utils.reached_preemption_sync_point(step))


def was_requested(control_dir: str | None) -> bool:
    """Whether somebody asked for the stop (`fab stop`), as opposed to the machine being taken away."""
    return control_dir is not None and (Path(control_dir) / STOP_REQUESTED).exists()
