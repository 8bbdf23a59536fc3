"""Tokenising in bounded memory killed at any moment and continued: the files are the same."""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.flax_mlm import preprocess
from jobs.flax_mlm.corpus import open_corpus
from jobs.flax_mlm.preprocess import (
    BATCH_CHARACTERS,
    JOURNAL,
    PIECE_CHARACTERS,
    Encoder,
    Stream,
    batches,
    cut,
    encoded,
    is_whole,
)
from jobs.flax_mlm.tokenizer import (
    SAMPLE_BYTES,
    TokenizerFacts,
    load_tokenizer,
    open_tokenizer,
    sample,
    sample_share,
    train_tokenizer,
)
from tests.jobs.samples import texts, write

LONG = 40
"""Characters of a piece in these tests."""
prose = st.text(st.sampled_from("ab é日'’s.,1  \n\t\xa0\u2009"), max_size=400)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(itertools.islice(open_corpus("stdlib").documents(), 40), 1000, path)
    return path


@given(prose)
@settings(deadline=None)
def test_pieces_make_up_the_document_and_none_is_too_long(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preprocess, "PIECE_CHARACTERS", LONG)
        pieces = list(cut("train", text))
    assert "".join(piece.text for piece in pieces) == text
    assert all(0 < len(piece.text) <= LONG for piece in pieces) or text == ""
    assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]


@given(
    st.lists(st.sampled_from(["don't", "a", "the", "x1", "日本語", "a\n\n b", "..", "\t", "  ", "’s", "é1"]))
)
@settings(deadline=None)
def test_a_document_cut_between_words_has_the_tokens_that_it_has_whole(
    tokenizer_path: Path, words: list[str]
) -> None:
    tokenizer = open_tokenizer(tokenizer_path)
    text = " ".join(f"{word} word word" for word in words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preprocess, "PIECE_CHARACTERS", LONG)
        pieces = [piece.text for piece in cut("train", text)]
    ids = [id_ for piece in pieces for id_ in tokenizer.encode(piece, add_special_tokens=False).ids]
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids


def test_documents_that_are_done_are_left_out_the_others_counted_where_they_end_and_none_is_encoded_at_once() -> (
    None
):
    documents = [("train", "a" * 10), ("eval", "b" * (2 * BATCH_CHARACTERS)), ("train", "c")]
    found = list(batches(documents, skip=1))  # type: ignore[arg-type]
    assert [batch.documents("eval") for batch in found] == [0, 1, 0]
    assert [batch.documents("train") for batch in found] == [0, 0, 1]
    assert [batch.ends_whole for batch in found] == [False, True, True]
    sizes = [batch.characters for batch in batches([("train", "a b" * 2_000_000)])]
    assert sum(sizes) == 6_000_000
    assert max(sizes) < BATCH_CHARACTERS + PIECE_CHARACTERS


def test_of_a_large_corpus_a_bounded_share_that_no_neighbour_changes_trains_the_tokenizer() -> None:
    share = sample_share(10 * SAMPLE_BYTES)
    assert share == 0.1
    documents = [f"document {number}" for number in range(5000)]
    taken = list(sample(documents, share))
    assert 415 < len(taken) < 585  # 500 expected; 4 standard deviations
    assert taken == sorted(taken, key=documents.index)
    assert list(sample(reversed(documents), share)) == taken[::-1]
    assert sample_share(SAMPLE_BYTES) == 1  # one that is not large trains it whole
    assert list(sample(["a", "b"], 1.0)) == ["a", "b"]


TEXTS = [
    f"{n} the cat sat on the mat and the dog ate that hat when it rained all day long " * 2 for n in range(60)
]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFacts:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(TEXTS, 300, path)
    return load_tokenizer(path)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a document or three, pieces shorter than a document, and a note after every other batch."""
    monkeypatch.setattr(preprocess, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(preprocess, "PIECE_CHARACTERS", 300)
    monkeypatch.setattr(preprocess, "NOTE_CHARACTERS", 1000)


@pytest.mark.usefixtures("small")
def test_batches_come_in_order_with_the_tokens_that_each_has_alone(facts: TokenizerFacts) -> None:
    several = [*TEXTS, "", "é" * 700, "日本語 " * 300, "\N{GRINNING FACE} <mask> </s>"]
    documents = [("eval" if number % 3 == 0 else "train", text) for number, text in enumerate(several)]
    todo, encoder = list(batches(documents)), Encoder(facts.path, "<u4")  # type: ignore[arg-type]
    assert list(encoded(todo, encoder)) == [(batch, encoder.encode(batch)) for batch in todo]
    assert len(todo) > 10


DOCUMENTS = 180


class Killed(BaseException):
    """Stands for whatever ends a process: nothing of ours catches it."""


class Work:
    """A corpus tokenised in a folder of its own, by calls that may be killed; `whole`: what undisturbed work leaves."""

    def __init__(self, folder: Path, facts: TokenizerFacts) -> None:
        (folder / "corpus").mkdir()
        for part in range(3):
            write(folder / "corpus" / f"{part}.jsonl", texts(DOCUMENTS)[part::3])
        self._corpus, self._facts = open_corpus(str(folder / "corpus")), facts
        self.said: list[str] = []
        self.folder = folder / "undisturbed"
        self.folder.mkdir()
        self.tokenise()
        self.whole, self.folder = self.files(), folder / "killed"
        self.folder.mkdir()

    def tokenise(self) -> None:
        preprocess.tokenise(self._corpus, self._facts, 0.25, self.folder, self.said.append)

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.iterdir()}

    def die(self, moment: int, *, after: bool = True) -> None:
        """Tokenise until the `moment`-th writing, of which half is done, or all."""
        real, calls = Stream.write, iter(range(moment + 1))

        def write(stream: Stream, content: bytes, documents: int) -> None:
            if next(calls, 0) < moment:
                return real(stream, content, documents)
            stream._file.write(content if after else content[: len(content) // 2 | 1])
            stream._file.flush()
            raise Killed

        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Stream, "write", write)
            self.tokenise()


@pytest.fixture
def work(small: None, facts: TokenizerFacts, tmp_path: Path) -> Work:
    made = Work(tmp_path, facts)
    assert sorted(made.whole) == ["eval.bin", "meta.json", "train.bin", "warnings.json"]
    return made


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_moment_and_often_the_files_are_the_same(work: Work, seed: int) -> None:
    random = Random(seed)
    for _ in range(4):
        work.die(random.randrange(20), after=random.random() < 0.5)
    assert not is_whole(work.folder)
    work.tokenise()
    assert work.files() == work.whole


def test_it_continues_where_it_was_and_of_what_is_whole_nothing_is_done_again(work: Work) -> None:
    work.die(60)
    journal = json.loads((work.folder / JOURNAL).read_text())
    done = journal["train"][0] + journal["eval"][0]
    assert done > 40
    work.tokenise()
    assert f"going on after {done} documents" in work.said[-2]
    assert f": {DOCUMENTS - done} documents in" in work.said[-1]
    assert work.files() == work.whole
    (work.folder / JOURNAL).write_text("{}")  # as if it had been killed after its last line
    said = list(work.said)
    work.tokenise()
    assert (work.said, work.files()) == (said, work.whole)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def age(path: Path) -> None:
    path.write_text('{"version": 99}')


@pytest.mark.parametrize(
    ("name", "tear"),
    [
        *itertools.product(["train.bin", JOURNAL], [halve, Path.unlink]),
        (JOURNAL, age),
    ],
)
def test_what_is_torn_is_made_anew(work: Work, name: str, tear: Callable[[Path], None]) -> None:
    work.die(60)
    tear(work.folder / name)
    work.tokenise()
    assert work.files() == work.whole
