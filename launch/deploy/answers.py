"""What hosts answer while their steps are carried out, line by line; what is no answer is kept to be shown."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Literal, cast, get_args

from launch.errors import HostError
from launch.printable import printable
from launch.transport import Stream

State = Literal["doing", "ok", "changed", "skipped", "warned", "failed"]
STATES: tuple[State, ...] = get_args(State)
LONGEST_LINE = 64 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One step of one host. `doing`: it is under way, and the message says with what.
    `warned`: it failed, and no run needs it."""

    step: str
    state: State
    message: str
    remedy: str = ""
    took_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one host: its steps that have ended, and why there are no more, where it was lost."""

    host: str
    answers: tuple[Answer, ...]
    error: HostError | None = None

    @property
    def changed(self) -> bool:
        return any(answer.state == "changed" for answer in self.answers)

    @property
    def failed(self) -> bool:
        return self.error is not None or any(answer.state == "failed" for answer in self.answers)


class Reader:
    """Takes a host's output in pieces and gives its answers; memory is bounded, whatever the host sends."""

    def __init__(self) -> None:
        self._rest = b""
        self.last_words = ""

    def take(self, stream: Stream, data: bytes) -> Iterator[Answer]:
        if stream == "err":
            self._keep(data)
            return
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-LONGEST_LINE:]
        for line in lines:
            answer = parse(line)
            if answer is None:
                self._keep(line)
            else:
                yield answer

    def _keep(self, data: bytes) -> None:
        said = data.decode(errors="replace").strip().splitlines()
        self.last_words = printable(said[-1][:500]) if said else self.last_words


def parse(line: bytes) -> Answer | None:
    """The answer in a line; None where it holds none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.get("state") not in STATES:
        return None
    texts = {name: value.get(name) for name in ("step", "message", "remedy")}
    took_s = value.get("took_s", 0)
    if not all(isinstance(text, str) for text in texts.values()) or not isinstance(took_s, int | float):
        return None
    return Answer(
        state=cast(State, value["state"]),
        took_s=float(took_s),
        **{name: printable(str(text)) for name, text in texts.items()},
    )
