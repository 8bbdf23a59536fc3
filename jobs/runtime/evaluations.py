"""The evaluations of a run: written down as they are made, with the best of them known, also after a resume."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jobs.runtime.metrics import Metrics
from jobs.runtime.process import Run


class Evaluations:
    """headline: the metric that says how good a state is, and `better`, which of two values is the better one.

    patience: evaluations in a row without a better one after which training ends; None: it goes on. best_step: the step
    with the best one so far; 0 before the first.
    """

    def __init__(
        self,
        run: Run,
        headline: str,
        *,
        better: Literal["lower", "higher"] = "higher",
        patience: int | None = None,
    ) -> None:
        self._run, self._headline, self._patience = run, headline, patience
        self._sign = 1 if better == "higher" else -1
        self._best_score, self.best_step, self._worse = -math.inf, 0, 0
        self._latest: tuple[int, dict[str, float]] | None = None

    def restore(self, notes: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint's `notes` say."""
        if notes["best_score"] is not None:
            self._best_score = notes["best_score"]
        self.best_step, self._worse = notes["best_step"], notes.get("worse", 0)

    def notes(self) -> dict[str, Any]:
        """What is to be saved beside a state."""
        best = self._best_score if math.isfinite(self._best_score) else None  # JSON has no infinity
        return {"best_score": best, "best_step": self.best_step, "worse": self._worse}

    def make_up(self, done: int, *, every: int, last: int, evaluate: Callable[[int], object]) -> None:
        """Evaluate the state that was restored after step `done`, where that is due.

        A state is saved before it is evaluated, so a run that ended in between, or was preempted, has no evaluation of
        it. The evaluation after the `last` step is made at the end of the run.
        """
        if 0 < done < last and done % every == 0:
            evaluate(done)

    def evaluate(
        self, step: int, score: Callable[[], dict[str, float]], metrics: Metrics | None
    ) -> dict[str, float]:
        """Call `score` on the state after `step` and write down what it returns; returns that. What was the latest is
        not evaluated again.

        metrics: of rank 0.
        """
        run = self._run
        if self._latest is not None and self._latest[0] == step:
            return self._latest[1]
        with run.time.part("evaluation"):
            run.heartbeat.say("evaluating")
            found = score()
            value = self._sign * found[self._headline]
            if value > self._best_score:
                self._best_score, self.best_step, self._worse = value, step, 0
            else:
                self._worse += 1
            if metrics is not None:
                metrics.write(step, found)
            run.say(
                f"step {step}: "
                + ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in found.items())
            )
            if self.is_over:
                run.say(
                    f"step {step}: {self._headline} is no better than at step {self.best_step}; training ends "
                    f"(--patience {self._patience})"
                )
            self._latest = step, found
            return found

    @property
    def is_over(self) -> bool:
        """Whether `patience` has run out."""
        return self._patience is not None and self._worse >= self._patience
