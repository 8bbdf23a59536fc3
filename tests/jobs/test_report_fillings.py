"""Held-out sentences in the report: readable, safe, and never a reason for there being no report."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.flax_mlm import METRICS
from jobs.runtime.metric_definitions import as_json
from jobs.runtime.report.fillings import fillings
from jobs.runtime.report.render import render

ONE = {
    "before": "Return the",
    "after": " of <b>x</b>",
    "truth": "length",
    "guesses": [["size", 0.52], ["length", 0.3]],
}


def test_the_true_word_is_marked_in_its_text_and_among_the_guesses() -> None:
    shown = fillings({"fillings": [ONE]})
    assert "Return the <mark>length</mark> of &lt;b&gt;x&lt;/b&gt;" in shown
    assert "size 52 % · <b>length</b> 30 %" in shown


def test_guesses_that_are_no_words_are_to_be_seen_as_what_they_are() -> None:
    shown = fillings({"fillings": [{**ONE, "guesses": [[",", 0.4], ["", 0.2], ["v2", 0.1]]}]})
    assert "“,” 40 % · “” 20 % · v2 10 %" in shown


def test_the_page_has_the_sentences_and_the_pseudo_perplexity() -> None:
    page = render(
        {"metric_definitions": as_json(METRICS)},
        [],
        {"outcome": "done", "pseudo_perplexity": 41.26, "fillings": [ONE]},
        [],
    )
    assert "What it has learned" in page
    assert "<dt>Pseudo-perplexity</dt><dd>41.3</dd>" in page


def test_a_run_without_them_has_no_such_part() -> None:
    assert fillings({}) == ""
    assert "Pseudo-perplexity" not in render({}, [], {"outcome": "done"}, [])


@pytest.mark.parametrize(
    "broken", [None, 3, "x", [None], [{"guesses": 4}], [{"guesses": [[1], ["a", "b"], None]}]]
)
def test_whatever_stands_there_instead_stops_no_page(broken: Any) -> None:
    assert render({}, [], {"outcome": "done", "fillings": broken}, [])
