"""Questions, windows, places and scores of tf_squad, without TensorFlow."""

import bz2
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from contracts.errors import RequestError
from jobs.glue.tokenizer import open_tokenizer, train_tokenizer
from jobs.tf_squad import data, scores, windows
from jobs.tf_squad.config import Config, problems
from jobs.tf_squad.data import Question

TEXT = "The Rhine is a river. It rises in the Alps and ends in the North Sea, near Rotterdam."


def article(*asked: dict[str, Any], text: str = TEXT, title: str = "Rhine") -> dict[str, Any]:
    return {"title": title, "paragraphs": [{"context": text, "qas": list(asked)}]}


def asked(named: str, answer: str | None = "the Alps", *, start: int | None = None) -> dict[str, Any]:
    at = TEXT.find(answer or "") if start is None else start
    answers = [] if answer is None else [{"text": answer, "answer_start": at}]
    return {"id": named, "question": f"Where, {named}?", "answers": answers, "is_impossible": answer is None}


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., str]:
    def write(*articles: dict[str, Any], name: str = "train.json") -> str:
        path = tmp_path / name
        path.write_text(json.dumps({"version": "v2.0", "data": list(articles)}))
        return str(path)

    return write


def test_every_mistake_of_a_file_is_named_by_its_paragraph_and_question(file: Callable[..., str]) -> None:
    lone: dict[str, Any] = {"id": "q5", "question": "\ud800", "answers": "none"}
    path = file(
        article(
            asked("q1"), asked("q2", start=3), asked("q1"), {**asked("q3", None), "is_impossible": False}
        ),
        {"title": "empty"},
        article(lone, {**asked("q6"), "answers": [{"text": "the Alps", "answer_start": "34"}]}),
        article({**asked("q7"), "answers": [{"text": "the Andes", "answer_start": 34}]}),
    )
    (said,) = [each for each in [data.problems(Config(data=path), Path())] if each]
    first, third, fourth = (f"data[{n}].paragraphs[0].qas" for n in (0, 2, 3))
    not_at = "the answer 'the Alps' is not at answer_start 3, where the text has ' Rhine i'; it is at 34"
    nowhere = "the answer 'the Andes' is not at answer_start 34, where the text has 'the Alps '"
    assert [line.removeprefix("--data: ") for line in said] == [
        f"{first}[1] (id q2).answers[0]: {not_at}",
        f"{first}[2] (id q1): the id is that of an earlier question; each needs one of its own",
        f"{first}[3] (id q3): no answers, and is_impossible is not true; add one of the two",
        "data[1]: has no 'paragraphs'",
        f"{third}[0] (id q5): question is not UTF-8; convert the file (`iconv -f ENCODING -t UTF-8`)",
        f"{third}[0] (id q5): answers must be a list, and is 'none'",
        f"{third}[1] (id q6).answers[0]: answer_start must be a whole number, and is '34'",
        f"{fourth}[0] (id q7).answers[0]: {nowhere}; it is nowhere in the text; mend or remove what is wrong",
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[1]", "train.json:1: JSON, but no object"),
        ('{"version": 1}', "train.json:1: has no 'id'"),
        ('{"data": []}', "holds no questions"),
        ("{", "not JSON"),
        (None, "No such file or directory"),
        (
            '{"id": "a", "context": "a b", "question": "c", "is_impossible": "false", "answers": []}',
            "is_impossible must be true or false, and is 'false'",
        ),
        (
            '{"id": "a", "context": "a b", "question": "c", "is_impossible": 0, "answers": []}',
            "is_impossible must be true or false, and is '0'",
        ),
        (
            '{"id": "a", "context": "b", "question": "c", "is_impossible": true, "answers": [{"text": "b"}]}',
            "is_impossible is true, and there are answers",
        ),
        (
            '{"id": "a", "context": "b", "question": "c", "answers": [{"text": "b", "answer_start": '
            + "1" * 5_000
            + "}]}",
            "answer_start must be a whole number",
        ),
    ],
)
def test_a_file_that_is_none_of_squad_is_refused(tmp_path: Path, content: str | None, reason: str) -> None:
    path = tmp_path / "train.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RequestError, match=reason):
        data.read(Config(data=str(path)))


def test_rows_of_a_question_each_are_the_same_questions(file: Callable[..., str], tmp_path: Path) -> None:
    several = [asked(f"{n}", "the Alps" if n % 3 else None) for n in range(40)]
    nested = data.read(
        Config(data=file(*(article(one, text=f"{TEXT} {n}") for n, one in enumerate(several))))
    )
    rows: list[dict[str, Any]] = [
        {
            "id": one["id"],
            "title": "Rhine",
            "context": f"{TEXT} {n}",
            "question": one["question"],
            "answers": {key: [each[key] for each in one["answers"]] for key in ("text", "answer_start")},
        }
        for n, one in enumerate(several)
    ]
    lines, table = tmp_path / "lines", tmp_path / "table.json"
    lines.write_bytes(bz2.compress("\n".join(map(json.dumps, rows)).encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    for path in (lines, table):
        assert data.read(Config(data=str(path))) == nested
    rows[1]["answers"]["answer_start"] = [3]
    rows[2]["answers"]["answer_start"] = []
    lines.write_text("\n".join(map(json.dumps, rows)))
    wrong = r"lines:2.answers\[0\]: the answer 'the Alps' is not at answer_start 3(.|\n)*lines:3: 1 texts of answers"
    with pytest.raises(RequestError, match=wrong):
        data.read(Config(data=str(lines)))


def test_held_out_questions_share_no_text_and_with_many_titles_no_title(file: Callable[..., str]) -> None:
    articles = [
        article(asked(f"{n}-{m}"), text=f"{TEXT} {n}", title=f"title {n}")
        for n in range(60)
        for m in range(2)
    ]
    read = data.read(Config(data=file(*articles)))
    assert not {each.title for each in read.train} & {each.title for each in read.eval}
    few = data.read(Config(data=file(*({**each, "title": "one"} for each in articles))))
    assert few.eval and not {each.text for each in few.train} & {each.text for each in few.eval}
    assert few.baseline == 1.0  # all answers are in one place


def test_the_default_questions_have_their_answers_in_texts_that_are_held_out_whole() -> None:
    read = data.read(Config())
    assert len(read.train) > 1_500 and len(read.eval) > 150 and read.baseline < 0.1
    for each in (*read.train, *read.eval):
        assert each.text[each.starts[0] :].startswith(each.answers[0])
    train, held_out = (
        {part for each in split for part in each.text.split(". ")} for split in (read.train, read.eval)
    )
    assert not train & held_out  # no sentence is in both


# Worked by hand from the definitions: small letters, no punctuation, no articles; F1 over words as a multiset.
WORKED = [
    ("the Alps", ["Alps"], 1.0, 1.0),
    ("The  Alps!", ["alps"], 1.0, 1.0),
    ("Denver Broncos", ["Broncos", "The Denver Broncos."], 1.0, 1.0),
    ("in the Swiss Alps", ["the Alps"], 0.0, 2 * (1 / 3) * 1 / (1 / 3 + 1)),
    ("very very high", ["very high"], 0.0, 2 * (2 / 3) * 1 / (2 / 3 + 1)),
    ("very very high", ["very very low"], 0.0, 2 / 3),
    ("Rotterdam", ["the Alps"], 0.0, 0.0),
    ("theory", ["ory"], 0.0, 0.0),
    ("", [], 1.0, 1.0),
    ("the Alps", [], 0.0, 0.0),
    ("", ["the Alps"], 0.0, 0.0),
    ("U.S.A.", ["USA"], 1.0, 1.0),
    ("anteater and a cat", ["anteater and cat"], 1.0, 1.0),
]


@pytest.mark.parametrize(("answer", "truths", "exact", "f1"), WORKED)
def test_exact_match_and_f1_are_those_of_squad(
    answer: str, truths: list[str], exact: float, f1: float
) -> None:
    assert scores.best(scores.exact_match, answer, truths) == exact
    assert scores.best(scores.f1, answer, truths) == pytest.approx(f1)


def test_scores_are_told_apart_by_whether_there_is_an_answer() -> None:
    truths = {"a": ["the Alps"], "b": ["North Sea"], "c": [], "d": []}
    said = {"a": "Alps", "b": "the cold North Sea", "c": "", "d": "Rotterdam"}
    found = scores.scores(said, truths)
    assert found == pytest.approx(
        {
            "exact_match": 2 / 4,
            "f1": (1 + 0.8 + 1 + 0) / 4,
            "no_answer_exact_match": 1 / 2,
            "has_answer_exact_match": 1 / 2,
            "has_answer_f1": (1 + 0.8) / 2,
        }
    )
    assert scores.scores({"a": "Alps"}, {"a": ["Alps"]}) == {"exact_match": 1.0, "f1": 1.0}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([*[TEXT] * 3, *["where does it end"] * 3], folder)
    opened = open_tokenizer(folder)
    opened.post_processor = processors.ByteLevel(
        trim_offsets=False
    )  # some tell the blank before a word as part of it
    return opened


@settings(max_examples=60, deadline=None)
@given(
    text=st.text("ab é😀the Rhine.\n", min_size=1, max_size=90).filter(str.strip),
    bounds=st.tuples(st.integers(0, 89), st.integers(1, 20)),
    length=st.integers(16, 40),
    stride=st.integers(1, 10),
)
def test_the_target_of_every_window_is_the_answer_and_no_token_of_a_text_is_left_out(
    tokenizer: Tokenizer, text: str, bounds: tuple[int, int], length: int, stride: int
) -> None:
    start = bounds[0] % len(text)
    answer = text[start : start + bounds[1]]
    config = Config(max_length=length, stride=stride)
    if problems(config, devices=1):
        return
    question = Question("1", "", text, "Where does it end, and why there?", (answer,), (start,))
    cut = windows.encode([question], tokenizer, config)
    seen: set[int] = set()
    for row in range(len(cut)):
        first, behind = cut.windows.first_B[row], cut.windows.behind_B[row]
        skipped, places = int(cut.skipped_N[row]), cut.places[0]
        seen |= set(range(skipped, skipped + behind - first))
        begin, end = cut.windows.starts_B[row] - first + skipped, cut.windows.ends_B[row] - first + skipped
        if cut.windows.starts_B[row] and answer.strip():
            assert first <= cut.windows.starts_B[row] <= cut.windows.ends_B[row] < behind
            covered = text[places[begin, 0] : places[end, 1]]
            assert answer.strip() in covered and covered == covered.strip()
            assert places[begin, 1] > start and places[end, 0] < start + len(answer)
    assert seen == set(range(len(cut.places[0])))


def test_an_answer_is_the_best_place_over_all_windows_of_its_question(tokenizer: Tokenizer) -> None:
    config = Config(max_length=16, stride=4, answer_length=4)
    words = ("Alps", "Rotterdam")
    questions = [Question(each, "", TEXT, "where?", (each,), (TEXT.find(each),)) for each in words]
    cut = windows.encode(questions, tokenizer, config)
    assert len(cut) > 4  # some windows for each question
    shape = cut.windows.ids_BS.shape
    start_NS, end_NS = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for row in range(len(cut)):
        start_NS[row, cut.windows.starts_B[row]] = 5.0
        end_NS[row, cut.windows.ends_B[row]] = 4.0
        end_NS[row, 1] = 50.0  # in the question, which is no place for an answer
        start_NS[row, 0], end_NS[row, 0] = 3.0 + row % 2, 0.0
    found = windows.answers(cut, start_NS, end_NS, config, may_be_none=False)
    assert [each.text for each in found] == ["Alps", "Rotterdam"]
    assert all(each.null_odds == pytest.approx(3.0 - 9.0) for each in found)
    assert all(sum(share for _, share in each.best) == pytest.approx(1.0) for each in found)
    lazy = Config(max_length=16, stride=4, answer_length=4, null_threshold=-7.0)
    assert [each.text for each in windows.answers(cut, start_NS, end_NS, lazy, may_be_none=True)] == ["", ""]
    eager = windows.answers(cut, start_NS, end_NS, config, may_be_none=True)
    assert [each.text for each in eager] == ["Alps", "Rotterdam"]
    assert "" in dict(eager[0].best)


def test_options_that_would_leave_text_out_or_not_divide_are_refused() -> None:
    wrong = problems(Config(max_length=64, stride=40, batch_size=32), devices=2)
    assert len(wrong) == 1 and "choose at most 28" in wrong[0]
    assert "choose 32 or 34" in problems(Config(batch_size=33), devices=2)[0]
    assert len(problems(Config(epochs=float("nan"), dropout=1.0, steps=0), devices=1)) == 3
