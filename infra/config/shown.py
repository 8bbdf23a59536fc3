"""Values as YAML and Pulumi have them: how a message shows one, what is wrong with one that is to be text. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

type Rule = Callable[[str], str | None]
"""Of a text: None where it is good, otherwise what is wrong with it and what to write."""

LONGEST_TEXT = 500
LONGEST_SHOWN = 80


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
    """What is wrong with a value that should be a text, if anything is."""
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
    """What a text stands for where it is JSON; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        found: object = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return value if isinstance(found, str) else found
