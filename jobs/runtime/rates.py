"""How fast a run steps, with what is not stepping (evaluation, checkpoints) left out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from jobs.runtime.time_split import Part, TimeSplit

STEPPING: tuple[Part, ...] = ("compute", "input_wait", "logging")
"""Parts of the time that a step takes; the others are no step's."""


class Rates:
    """Counts steps and the seconds of stepping; the first step of an attempt, which compiles, is not counted.

    Args:
        time: where the seconds come from; `start` enters its part "compute".
        name: what the rate is called in the metrics, as "tokens_per_s".
        per_step: how many of what it counts are in a step, over all hosts.
        flops_per_step: what the model's arithmetic of a step comes to, over all hosts.
        peak_flops_per_s: what the devices together could do; None where it is not known, and then there is no mfu.
    """

    def __init__(
        self,
        time: TimeSplit,
        *,
        name: str,
        per_step: int,
        flops_per_step: int = 0,
        peak_flops_per_s: float | None = None,
    ) -> None:
        self._time, self._name, self._per_step = time, name, per_step
        self._flops_per_step, self._peak_flops_per_s = flops_per_step, peak_flops_per_s
        self._started = False
        self._steps, self._total_steps, self._total_s = 0, 0, 0.0
        self._taken_s, self._taken_wait_s = 0.0, 0.0

    def start(self) -> None:
        """From now on, after the first step, steps and their time are counted."""
        self._time.enter("compute")
        self._started = True
        self._take_seconds()

    def step_done(self) -> None:
        if self._started:
            self._steps += 1

    @contextlib.contextmanager
    def input(self, busy: Callable[[], bool]) -> Iterator[None]:
        """What happens inside makes a batch; it is waiting unless the devices are `busy` to its very end.

        Where they fell idle on the way all of it is called waiting, so input_wait_s is at most too high.
        """
        if not self._started:
            yield
            return
        with self._time.part("input_wait", unless=busy):
            yield

    def take(self) -> dict[str, float]:
        """The rate, step_s, input_wait_s (per step) and, where the peak is known, mfu (0 to 1) since the last call.

        Empty where no step was counted. mfu: model FLOPs utilisation, Chowdhery et al. 2022, appendix B.
        """
        if not self._steps:
            return {}
        steps, (seconds, input_wait_s) = self._steps, self._take_seconds()
        if seconds == 0:
            return {}
        self._steps = 0
        self._total_steps, self._total_s = self._total_steps + steps, self._total_s + seconds
        taken = {
            self._name: round(steps * self._per_step / seconds, 1),
            "step_s": round(seconds / steps, 6),
            "input_wait_s": round(input_wait_s / steps, 6),
        }
        if self._peak_flops_per_s is not None:
            taken["mfu"] = round(steps * self._flops_per_step / seconds / self._peak_flops_per_s, 4)
        return taken

    def overall(self) -> float | None:
        """The rate over all that was taken; None where nothing was."""
        return round(self._total_steps * self._per_step / self._total_s, 1) if self._total_s else None

    def _take_seconds(self) -> tuple[float, float]:
        """Seconds of stepping, and those of them that waited for input, since the last call."""
        spent_s, wait_s = self._time.spent_s(*STEPPING), self._time.spent_s("input_wait")
        since = spent_s - self._taken_s, wait_s - self._taken_wait_s
        self._taken_s, self._taken_wait_s = spent_s, wait_s
        return since
