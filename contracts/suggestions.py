"""Suggestions for a word that is not known: one rule for commands, options, keys and names.

A suggestion is made only where it fits what was typed; a wrong one misleads more than none.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

SHORTEST_PREFIX = 3
SHORTEST_WITH_AN_EDIT = 4
SHORTEST_WITH_A_REPLACEMENT = 5
SHORTEST_WITH_TWO_EDITS = 10
DASHES = (
    "\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{FIGURE DASH}\N{EN DASH}\N{EM DASH}\N{HORIZONTAL BAR}\N{MINUS SIGN}"
)
QUOTES = {**dict.fromkeys("“”„‟«»", '"'), **dict.fromkeys("‘’‚‛", "'")}


def suggestion(word: str, choices: Iterable[str]) -> str | None:
    """Return the one of `choices` that `word` stands for; None if none is near, or several are equally near.

    The first rule that fits decides: the same but for case, spaces and punctuation; the beginning of a name; one
    letter too many, too few or swapped with the next, or in longer words another letter; two of these in words of ten
    letters. A digit is never replaced: another number is another thing.
    """
    typed, names = _letters(word), {name: _letters(name) for name in choices}
    rules = (
        lambda name: name == typed,
        lambda name: len(typed) >= SHORTEST_PREFIX and name.startswith(typed),
        lambda name: _is_near(typed, name, 1),
        lambda name: max(len(typed), len(name)) >= SHORTEST_WITH_TWO_EDITS and _is_near(typed, name, 2),
    )
    fitting = ([name for name, letters in names.items() if rule(letters)] for rule in rules)
    nearest = next(filter(None, fitting), []) if typed else []
    return nearest[0] if len(nearest) == 1 else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return the suggestion as the end of a message, with a semicolon in front; "" without one."""
    near = suggestion(word, choices)
    return f"; did you mean {near}?" if near else ""


def copied_character(word: str) -> str | None:
    """Return what is wrong with a word that begins with a dash or a quote that no keyboard types; None: nothing is.

    Web pages and documents show -- as a dash, and straight quotes as curved ones.
    """
    first = word[:1]
    if not first or first not in DASHES + "".join(QUOTES):
        return None
    name = unicodedata.name(first).lower()
    if first in QUOTES:
        return f"{word}: begins with {first} ({name}), which a shell does not read as a quote; type {QUOTES[first]}"
    typed = word.lstrip(DASHES + "-")
    return f"{word}: begins with {first} ({name}), as copied from a page; type two hyphens: --{typed}".rstrip(
        ": "
    )


def _letters(word: str) -> str:
    """Return the letters and digits of a word in lower case."""
    return re.sub(r"[\W_]", "", unicodedata.normalize("NFKC", word).casefold())


def _is_near(typed: str, name: str, edits: int) -> bool:
    longer = max(len(typed), len(name))
    return longer >= SHORTEST_WITH_AN_EDIT and _is_within_edits(
        typed, name, edits, replaces=longer >= SHORTEST_WITH_A_REPLACEMENT
    )


def _is_within_edits(left: str, right: str, edits: int, *, replaces: bool) -> bool:
    """Return whether so many insertions, removals, swaps of neighbours and replacements lead from `left` to `right`."""
    while left and right and left[0] == right[0]:
        left, right = left[1:], right[1:]
    if not left + right:
        return True
    if edits == 0:
        return False
    steps = []
    if len(left) > 1 and len(right) > 1 and left[:2] == right[1::-1]:
        steps.append((left[2:], right[2:]))
    if not left[:1].isdigit():
        steps.append((left[1:], right))
    if not right[:1].isdigit():
        steps.append((left, right[1:]))
    if replaces and not left[:1].isdigit() and not right[:1].isdigit():
        steps.append((left[1:], right[1:]))
    return any(_is_within_edits(*step, edits - 1, replaces=replaces) for step in steps)
