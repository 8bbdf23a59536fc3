"""The options of keras_glue: those of jobs/glue, and one of its own."""

from __future__ import annotations

import dataclasses

from jobs.glue import options
from jobs.glue.options import FREE_ON_RESUME, FROM_RUNS, GROUPS, Options
from jobs.runtime.option_rules import at_least, execution_problems, outside

__all__ = ["FREE_ON_RESUME", "FROM_RUNS", "GROUPS", "RANGES", "Config", "problems"]

ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu"}
"""Of config.json's hidden_act: those that Keras computes alike, by its own names."""
COMPUTES = {"hidden_act": tuple(ACTIVATIONS), "position_embedding_type": ("absolute",)}
"""What else a model's config.json may say."""
OWN_RANGES = {"steps_per_execution": at_least(1)}
RANGES = {**options.RANGES, **OWN_RANGES}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Options):
    """Fine-tune a model to tell classes or numbers from a text or a pair of texts."""

    steps_per_execution: int = 1
    """Steps between two times that the host looks at the run: it logs, evaluates, saves and stops only then."""


def problems(config: Config, *, devices: int) -> list[str]:
    """Everything that is wrong with `config` on so many devices; empty where it can run."""
    messages = options.problems(config, devices=devices) + outside(config, OWN_RANGES)
    if config.steps_per_execution > 1 and config.profile is not None:
        messages.append(
            f"--profile {config.profile}: needs steps that are taken one by one; leave out --steps-per-execution"
        )
    return messages + execution_problems(config)
