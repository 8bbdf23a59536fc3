"""How fast a run steps, with what is not stepping (evaluation, checkpoints) left out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Rates:
    """Counts steps and seconds; the first step of an attempt, which compiles, is not counted.

    Args:
        tokens_per_step: tokens of a global batch.
        flops_per_step: what the model's arithmetic of a step comes to, over all hosts.
        peak_flops_per_s: what the devices together could do; None where it is not known, and then there is no mfu.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        *,
        tokens_per_step: int,
        flops_per_step: int = 0,
        peak_flops_per_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._tokens_per_step, self._clock = tokens_per_step, clock
        self._flops_per_step, self._peak_flops_per_s = flops_per_step, peak_flops_per_s
        self._since: float | None = None
        self._interval_steps, self._interval_s, self._input_wait_s = 0, 0.0, 0.0
        self._total_steps, self._total_s = 0, 0.0

    def start(self) -> None:
        """From now on time is counted (again)."""
        self._since = self._clock()

    def pause(self) -> None:
        """What comes now is not stepping; `start` goes on."""
        self._count()
        self._since = None

    def step_done(self) -> None:
        if self._since is not None:
            self._interval_steps += 1
            self._count()

    @contextlib.contextmanager
    def input(self) -> Iterator[None]:
        """What happens inside is waiting for input."""
        since = self._clock()
        yield
        if self._since is not None:
            self._input_wait_s += self._clock() - since

    def take(self) -> dict[str, float]:
        """tokens_per_s, step_s, input_wait_s (per step) and, where the peak is known, mfu (0 to 1) since the last call.

        Empty where no step was counted. mfu: model FLOPs utilisation, Chowdhery et al. 2022, appendix B.
        """
        steps, seconds = self._interval_steps, self._interval_s
        if steps == 0 or seconds == 0:
            return {}
        self._total_steps, self._total_s = self._total_steps + steps, self._total_s + seconds
        taken = {
            "tokens_per_s": round(steps * self._tokens_per_step / seconds, 1),
            "step_s": round(seconds / steps, 6),
            "input_wait_s": round(self._input_wait_s / steps, 6),
        }
        if self._peak_flops_per_s is not None:
            taken["mfu"] = round(steps * self._flops_per_step / seconds / self._peak_flops_per_s, 4)
        self._interval_steps, self._interval_s, self._input_wait_s = 0, 0.0, 0.0
        return taken

    def overall(self) -> float | None:
        """Tokens per second over all that was taken; None where nothing was."""
        return round(self._total_steps * self._tokens_per_step / self._total_s, 1) if self._total_s else None

    def _count(self) -> None:
        if self._since is not None:
            now = self._clock()
            self._interval_s += now - self._since
            self._since = now
