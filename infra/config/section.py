"""Typed reading of nested configuration that collects every mistake instead of stopping at the first. Pure.

A method of `Section` answers with the value, or, where it is absent or wrong, with the default it was given: reading
goes on, and whoever began it raises once all is read. `fine` tells a rule over several keys whether it may trust them.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Callable, Mapping

from contracts.durations import UNITS, spoken
from contracts.suggestions import suggestion

type Rule = Callable[[str], str | None]
"""A rule for a text: returns None if it is valid, otherwise what is wrong and what to write."""

LONGEST_TEXT = 500
LONGEST_SHOWN = 80
LARGEST_NUMBER = 1_000_000

DURATION = re.compile(r"(?=.)(?:([0-9]{1,7})d)?(?:([0-9]{1,7})h)?(?:([0-9]{1,7})m)?(?:([0-9]{1,7})s)?")
DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
MIDNIGHT = " 00:00:00 +0000 UTC"
"""Pulumi takes a date without quotes for a moment, and hands it over (and writes it back) with this behind it."""


class Section:
    """One mapping of the configuration. `prefix` is what stands before a key in its path: `tpu-stack:network.`

    Used with `with`: at its end every key that nothing asked for is an unknown one.
    as_text: values may be texts that stand for others ("true", "40", JSON), as Pulumi hands over the top level.
    hidden: keys that exist and whose values are secret; the caller has recorded them as mistakes.
    """

    def __init__(
        self,
        values: Mapping[object, object],
        *,
        prefix: str,
        problems: list[str],
        as_text: bool = False,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        self._values = values
        self._prefix = prefix
        self._problems = problems
        self._as_text = as_text
        self._hidden = hidden
        self._read_keys: dict[str, None] = {}
        self._wrong: set[str] = set(hidden)

    def __enter__(self) -> Section:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Says of every key that nothing asked for that it is unknown."""
        for key in self._values if kind is None else ():
            if key not in self._read_keys:
                self._problems.append(f"{self.path(key_shown(key))}: unknown key; {self._instead(str(key))}")

    def _instead(self, key: str) -> str:
        """What to do about an unknown key. A key that it seems to stand for is not reported as missing too."""
        if near := suggestion(key_shown(key), self._read_keys):
            missing = f"{self.path(near)}: missing; "
            self._problems[:] = [problem for problem in self._problems if not problem.startswith(missing)]
            return f"did you mean {near}?"
        outer = re.split(r"[.\[]", key)[0]
        if outer in self._read_keys:
            place = "an entry of" if key[len(outer)] == "[" else "a mapping below"
            return f"write it as {place} {outer}:, or with `pulumi config set --path '{self.path(key)}'`"
        return f"the keys here are {', '.join(self._read_keys)}"

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that something has asked for so far."""
        return tuple(self._read_keys)

    def has(self, key: str) -> bool:
        self._read_keys[key] = None
        return key in self._values

    def fine(self, *keys: str) -> bool:
        """Whether nothing was wrong with any of these."""
        return self._wrong.isdisjoint(keys)

    def path(self, key: str) -> str:
        return self._prefix + key

    def say(self, key: str, wrong: str) -> None:
        """Records a mistake at a key."""
        self._read_keys[key] = None
        self._wrong.add(key)
        self._problems.append(f"{self.path(key)}: {wrong}")

    def refuse(self, key: str, wrong: str) -> None:
        """Records a mistake at a key, its value in front."""
        value = self._values.get(key)
        plain = parsed(value) if self._as_text else value
        self.say(key, f"{shown(value if isinstance(plain, float) else plain)} {wrong}")

    def text[D](
        self, key: str, default: D, *, rule: Rule | None = None, missing: str | None = None
    ) -> str | D:
        """missing: what to write, for a key that must be there."""
        if (value := self._value(key, missing)) is None:
            return default
        plain = parsed(value) if self._as_text else value
        wrong = wrong_text(plain if isinstance(plain, Mapping | list) else value, rule)
        if wrong is None and isinstance(value, str):
            return value
        self.refuse(key, wrong or "is not text")
        return default

    def choice[C: str](
        self,
        key: str,
        default: C,
        choices: tuple[C, ...],
        *,
        wrong: str = "is not known",
        missing: str | None = None,
    ) -> C:
        value = self._value(key, missing)
        if value is None:
            return default
        for choice in choices:
            if value == choice:
                return choice
        self.refuse(key, f"{wrong}; choose one of {', '.join(choices)}")
        return default

    def integer[D](
        self, key: str, default: D, *, minimum: int, maximum: int, unit: str = "", missing: str | None = None
    ) -> int | D:
        value = self._value_parsed(key, missing)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            quoted = isinstance(value, str) and value.isascii() and value.isdigit()
            self.refuse(key, "is not a whole number" + ("; write it without quotes" if quoted else ""))
        elif not minimum <= value <= maximum:
            self.refuse(key, f"is not from {minimum} to {maximum}{unit}")
        else:
            return value
        return default

    def number_above_zero(self, key: str) -> float | None:
        value = self._value_parsed(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, "is not a number; write one above 0")
        elif not 0 < value <= LARGEST_NUMBER:
            self.refuse(key, f"is not above 0 and up to {LARGEST_NUMBER}")
        else:
            return float(value)
        return None

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._value_parsed(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(key, "is not true or false")
            return default
        return value

    def is_false(self, key: str) -> bool:
        """Whether a key that takes a mapping has `false` instead, to do without what it describes."""
        return self.has(key) and self._values[key] is False

    def duration[D](self, key: str, default: D, *, least_s: int, most_s: int) -> int | D:
        """A duration in seconds, from 90s, 30m, 6h, 2d or 1h30m."""
        value = self._value(key)
        if value is None:
            return default
        # Of a number too the duration is what is wrong: quotes around it would not help.
        match = DURATION.fullmatch(value if isinstance(value, str) else "")
        if match is None:
            self.refuse(key, "is not a duration; write one such as 90s, 30m, 6h, 2d or 1h30m")
            return default
        units = zip(match.groups(), UNITS, strict=True)
        length_s = sum(int(count or 0) * unit_s for count, (unit_s, _) in units)
        if not least_s <= length_s <= most_s:
            self.refuse(key, f"is not from {spoken(least_s)} to {spoken(most_s)}")
            return default
        return length_s

    def date(self, key: str) -> datetime.date | None:
        value = self._value(key)
        if value is None:
            return None
        text = str(value).removesuffix(MIDNIGHT) if isinstance(value, str | datetime.date) else ""
        if DATE.fullmatch(text):
            with contextlib.suppress(ValueError):
                return datetime.date.fromisoformat(text)
        self.refuse(key, "is not a date; write it as 2026-12-31")
        return None

    def section(self, key: str, *, example: str = "") -> Section:
        """The mapping at a key; an empty one where it is absent or wrong. example: what to write below it."""
        value = self._value_parsed(key)
        if value is not None and not isinstance(value, Mapping):
            such_as = f", such as {example}" if example else ""
            self.refuse(key, f"is not a mapping; write keys and values below it{such_as}")
        mapping = value if isinstance(value, Mapping) else {}
        return Section(mapping, prefix=f"{self.path(key)}.", problems=self._problems)

    def sections(self, key: str, *, missing: str | None = None) -> list[Section]:
        """Each mapping of the list at a key, with its place in the path."""
        sections = []
        for index, value in enumerate(self._list(key, missing)):
            path = f"{self.path(key)}[{index}]"
            if isinstance(value, Mapping):
                sections.append(Section(value, prefix=f"{path}.", problems=self._problems))
            else:
                self._wrong.add(key)
                self._problems.append(
                    f"{path}: {shown(value)} is not a mapping; write keys and values below it"
                )
        return sections

    def texts(self, key: str, *, rule: Rule) -> tuple[str, ...]:
        """The texts of a list; a repeated one is a mistake."""
        texts: dict[str, None] = {}
        for index, value in enumerate(self._list(key, None)):
            wrong = wrong_text(value, rule)
            if wrong is None and value in texts:
                wrong = "is there twice; remove one"
            if wrong is not None:
                self._wrong.add(key)
                self._problems.append(f"{self.path(key)}[{index}]: {shown(value)} {wrong}")
            elif isinstance(value, str):
                texts[value] = None
        return tuple(texts)

    def mapping(self, key: str, *, key_rule: Rule, value_rule: Rule) -> dict[str, str]:
        """Texts by name, the names being the user's own."""
        inner = self.section(key)
        texts: dict[str, str] = {}
        for name in inner._values:
            wrong_name = wrong_text(name, key_rule)
            if wrong_name is not None:
                self._wrong.add(key)
                self._problems.append(f"{self.path(key)}: {shown(name)} {wrong_name}")
                continue
            text = inner.text(str(name), None, rule=value_rule)
            if text is not None:
                texts[str(name)] = text
        if inner._wrong:
            self._wrong.add(key)
        return texts

    def _value(self, key: str, missing: str | None = None) -> object:
        """The value of a key; None if it is absent or unusable, after recording a mistake where that is one."""
        if not self.has(key):
            if missing is not None and key not in self._hidden:
                self.say(key, f"missing; {missing}")
            return None
        value = self._values[key]
        if value is None or value == "":
            self.say(key, "has no value; write one, or remove the key")
            return None
        return value

    def _value_parsed(self, key: str, missing: str | None = None) -> object:
        value = self._value(key, missing)
        return parsed(value) if self._as_text else value

    def _list(self, key: str, missing: str | None) -> list[object]:
        value = self._value_parsed(key, missing)
        if value is not None and not isinstance(value, list):
            self.refuse(key, "is not a list; write each entry on a line of its own after a hyphen")
        return value if isinstance(value, list) else []


# --- values as YAML and Pulumi have them ------------------------------------------------------------------------


def shown(value: object) -> str:
    """A value in a message: on one line, and short."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple | set):
        return "a list"
    if isinstance(value, int) and value.bit_length() > 200:
        return "a huge number"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    text = str(value)
    if len(text) > LONGEST_SHOWN:
        text = text[:LONGEST_SHOWN] + "…"
    return json.dumps(text, ensure_ascii=not text.isprintable())


def wrong_text(value: object, rule: Rule | None) -> str | None:
    """What is wrong with a value that should be a text, or None."""
    if isinstance(value, Mapping) and len(value) == 1 and isinstance(text := next(iter(value.values())), str):
        return f"is not text; leave out the blank after the colon: {shown(f'{next(iter(value))}:{text}')}"
    if not isinstance(value, str):
        plain = isinstance(value, bool | int | float)
        return "is not text" + ("; put it in quotes" if plain else "")
    if len(value) > LONGEST_TEXT:
        return f"is longer than {LONGEST_TEXT} characters"
    if not value.isprintable():
        return "has a character that cannot be printed; remove it"
    return rule(value) if rule else None


def key_shown(key: object) -> str:
    """A key in a path, as it is written where that can be printed."""
    plain = isinstance(key, str) and key.isprintable() and 0 < len(key) <= LONGEST_SHOWN
    return str(key) if plain else shown(key)


def parsed(value: object) -> object:
    """The value of a text that is JSON; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        decoded: object = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return value if isinstance(decoded, str) else decoded
