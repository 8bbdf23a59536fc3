"""Reads the files of a run directory as checked values, whoever has written them.

Jobs, commands of the user's own, agents and other versions write there. Every reader takes what it can use: a field
that is kept has the kind that `contracts.run_directory` gives it, and what could not be read is named, once. Standard
library only: it is read on hosts too.
"""

from __future__ import annotations

import json
import math
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    from contracts.aliases import Json
    from contracts.files import Piece

    Rule = Callable[[Any], bool]

RUN = "run.json"
RUN_VERSION = 1
"""Of run.json."""
OWN_COMMAND = "command"
"""The `job` in run.json for a command of the user's."""
MOMENT = "%Y-%m-%dT%H:%M:%SZ"
"""The format of a time in run.json, in UTC."""
METRICS = "metrics.jsonl"
LARGEST_JSON_BYTES = 2**20
"""Of run.json and its like, which have some thousand bytes; a larger one is not read."""
LONGEST_TEXT = 500
LONGEST_EXAMPLE = 60
MOST_PROCESSES = 4096
MOST_KINDS = 10
"""Of what could not be read; there may be thousands, and the first ones tell enough."""
FIRST_MOMENT_S, LAST_MOMENT_S = 1e9, 1e11
"""Unix seconds of a line of metrics: what is less has been counted from the start of a program."""
TORN = "is torn, or no JSON object"


def parse_time(text: str) -> float:
    """The Unix time of a moment in run.json.

    Raises:
        ValueError: it is none.
    """
    import calendar  # the agent, which starts for every question, needs neither
    import time

    return float(calendar.timegm(time.strptime(text, MOMENT)))


def moment(unix_s: float) -> str:
    """A time as run.json has it."""
    import time

    return time.strftime(MOMENT, time.gmtime(unix_s))


def example(value: object) -> str:
    """A value as a message shows it, as JSON would write it, on one line of bounded length."""
    try:
        text = json.dumps(value)
    except (RecursionError, TypeError, ValueError):
        text = "…"
    return text if len(text) <= LONGEST_EXAMPLE else f"{text[: LONGEST_EXAMPLE - 1]}…"


class Unread:
    """The parts of a run's files that could not be read: each kind once, with its first example and its count."""

    def __init__(self, *messages: str) -> None:
        self._kinds: dict[str, tuple[str, str, int]] = {}
        self._announced: set[str] = set()
        for text in messages:
            self.add(text)

    def add(self, first: str, *, kind: str = "", more: str = "") -> None:
        """first: the message. kind: messages of one kind count as one; by default the message itself. more: what is
        added if there are several, with {count}.
        """
        example, kept_more, count = self._kinds.get(kind or first, (first, more, 0))
        if count or len(self._kinds) < MOST_KINDS:
            self._kinds[kind or first] = (example, kept_more, count + 1)

    def texts(self) -> list[str]:
        """A message for each kind, with its count."""
        return [self._text(kind) for kind in self._kinds]

    def unannounced(self) -> list[str]:
        """The messages of those kinds that no earlier call has returned."""
        fresh = [kind for kind in self._kinds if kind not in self._announced]
        self._announced |= {*fresh}
        return [self._text(kind) for kind in fresh]

    def _text(self, kind: str) -> str:
        first, more, count = self._kinds[kind]
        return first + (more.format(count=f"{count:,}") if count > 1 else "")


# --- JSON files ---------------------------------------------------------------------------------------------------


def parse_object(data: bytes | str) -> Json | None:
    """The JSON object in a file or a line; None where it holds none. A byte order mark is skipped."""
    text = data.decode("utf-8", errors="replace") if isinstance(data, bytes) else data
    try:
        value = json.loads(text.lstrip("\ufeff"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def parse_piece(
    piece: Piece | None, name: str, most_bytes: int = LARGEST_JSON_BYTES
) -> tuple[Json | None, str | None]:
    """The JSON object of a file, and why there is none where there should be."""
    if piece is None:
        return None, None
    if piece.error:
        return None, f"{name}: {piece.error}"
    if piece.size > max(most_bytes, len(piece.data)):
        return None, f"{name}: has {piece.size:,} bytes, more than the {most_bytes:,} that are read"
    value = parse_object(piece.data)
    if value is None:
        return None, f"{name}: is empty" if not piece.data.strip() else f"{name}: {TORN}"
    return value, None


def mistake(record: Json, run_id: str | None) -> str | None:
    """Why a run.json is none that this version can go by; None where it is one. run_id: what it has to be, if known."""
    if record.get("version") != RUN_VERSION:
        return (
            f"{RUN}: has version {example(record.get('version'))}, and this tpu-stack reads version {RUN_VERSION}; use "
            "the checkout that the run was started from (code.git_commit in that file)"
        )
    rules: dict[str, Rule] = {
        "run_id": lambda value: is_text(value) and run_id in (None, value),
        "job": is_text,
        "created": is_moment,
        "args": lambda value: isinstance(value, list) and bool(value or record.get("job") != OWN_COMMAND),
        "hosts": lambda value: isinstance(value, list) and all(map(_is_host, value)),
        "attempts": lambda value: isinstance(value, list) and bool(value) and all(map(_is_attempt, value)),
        "track": _or_none(_is_list_of_texts),
        "sweep": _or_none(_is_sweep),
        **dict.fromkeys(("env", "secrets"), _or_none(_is_environment)),
        **dict.fromkeys(("name", "stack", "platform", "target"), _or_none(is_text)),
        **dict.fromkeys(("image", "cwd", "cache_dir"), _or_none(_is_string)),
        "code": _or_none(
            lambda value: isinstance(value, dict) and _or_none(is_text)(value.get("git_commit"))
        ),
        **dict.fromkeys(("config", "slice", "versions"), _or_none(lambda value: isinstance(value, dict))),
        **dict.fromkeys(("max_usd", "hang_limit_s", "heartbeat_limit_s"), _or_none(_is_amount)),
    }
    wrong = [key for key, is_right in rules.items() if not is_right(record.get(key))]
    if wrong[:1] == ["run_id"] and is_text(record.get("run_id")):
        return f"{RUN}: is that of run {record['run_id']}; give its folder this name again"
    return f"{RUN}: {wrong[0]} is {example(record.get(wrong[0]))}, which no run has" if wrong else None


def _or_none(rule: Rule) -> Rule:
    return lambda value: value is None or rule(value)


def is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_TEXT


def is_moment(value: object) -> bool:
    """Whether it is a moment as run.json has them."""
    try:
        return is_text(value) and parse_time(str(value)) >= 0
    except (ValueError, OverflowError):
        return False


def is_count(value: object, maximum: float = 1e15) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= maximum


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def _is_environment(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is_sweep(value: object) -> bool:
    return isinstance(value, dict) and is_text(value.get("name")) and isinstance(value.get("options"), dict)


def _is_host(value: object) -> bool:
    return isinstance(value, dict) and is_text(value.get("name")) and is_count(value.get("index"))


def _is_attempt(value: object) -> bool:
    if not isinstance(value, dict) or not is_moment(value.get("started")):
        return False
    return is_count(value.get("attempt")) and is_count(value.get("processes"), MOST_PROCESSES)


def amount(value: object) -> float | None:
    """The value where it is a number of seconds, steps or dollars: finite, and not below 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if 0 <= value < 1e15 else None


def _is_amount(value: object) -> bool:
    return amount(value) is not None


def _is_unix_time(value: object) -> bool:
    at_s = amount(value)
    return at_s is not None and at_s < LAST_MOMENT_S


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e15


def _is_string(value: object) -> bool:
    return isinstance(value, str)


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_string, value))


def _are_amounts(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_amount, value.values()))


_HEARTBEAT: dict[str, Rule] = {
    "rank": is_count,
    "attempt": is_count,
    "state": is_text,
    "step": is_count,
    "time": _is_unix_time,
    "step_time": _is_amount,
    "pid": _is_whole,
    "message": _is_string,
    "exit_code": _is_whole,
    "warnings": _are_strings,
    "timing": lambda value: isinstance(value, dict),
}
_RESULT: dict[str, Rule] = {
    "outcome": is_text,
    "attempt": is_count,
    "steps": is_count,
    "wall_s": _is_amount,
    "time": _is_unix_time,
    "error": _is_string,
    "reason": _is_string,
    "failed_host": is_count,
    "exit_code": _is_whole,
    "exported_step": is_count,
    "tensorboard": _is_string,
    "time_s": _are_amounts,
    "warnings": _are_strings,
}


def heartbeat(value: Json, name: str) -> tuple[Json | None, str | None]:
    """A heartbeat with those of its fields that are of the right kind, and what was wrong; None without its state or
    time. One without a step has taken none."""
    beat, problem = _checked(value, _HEARTBEAT, name)
    missing = [key for key in ("state", "time") if beat.get(key) is None]
    if missing:
        return None, problem or f"{name}: has no {missing[0]}"
    return {**beat, "step": beat.get("step") or 0}, problem


def result(value: Json, name: str) -> tuple[Json, str | None]:
    """The content of result.json without those of its known fields that are of another kind, and what was wrong."""
    return _checked(value, _RESULT, name)


def _checked(value: Json, rules: dict[str, Rule], name: str) -> tuple[Json, str | None]:
    wrong = [
        key for key, is_right in rules.items() if value.get(key) is not None and not is_right(value[key])
    ]
    valid = {key: part for key, part in value.items() if key not in wrong}
    return valid, f"{name}: {wrong[0]} is {example(value[wrong[0]])}, which no run has" if wrong else None


# --- metrics.jsonl ------------------------------------------------------------------------------------------------


def metrics(lines: Sequence[bytes], unread: Unread | None = None) -> list[Json]:
    """The measurements in lines of metrics.jsonl.

    Of each: `step`, a number of at least 0 (whole, unless its script counts parts of steps); `time`, in Unix seconds;
    and its other numbers, None where one is not finite. What is no number is left out; null is no mistake. A number
    that was written as text counts ("0.5", as `json.dumps(…, default=str)` writes NumPy's), and so does a time in ISO
    8601. unread: is told what was left out.
    """
    unread = unread or Unread()
    return [_measured(value, unread) for value in _objects([line for line in lines if line.strip()], unread)]


def without_retaken(
    lines: Sequence[Mapping[str, Any]], attempts: int
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Lines of metrics, as `metrics` returns them, without the values that were measured again later, and a message on
    those, if there are any.

    Of two values of a number at one step the later counts. In a run of several attempts, as of a script that is resumed
    from its own checkpoint, a number that goes back to an earlier step leaves none of its values from there on.
    """
    later_steps: dict[str, set[float]] = {}
    lowest: dict[str, float] = {}
    retained: list[Mapping[str, Any]] = []
    retaken: list[float] = []
    for line in reversed(lines):
        step = amount(line.get("step"))
        if step is None:
            retained.append(line)
            continue
        names = [name for name in line if name not in ("step", "time")]
        old = {
            name
            for name in names
            if step in later_steps.get(name, ()) or (attempts > 1 and step >= lowest.get(name, math.inf))
        }
        for name in names:
            later_steps.setdefault(name, set()).add(step)
            lowest[name] = min(step, lowest.get(name, math.inf))
        if old:
            retaken.append(step)
        if not old or len(old) < len(names):
            retained.append({name: value for name, value in line.items() if name not in old})
    return retained[::-1], retaken_message(retaken)


def retaken_message(steps: Sequence[float]) -> list[str]:
    """The message about steps that were measured again."""
    if not steps:
        return []
    first, last = min(steps), max(steps)
    span = f"step {first:g} was" if first == last else f"steps {first:g} to {last:g} were"
    return [f"{METRICS}: {span} measured again, as after a resume; the later values count"]


def is_whole(line: bytes) -> bool:
    """Whether a line that has no end yet is whole, as the last one of a script that leaves the newline out."""
    return line.rstrip().endswith(b"}") and bool(_concatenated(line))


def _objects(lines: Sequence[bytes], unread: Unread) -> Iterator[Json]:
    for line, value in zip(lines, _decoded(lines), strict=True):
        if isinstance(value, dict):
            yield value
        else:
            objects = _concatenated(line)
            if not objects:
                text = line[: 4 * LONGEST_EXAMPLE].decode("utf-8", errors="replace").strip()
                unread.add(
                    f"{METRICS}: a line {TORN}, and is left out: {example(text)}",
                    kind="line",
                    more=" (the first of {count})",
                )
            yield from objects


def _decoded(lines: Sequence[bytes]) -> Sequence[object]:
    """The JSON of each line, None where it is none; all at once where that goes, as it takes half the time."""
    try:
        values: list[object] = json.loads(b"[" + b",".join(lines) + b"]")
        if len(values) == len(lines):
            return values
    except (ValueError, RecursionError):
        pass
    return [parse_object(line) for line in lines]


def _concatenated(line: bytes) -> list[Json]:
    """The objects of a line that has several, as a script writes that leaves the newlines out; else none."""
    text, decoder, at = line.decode("utf-8", errors="replace").strip(), json.JSONDecoder(), 0
    values: list[Json] = []
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        if not isinstance(value, dict):
            return []
        values.append(value)
        while at < len(text) and text[at].isspace():
            at += 1
    return values


def _measured(line: Json, unread: Unread) -> Json:
    if _is_plain(line):
        return line
    measured: Json = {}
    for name, value in line.items():
        if value is None and name in ("step", "time"):
            continue
        rule, read = _FIELDS.get(name, ("is no number", _number))
        is_valid, number = read(value)
        if is_valid:
            measured[name] = number
        else:
            unread.add(
                f"{METRICS}: {name[:LONGEST_EXAMPLE]} is {example(value)}, which {rule} and is left out",
                kind=f"field {name}",
                more=" ({count} times)",
            )
    return measured


def _is_plain(line: Json) -> bool:
    """Whether nothing of a line has to be changed, as of nearly all; in a third of the time that the rest takes."""
    values = line.values()
    try:
        return (
            {*map(type, values)} <= {float, int}
            and math.isfinite(math.fsum(values))
            and type(step := line.get("step", 0)) is int
            and 0 <= step < 1e15
            and FIRST_MOMENT_S <= line.get("time", FIRST_MOMENT_S) < LAST_MOMENT_S
        )
    except (OverflowError, ValueError):
        return False


def _number(value: object) -> tuple[bool, float | None]:
    """Whether a value is a number, and that number; None where it is not finite."""
    if value is None:
        return True, None
    if isinstance(value, str) and _is_numeral(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False, None
    try:
        return True, value if math.isfinite(value) else None
    except OverflowError:  # a whole number that is no float
        return True, None


def _is_numeral(text: str) -> bool:
    pattern = r"[+-]?(\d{1,400}\.?\d{0,400}|\.\d{1,400})(e[+-]?\d{1,5})?|[+-]?inf(inity)?|nan"
    return re.fullmatch(pattern, text.strip(), re.IGNORECASE) is not None  # compiled when it is first needed


def _step(value: object) -> tuple[bool, float | None]:
    _, number = _number(value)
    if number is None or not 0 <= number < 1e15:
        return False, None
    return True, int(number) if number == int(number) else number


def _time(value: object) -> tuple[bool, float | None]:
    if isinstance(value, str) and not _is_numeral(value):
        import datetime

        try:
            at = datetime.datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", value.strip()))
            number: float | None = at.replace(tzinfo=at.tzinfo or datetime.timezone.utc).timestamp()
        except (ValueError, OverflowError):
            return False, None
    else:
        _, number = _number(value)
    return (
        (True, number) if number is not None and FIRST_MOMENT_S <= number < LAST_MOMENT_S else (False, None)
    )


_FIELDS = {
    "step": ("is no number of 0 or more", _step),
    "time": ("is no date (Unix seconds, or ISO 8601)", _time),
}
