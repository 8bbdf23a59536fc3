"""A host's answers: told apart from whatever else it prints, in bounded memory."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.deploy.deploy import LONGEST_LINE, Answer, Reader, parse

LINE = json.dumps({"step": "s", "state": "ok", "message": "m", "remedy": "", "took_s": 1}).encode()


@given(st.lists(st.integers(1, 40)))
def test_answers_are_the_same_however_the_output_is_cut(cuts: list[int]) -> None:
    data, reader, at = (b"welcome\n" + LINE + b"\n") * 3, Reader(), 0
    found: list[Answer] = []
    for size in [*cuts, len(data)]:
        found += reader.take("out", data[at : at + size])
        at += size
    assert found == [Answer(step="s", state="ok", message="m", took_s=1.0)] * 3


@given(st.binary())
def test_no_output_whatever_breaks_the_reader(data: bytes) -> None:
    reader = Reader()
    assert list(reader.take("err", data)) == []
    list(reader.take("out", data))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["step", "state", "message", "remedy", "took_s"]), inner)
        ),
    )
)
def test_what_only_looks_like_an_answer_is_none(value: object) -> None:
    found = parse(json.dumps(value).encode())
    assert found is None or isinstance(value, dict)


def test_an_endless_line_takes_no_more_memory_than_a_long_one() -> None:
    reader, piece = Reader(), b"x" * 65536
    tracemalloc.start()
    for _ in range(500):
        list(reader.take("out", piece))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * LONGEST_LINE


def test_the_last_words_of_a_host_without_python_are_kept() -> None:
    reader = Reader()
    assert list(reader.take("err", b"bash: python3: command not found\n")) == []
    assert reader.last_words == "bash: python3: command not found"


@pytest.mark.parametrize("field", ["step", "state", "message", "remedy", "took_s"])
def test_an_answer_with_a_field_of_another_kind_is_none(field: str) -> None:
    assert parse(LINE) is not None
    assert parse(json.dumps({**json.loads(LINE), field: None}).encode()) is None
