"""Early warning: what a step's numbers say of a run that has gone wrong, and the batch that they say it of.

Every process sees the same numbers and so comes to the same end after the same step. A state is saved only when all
its steps have been looked at, so the newest checkpoint is from before the trouble.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping

import numpy as np

from jobs.flax_mlm.tokenizer import open_tokenizer
from jobs.flax_mlm.tokens import Tokens
from jobs.runtime.run_directory import RunDirectory

WINDOW = 50
"""Steps that say what is usual; nothing is called a spike before so many have been seen."""
SPIKE_NATS, SPIKE_SPREADS = 2.0, 10.0
"""A loss is a spike where it lies above the usual one by this many nats and by this many spreads (standard deviations,
by the median's own measure). A batch's loss wanders by 0.05 to 0.3 nats."""
DEAD_NATS = 1e-3
"""A loss that stays below this is that of text which can be told by heart."""
_MAD_TO_SPREAD = 1.4826  # of a normal distribution


class Trouble(Exception):
    """Training on would waste the machine; the message says what was seen and what to do."""


class Watch:
    """The losses of the last steps, and what is wrong with the next one."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def look(self, values: Mapping[str, float]) -> str | None:
        """What a step with these results (`loss` and `grad_norm`) says is wrong; None: nothing."""
        loss, grad_norm = values["loss"], values["grad_norm"]
        found = self._wrong(loss, grad_norm)
        if math.isfinite(loss):
            self._losses.append(loss)
        return found

    def _wrong(self, loss: float, grad_norm: float) -> str | None:
        if math.isnan(loss) and grad_norm == 0:
            return "no token of the batch can be hidden: it holds special tokens alone; look at --data"
        if not math.isfinite(loss):
            return (
                f"the loss is {loss}: the parameters have grown out of their numbers' range; "
                "lower --learning-rate, or --clip-norm, or take --dtype float32"
            )
        if not math.isfinite(grad_norm):
            return f"the loss is {loss:.4g} but its gradient {grad_norm}; take --dtype float32, or lower --clip-norm"
        if grad_norm == 0:
            return "the gradient is exactly 0: the model learns nothing from such batches; look at --data"
        if len(self._losses) < WINDOW:
            return None
        usual = statistics.median(self._losses)
        spread = _MAD_TO_SPREAD * statistics.median(abs(each - usual) for each in self._losses)
        if loss > usual + max(SPIKE_NATS, SPIKE_SPREADS * spread):
            return (
                f"the loss has leapt to {loss:.4g} from {usual:.4g}: either this batch is unlike the others, or the "
                "model has come apart; look at the batch, lower --learning-rate, or lengthen --warmup-share"
            )
        if max(loss, *self._losses) < DEAD_NATS:
            return (
                f"the loss has been below {DEAD_NATS:g} for {WINDOW} steps: the text repeats itself and nothing is "
                "left to learn; look at --data, or take fewer --steps"
            )
        return None


def save_batch(directory: RunDirectory, step: int, reason: str, tokens: Tokens, rows_BS: np.ndarray) -> str:
    """Write the training sequences of `step` where a person can read them; returns the file's name in the run."""
    name = f"trouble/step-{step}.json"
    texts = open_tokenizer(tokens.tokenizer.path).decode_batch(rows_BS.tolist(), skip_special_tokens=False)
    directory.write_json(name, {"step": step, "reason": reason, "texts": texts, "tokens": rows_BS.tolist()})
    return name
