"""The evaluations of a run: written down as they are made, with the best of them known, also after a resume."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jobs.runtime.metrics import Metrics
from jobs.runtime.process import Run


class Evaluations:
    """headline: the metric that says how good a state is, and `better`, which of two values is the better one.

    score: evaluates the state, which is the one after that step. every: steps between two evaluations. patience:
    evaluations in a row without a better one after which training ends; None: it goes on. best_step: the step with the
    best one so far; 0 before the first.
    """

    def __init__(
        self,
        run: Run,
        headline: str,
        score: Callable[[int], dict[str, float]],
        *,
        every: int,
        better: Literal["lower", "higher"] = "higher",
        patience: int | None = None,
    ) -> None:
        self._run, self._headline, self._patience = run, headline, patience
        self.score, self.every = score, every
        self._sign = 1 if better == "higher" else -1
        self._best_score, self.best_step, self._worse = -math.inf, 0, 0
        self._latest: tuple[int, dict[str, float]] | None = None

    def restore(self, notes: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint's `notes` say; those of older code may say nothing."""
        if notes.get("best_score") is not None:
            self._best_score = notes["best_score"]
        self.best_step, self._worse = notes.get("best_step", 0), notes.get("worse", 0)

    def notes(self) -> dict[str, Any]:
        """What is to be saved beside a state."""
        best = self._best_score if math.isfinite(self._best_score) else None  # JSON has no infinity
        return {"best_score": best, "best_step": self.best_step, "worse": self._worse}

    def evaluate(self, step: int, metrics: Metrics | None, *, is_saved: bool) -> dict[str, float]:
        """Evaluate the state after `step` and write down what is found; returns that. What was the latest is not
        evaluated again.

        metrics: of rank 0. is_saved: whether there is a checkpoint of it; only such a state can be the best one.
        """
        run = self._run
        if self._latest is not None and self._latest[0] == step:
            return self._latest[1]
        with run.time.part("evaluation"):
            run.heartbeat.say("evaluating")
            found = self.score(step)
            value = self._sign * found[self._headline]
            if is_saved and value > self._best_score:
                self._best_score, self.best_step, self._worse = value, step, 0
            elif is_saved:
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
