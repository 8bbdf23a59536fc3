"""Held-out sentences with a word hidden, and what the model would write there: the part of a report to be read."""

from jobs.runtime.report.fields import Json, number, rows, text
from jobs.runtime.report.page import escape

_MOST = 20
_MOST_GUESSES = 5


def fillings(result: Json) -> str:
    """One row a sentence: the true word marked in its text, beside it the guesses with their probabilities."""
    lines = [_row(each) for each in rows(result.get("fillings"))[:_MOST]]
    if not lines:
        return ""
    told = "Held-out sentences with the marked word hidden, and what the model would write in its place."
    table = f"<table><tr><th>text</th><th>guesses</th></tr>{''.join(lines)}</table>"
    return f'<h2>What it has learned</h2><p>{told}</p><div class="scroll">{table}</div>'


def quoted(token: str) -> str:
    """A guess for people: a comma, a dash, a blank or nothing is only to be seen between quotation marks."""
    return token if any(character.isalnum() for character in token) else f"“{token}”"


def _row(each: Json) -> str:
    truth, guesses = text(each.get("truth", "")), each.get("guesses")
    pairs = (
        [pair for pair in guesses if isinstance(pair, list) and len(pair) == 2]
        if isinstance(guesses, list)
        else []
    )
    shown = " · ".join(
        f"{'<b>' if text(word) == truth else ''}{escape(quoted(text(word)))}{'</b>' if text(word) == truth else ''} "
        f"{100 * share:.0f} %"
        for word, value in pairs[:_MOST_GUESSES]
        if (share := number(value)) is not None
    )
    before, after = (escape(each.get(side, "")) for side in ("before", "after"))
    return f"<tr><td>{before} <mark>{escape(truth)}</mark>{after}</td><td>{shown}</td></tr>"
