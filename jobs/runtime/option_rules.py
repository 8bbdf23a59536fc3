"""Rules for the options of several jobs, with their error messages. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from contracts.errors import RequestError, noted_in
from contracts.host_interface import MOST_TRACED_STEPS
from contracts.suggestions import DASHES, copied_character, did_you_mean


class Range(NamedTuple):
    """minimum, maximum: both included. rule: follows "must" in the message."""

    minimum: float
    maximum: float
    rule: str


def at_least(minimum: int) -> Range:
    return Range(minimum, math.inf, f"be at least {minimum}")


def between(minimum: float, maximum: float) -> Range:
    return Range(minimum, maximum, f"be between {minimum} and {maximum}")


ABOVE_0 = Range(math.ulp(0.0), math.inf, "be above 0")
ABOVE_0_AND_FINITE = Range(math.ulp(0.0), sys.float_info.max, "be above 0 and finite")
NOT_NEGATIVE = Range(0.0, sys.float_info.max, "not be negative and must be finite")
FINITE = Range(-sys.float_info.max, sys.float_info.max, "be finite")


COMMON = {
    **dict.fromkeys(
        (
            *("batch_size", "steps", "steps_per_call", "steps_per_execution", "patience"),
            *("log_every", "eval_every", "checkpoint_every", "keep_checkpoints"),
        ),
        at_least(1),
    ),
    "seed": between(0, 2**32 - 1),  # the width of a JAX key's word and of the order of the data
    "eval_fraction": between(0.001, 0.5),
    "dropout": between(0.0, 0.9),
    "warmup_share": between(0.0, 1.0),
    "learning_rate": ABOVE_0_AND_FINITE,
    "epochs": ABOVE_0_AND_FINITE,
    "clip_norm": ABOVE_0,
    "weight_decay": NOT_NEGATIVE,
}
"""Of options that mean the same in every job."""


def ranges(kind: type[Any], own: Mapping[str, Range]) -> dict[str, Range]:
    """The ranges of a job's options: its `own`, and those in COMMON."""
    names = (field.name for field in dataclasses.fields(kind))
    return {**{name: COMMON[name] for name in names if name in COMMON}, **own}


def outside(config: Any, ranges: Mapping[str, Range]) -> list[str]:
    """A message for each option of `config` outside its range."""
    return [
        f"--{name.replace('_', '-')} {value}: must {rule}"
        for name, (minimum, maximum, rule) in ranges.items()
        if (value := getattr(config, name)) is not None and not minimum <= value <= maximum
    ]


class Parsed(NamedTuple):
    """values: by the names of the fields. problems: one line each."""

    values: dict[str, Any]
    problems: list[str]


def parse(kind: type[Any], arguments: Sequence[str]) -> Parsed:
    """Read a job's options as its Config has them, and find every mistake in them.

    A field is a number, a text, one of several texts, one of these or None, or a switch (--remat, --no-remat).
    """
    hints = typing.get_type_hints(kind)
    options = {f"--{field.name.replace('_', '-')}": field.name for field in dataclasses.fields(kind)}
    switches = {option: (name, True) for option, name in options.items() if hints[name] is bool}
    switches |= {f"--no-{option[2:]}": (name, False) for option, (name, _) in switches.items()}
    parsed, left = Parsed({}, []), list(arguments)
    while left:
        word = left.pop(0)
        typed, equals, text = word.partition("=")
        option = typed.replace("_", "-")
        value = text if equals else left.pop(0) if left and not _is_option(left[0]) else None
        shown = typed if value is None else f"{typed} {shlex.quote(value)}"
        wrong = copied_character(word) or copied_character("" if equals else value or "")
        if wrong is None and option not in options and option not in switches:
            wrong = "there is no such option" if _is_option(word) else "is no option"
            wrong += did_you_mean(option, [*options, *switches])
            if _is_option(word) and option.partition(" ")[0] in (*options, *switches):
                wrong = "is one word; write it without the quotes"
            wrong = f"{shown}: {wrong}"
        elif wrong is None and option in switches:
            name, parsed.values[name] = switches[option]
            either = f"--{name.replace('_', '-')} or --no-{name.replace('_', '-')}"
            wrong = None if value is None else f"{shown}: takes no value; write {either}"
        elif wrong is None and value is None:
            wrong = f"{shown}: needs a value"
        elif wrong is None:
            try:
                parsed.values[options[option]] = _value(hints[options[option]], value or "")
            except ValueError as error:
                wrong = f"{shown}: {error}"
        parsed.problems.extend([wrong] if wrong else [])
    return parsed


def _is_option(word: str) -> bool:
    """Return whether a word is no value: it begins with a dash, and is neither one alone nor a negative number."""
    return word.startswith(("-", *DASHES)) and not re.fullmatch(r"-|-[0-9.].*", word)


def _value(hint: Any, text: str) -> Any:
    """Return the value that a text has in a field. Raises ValueError with the rule that it breaks."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if types.NoneType in kinds and text == "None":
        return None
    kind = next(candidate for candidate in kinds if candidate is not types.NoneType)
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if text in choices:
            return text
        raise ValueError(f"choose one of {', '.join(choices)}{did_you_mean(text, choices)}")
    try:
        return kind(text if kind is str else text.replace("_", "x"))
    except ValueError:
        raise ValueError("must be a whole number" if kind is int else "must be a number") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps `first` to `last`, both included, from 1."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


def read_steps(text: str | None, *, steps: int) -> Steps | None:
    """The steps that `--profile A:B` names, of a run that has so many; None where it is not given.

    Raises:
        RequestError: it is not A:B, or the run has no such steps.
    """
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text)
    if match is None:
        raise RequestError(
            f"--profile {text}: is not A:B; give the first and the last step to trace, as 100:104"
        )
    first, last = map(int, match.groups())
    if not 1 <= first <= last <= steps:
        raise RequestError(
            f"--profile {text}: must be steps of this run from the first to the last: 1 <= A <= B <= {steps} (--steps)"
        )
    if last - first >= MOST_TRACED_STEPS:
        raise RequestError(
            f"--profile {text}: are {last - first + 1} steps, and a trace holds at most {MOST_TRACED_STEPS}; "
            f"give {first}:{first + MOST_TRACED_STEPS - 1} or fewer"
        )
    return Steps(first=first, last=last)


def profile_problems(config: Any) -> list[str]:
    """Messages about --profile, if --steps is set too."""
    messages: list[str] = []
    if config.steps is not None:
        with noted_in(messages):
            read_steps(config.profile, steps=config.steps)
    return messages


def execution_problems(config: Any) -> list[str]:
    """Messages about what is due after so many steps and must be due after whole executions of several."""
    steps = config.steps_per_execution
    return [
        f"--{name.replace('_', '-')} {value}: must be a multiple of --steps-per-execution {steps}; choose "
        f"{-(-value // steps) * steps}"
        for name in ("log_every", "eval_every", "checkpoint_every")
        if steps > 1 and (value := getattr(config, name)) is not None and value >= 1 and value % steps
    ]


def batch_problems(batch_size: int, devices: int, parts: int = 1) -> list[str]:
    """Messages about a batch that devices, each in so many parts, cannot share evenly."""
    share = devices * parts
    below = batch_size // share * share
    if batch_size == below:
        return []
    in_parts = f" in {parts} parts each" if parts > 1 else ""
    fitting = " or ".join(str(size) for size in (below, below + share) if size)
    message = (
        f"--batch-size {batch_size}: is shared out over {devices} devices{in_parts}, so it must be a multiple of "
        f"{share}; choose {fitting}"
    )
    return [message]
