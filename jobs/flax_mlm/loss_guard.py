"""Judges each loss: which steps are outliers, and when so many follow one another that the run has to end.

A single outlier never ends a run. Every process sees the same numbers and so comes to the same end after the same step.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from contracts.errors import JobFailed
from contracts.run_directory import RunDirectory
from jobs.flax_mlm.config import Config
from jobs.flax_mlm.data import Tokens
from jobs.flax_mlm.tokenizer import open_tokenizer
from jobs.runtime.process import Run

WINDOW = 50
"""Steps that define the usual loss; before so many nothing counts as a leap."""
LEAP_NATS, LEAP_SPREADS = 2.0, 10.0
"""A loss has leapt where it lies above the usual one by this many nats and by this many spreads (standard deviations,
by the median's own measure). A batch's loss wanders by 0.05 to 0.3 nats."""
AWAY_LIMIT_STEPS = 50
"""A run ends where so many steps in a row were outliers: a leap is over after a few, or tens in a large model."""
USELESS_LIMIT_STEPS = 20
"""A run ends after so many steps in a row without an update."""
MEMORISED_NATS = 1e-3
"""A loss that stays below this is that of memorised text."""
MOST_KEPT = 10
"""Outliers whose batch is kept: the first of each series, of so many series; and the one that ends the run."""
MOST_WRITTEN = 1000
"""Outliers that are written to the metrics out of turn."""
_MAD_TO_SPREAD = 1.4826  # of a normal distribution


def is_applied(values: Mapping[str, float]) -> bool:
    """Whether a step with these results has changed the parameters: `make_train_step` leaves them as they were where
    the loss or the gradient is not finite."""
    return math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlier:
    """A step whose loss or gradient is unusual: what was seen, and the remedy where it stays so.

    row: how many outliers follow one another, this one the last. ends: that is too many.
    """

    symptom: str
    remedy: str
    row: int
    ends: bool

    def __str__(self) -> str:
        if not self.ends:
            return self.symptom
        stays = f"; it is the last of {self.row} outliers in a row" if self.row > 1 else ""
        return f"{self.symptom}{stays}: {self.remedy}"


@dataclasses.dataclass(kw_only=True)
class LossGuard:
    """The guard's state; each checkpoint keeps it, so that a resumed run ends where an undisturbed one would.

    losses: the last usual ones. outliers, skipped: how many steps so far were outliers, and had an update that was not
    applied. series: how often one outlier or more in a row have begun. row, useless: how many outliers, and how many
    steps without an update to apply, the latest steps are in a row.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    outliers: int = 0
    skipped: int = 0
    series: int = 0
    row: int = 0
    useless: int = 0

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> LossGuard:
        """The guard as it was when `notes` were taken, whatever else they hold; a new one where they say nothing."""
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**{name: notes[name] for name in names if name in notes})

    def notes(self) -> dict[str, Any]:
        """The state as JSON can hold it."""
        return dataclasses.asdict(self)

    def check(self, values: Mapping[str, float]) -> Outlier | None:
        """Judge a step by its `loss` and `grad_norm`; None: it is as usual."""
        loss, grad_norm = values["loss"], values["grad_norm"]
        self.skipped += not is_applied(values)
        self.useless = 0 if is_applied(values) and grad_norm else self.useless + 1
        has_leapt = self._has_leapt(loss)
        if math.isfinite(loss) and not has_leapt:
            self.losses = [*self.losses, loss][-WINDOW - 1 :]
        wrong = self._wrong(loss, grad_norm, has_leapt)
        if wrong is None:
            self.row = 0
            return None
        self.outliers += 1
        self.series += self.row == 0
        self.row += 1
        stays_away = self.row >= AWAY_LIMIT_STEPS or self._is_memorised()
        ends = stays_away or self.useless >= USELESS_LIMIT_STEPS
        outlier = Outlier(symptom=wrong[0], remedy=wrong[1], row=self.row, ends=ends)
        if ends:
            self.row = self.useless = 0
        if stays_away:  # a run that continues takes the new level as usual
            self.losses = []
        return outlier

    def _usual(self) -> float | None:
        return statistics.median(self.losses[-WINDOW:]) if self.losses else None

    def _has_leapt(self, loss: float) -> bool:
        last = self.losses[-WINDOW:]
        if len(last) < WINDOW:
            return False
        usual = statistics.median(last)
        spread = _MAD_TO_SPREAD * statistics.median(abs(loss - usual) for loss in last)
        return loss > usual + max(LEAP_NATS, LEAP_SPREADS * spread)

    def _is_memorised(self) -> bool:
        return len(self.losses) > WINDOW and max(self.losses) < MEMORISED_NATS

    def _wrong(self, loss: float, grad_norm: float, has_leapt: bool) -> tuple[str, str] | None:
        """What is wrong with the step, and the remedy where it stays so."""
        usual = self._usual()
        before = "" if usual is None else f" (usually {usual:.4g})"
        if math.isnan(loss) and grad_norm == 0:
            return "no token of the batch can be hidden: it holds only special tokens", "look at --data"
        if not math.isfinite(loss):
            return (
                f"the loss is {loss}{before}, so the step changes no parameter",
                "the model's numbers left their range; lower --learning-rate or --clip-norm, or take --dtype float32",
            )
        if not math.isfinite(grad_norm):
            return (
                f"the loss is {loss:.4g} but its gradient {grad_norm}, so the step changes no parameter",
                "take --dtype float32, or lower --clip-norm",
            )
        if grad_norm == 0:
            return "the gradient is exactly 0: the model learns nothing from such a batch", "look at --data"
        if has_leapt:
            return (
                f"the loss has leapt to {loss:.4g}{before}",
                "the model has come apart; lower --learning-rate, or lengthen --warmup-share",
            )
        if self._is_memorised():
            observation = f"the loss has been below {MEMORISED_NATS:g} for more than {WINDOW} steps"
            reason = "the text repeats itself and nothing is left to learn"
            return f"{observation}: {reason}", "look at --data, or take fewer --steps"
        return None


class Watch:
    """What a training does about outliers, as the guard of its loop (`jobs.runtime.loop.Guard`): rank 0 keeps the batch
    of one that is the first of several, and of the one too many, which ends the run unless that is not wanted."""

    def __init__(
        self, run: Run, config: Config, tokens: Tokens, read_batch: Callable[[int], np.ndarray]
    ) -> None:
        """read_batch: the (B, S) tokens of a step, on this host."""
        self.losses = LossGuard()
        self._run, self._ends_run = run, config.on_trouble == "stop"
        self._tokens, self._read_batch = tokens, read_batch
        self._outlier: Outlier | None = None
        self._row_before = 0

    def restore(self, notes: Mapping[str, Any]) -> None:
        self.losses = LossGuard.from_notes(notes)

    def notes(self) -> dict[str, Any]:
        return self.losses.notes()

    @property
    def holds_back(self) -> bool:
        return bool(self.losses.row)

    def judge(self, step: int, values: Mapping[str, float]) -> dict[str, float]:  # noqa: ARG002 - of the protocol
        self._row_before = self.losses.row
        self._outlier = self.losses.check(values)
        if self._outlier is None or not (self._outlier.ends or self.losses.outliers <= MOST_WRITTEN):
            return {}
        return {"outliers": self.losses.outliers}

    def respond(self, step: int, values: Mapping[str, float]) -> None:
        run, outlier = self._run, self._outlier
        if outlier is None:
            if self._row_before:
                run.say(
                    f"step {step}: the loss is {values['loss']:.4g}, as usual, after {self._row_before} outliers"
                )
            return
        message, is_end = f"step {step}: {outlier}", outlier.ends and self._ends_run
        if is_end or (outlier.row == 1 and self.losses.series <= MOST_KEPT):
            message += f"; its batch is in {run.directory.path(batch_file(step))}"
            if run.environment.is_first:
                save_batch(run.directory, step, str(outlier), self._tokens, self._read_batch(step))
        if is_end:
            # Otherwise the first process to end would end rank 0 too.
            multihost_utils.sync_global_devices("the batch is saved")
            raise JobFailed(f"{message}. To go on all the same: --on-trouble warn")
        if outlier.row == 1:
            run.warn(message)


def batch_file(step: int) -> str:
    """The file in the run directory that keeps the batch of an outlier."""
    return f"trouble/step-{step}.json"


def save_batch(directory: RunDirectory, step: int, reason: str, tokens: Tokens, rows_BS: np.ndarray) -> None:
    """Write the training sequences of `step` where a person can read them."""
    texts = open_tokenizer(tokens.tokenizer.path).decode_batch(rows_BS.tolist(), skip_special_tokens=False)
    content = {"step": step, "reason": reason, "texts": texts, "tokens": rows_BS.tolist()}
    directory.write_json(batch_file(step), content)
