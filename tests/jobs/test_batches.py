"""What is encoded at once is bounded, and how documents are cut and grouped has no bearing on their tokens."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.flax_mlm import batches as batches_module
from jobs.flax_mlm.batches import BATCH_CHARACTERS, PIECE_CHARACTERS, batches, cut
from jobs.flax_mlm.corpus import open_corpus
from jobs.flax_mlm.sample import SAMPLE_BYTES, sample, sample_share
from jobs.flax_mlm.tokenizer import open_tokenizer, train_tokenizer

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
        patch.setattr(batches_module, "PIECE_CHARACTERS", LONG)
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
        patch.setattr(batches_module, "PIECE_CHARACTERS", LONG)
        pieces = [piece.text for piece in cut("train", text)]
    ids = [id_ for piece in pieces for id_ in tokenizer.encode(piece, add_special_tokens=False).ids]
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids


def test_one_huge_document_is_never_encoded_at_once() -> None:
    sizes = [batch.characters for batch in batches([("train", "a b" * 2_000_000)])]
    assert sum(sizes) == 6_000_000
    assert max(sizes) < BATCH_CHARACTERS + PIECE_CHARACTERS


def test_documents_that_are_done_are_left_out_and_the_others_counted_where_they_end() -> None:
    documents = [("train", "a" * 10), ("eval", "b" * (3 * PIECE_CHARACTERS)), ("train", "c")]
    found = list(batches(documents, skip=1))  # type: ignore[arg-type]
    assert [batch.documents("eval") for batch in found] == [0, 0, 1, 0]
    assert [batch.documents("train") for batch in found] == [0, 0, 0, 1]
    assert [batch.ends_whole for batch in found] == [False, False, True, True]


def test_of_a_large_corpus_a_bounded_share_that_no_neighbour_changes_trains_the_tokenizer() -> None:
    share = sample_share(10 * SAMPLE_BYTES)
    assert share == 0.1
    documents = [f"document {number}" for number in range(5000)]
    taken = list(sample(documents, share))
    assert 415 < len(taken) < 585  # 500 expected; 4 standard deviations
    assert taken == sorted(taken, key=documents.index)
    assert list(sample(reversed(documents), share)) == taken[::-1]


def test_a_corpus_that_is_not_large_trains_it_whole() -> None:
    assert sample_share(SAMPLE_BYTES) == 1
    assert list(sample(["a", "b"], 1.0)) == ["a", "b"]


def test_compressed_files_count_for_the_text_that_is_in_them(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt.GZ"):
        (tmp_path / name).write_bytes(bytes(100))
    corpus = open_corpus(str(tmp_path))
    assert (corpus.size_bytes, corpus.text_bytes) == (200, 500)
