"""The options of torch_glue: those of jobs/glue, and two of its own."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jobs.glue.options import FREE_ON_RESUME, FROM_RUNS, GROUPS, RANGES, Options, problems

__all__ = ["FREE_ON_RESUME", "FROM_RUNS", "GROUPS", "RANGES", "Config", "problems"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Options):
    """Fine-tune a model to tell classes or numbers from a text or a pair of texts."""

    compile: Literal["auto", "yes", "no"] = "auto"
    """Compile the model by torch.compile. auto: on a GPU and a TPU; on a CPU, layers that are written by hand take its
    place, and less time."""
    fsdp: bool = False
    """Share out the parameters and the optimizer's state over all processes: less memory, more exchange."""
