"""A corpus is tokenised once, whole or not at all, and split by its documents' own text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from contracts.errors import RequestError
from jobs.flax_mlm import batches as batches_module
from jobs.flax_mlm.tokenizer import train_tokenizer
from jobs.flax_mlm.tokens import Tokens
from tests.jobs.documents import decoded, texts, tokenised, write


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    folder = tmp_path_factory.mktemp("prepared")
    return tokenised(write(folder / "a.jsonl", texts(200)), folder / "cache")


def test_the_streams_hold_every_document_once_framed_and_in_order(prepared: Tokens) -> None:
    train, held_out = decoded(prepared, prepared.train), decoded(prepared, prepared.eval)
    assert (len(train), len(held_out)) == (prepared.train_documents, prepared.eval_documents)
    held = set(held_out)
    assert train == [text for text in texts(200) if text not in held]
    assert held_out == [text for text in texts(200) if text in held]
    assert 25 < len(held_out) < 75  # 50 of 200 expected; 4 standard deviations


def test_a_documents_side_does_not_depend_on_its_neighbours(tmp_path: Path, prepared: Tokens) -> None:
    shuffled = [*texts(100, seed=1), *reversed(texts(200))]
    other = tokenised(write(tmp_path / "b.jsonl", shuffled), tmp_path / "cache")
    assert set(decoded(prepared, prepared.eval)) < set(decoded(other, other.eval))
    assert set(decoded(prepared, prepared.train)) < set(decoded(other, other.train))


def test_the_tokenizer_learns_from_the_training_documents_alone(tmp_path: Path, prepared: Tokens) -> None:
    train_tokenizer(decoded(prepared, prepared.train), 300, tmp_path / "tokenizer.json")
    assert prepared.tokenizer.path.read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


def test_prepared_again_it_is_found_and_not_made(tmp_path: Path) -> None:
    source, said = write(tmp_path / "a.jsonl", texts(50)), list[str]()
    first = tokenised(source, tmp_path / "cache", say=said.append)
    assert [line.split()[0] for line in said[:3]] == ["training", "tokenising", "tokenised"]
    del said[:]
    again = tokenised(source, tmp_path / "cache", say=said.append)
    assert said == [
        f"{first.train.size:,} training tokens, {first.eval.size:,} held out (cached in {first.directory})"
    ]
    assert again.fingerprint == first.fingerprint


def test_two_hosts_with_the_same_data_in_other_places_have_the_same_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    one = tokenised(write(tmp_path / "a.jsonl", texts(50)), tmp_path / "cache")
    two = tokenised(write(tmp_path / "host" / "b.jsonl", texts(50)), tmp_path / "host" / "cache")
    other = tokenised(write(tmp_path / "host" / "b.jsonl", texts(51)), tmp_path / "host" / "cache")
    assert one.fingerprint == two.fingerprint != other.fingerprint


def test_another_split_or_another_tokenizer_is_another_cache_entry(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", texts(50))
    one = tokenised(source, tmp_path / "cache")
    split = tokenised(source, tmp_path / "cache", eval_fraction=0.5)
    given = tokenised(source, tmp_path / "cache", eval_fraction=0.5, tokenizer=one.tokenizer.path)
    assert len({one.directory, split.directory, given.directory}) == 3
    assert given.eval_documents == split.eval_documents > one.eval_documents


def test_the_size_of_a_batch_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.jsonl", texts(50))
    one = tokenised(source, tmp_path / "one")
    monkeypatch.setattr(batches_module, "BATCH_CHARACTERS", 200)
    assert tokenised(source, tmp_path / "two").fingerprint == one.fingerprint


def test_a_vocabulary_past_65536_is_stored_in_four_bytes(tmp_path: Path) -> None:
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *(f"w{n}" for n in range(70_000))]
    given = Tokenizer(models.WordLevel(vocab={word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    given.pre_tokenizer = pre_tokenizers.Whitespace()
    given.add_special_tokens([AddedToken(word, special=True) for word in words[:5]])
    given.save(str(tmp_path / "tokenizer.json"))
    source = write(tmp_path / "a.jsonl", [f"w{n} w{69_999 - n}" for n in range(50)])
    tokens = tokenised(source, tmp_path / "cache", tokenizer=tmp_path / "tokenizer.json")
    assert tokens.train.dtype == np.uint32
    assert tokens.train.max() > 1 << 16
    assert decoded(tokens, tokens.train)[0] == "w0 w69999"


def test_rows_are_the_stream_in_equal_pieces_without_the_rest(prepared: Tokens) -> None:
    count = prepared.sequences("train", 7)
    assert count == prepared.train.size // 7
    rows = prepared.rows("train", np.array([0, count - 1, 0]), 7)
    assert rows.dtype == np.int32
    assert rows.shape == (3, 7)
    np.testing.assert_array_equal(rows[1], prepared.train[(count - 1) * 7 : count * 7])
    np.testing.assert_array_equal(rows[2], prepared.train[:7])
    assert prepared.rows("eval", np.array([], np.int64), 7).shape == (0, 7)
    for index in (-1, count):
        with pytest.raises(IndexError, match=f"train has sequences 0 to {count - 1}, not {index}"):
            prepared.rows("train", np.array([index]), 7)


def test_the_streams_cannot_be_written_to(prepared: Tokens) -> None:
    with pytest.raises(ValueError, match="read-only"):
        prepared.train[0] = 9


@pytest.mark.parametrize(
    ("documents", "eval_fraction", "says"),
    [
        (["only one"], 0.5, "is one document, but one to learn from and another to hold out"),
        (["twice the same"] * 9, 0.5, "is one document, but one to learn from"),
        (
            texts(9),
            0.001,
            r"no document falls into the held-out share; .* raise --eval-fraction 0\.001 to more than",
        ),
        (
            texts(9),
            0.999,
            r"every document falls into the held-out share; .* lower --eval-fraction 0\.999 to less",
        ),
        ([" ", "\n"], 0.5, "holds no text, only white space"),
        (texts(9), 1.0, r"--eval-fraction 1\.0: must lie between 0 and 1"),
        (texts(9), 0.0, r"--eval-fraction 0\.0: must lie between 0 and 1"),
    ],
)
@pytest.mark.parametrize("given", [False, True])
def test_data_that_leaves_one_side_empty_is_refused(
    tmp_path: Path, prepared: Tokens, documents: list[str], eval_fraction: float, says: str, given: bool
) -> None:
    source = write(tmp_path / "a.jsonl", documents)
    tokenizer = prepared.tokenizer.path if given else None
    with pytest.raises(RequestError, match=says):
        tokenised(source, tmp_path / "cache", eval_fraction=eval_fraction, tokenizer=tokenizer)
    assert not list(tmp_path.rglob("*.bin"))


def test_what_is_not_utf8_is_known_to_later_users_of_the_tokens_too(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", texts(50))
    source.write_bytes(source.read_bytes() + b'{"text": "caf\xe9"}\n')
    said = list[str]()
    first = tokenised(source, tmp_path / "cache", say=said.append)
    (warning,) = first.warnings
    assert warning.startswith("1 bytes in 1 of ")
    again = tokenised(source, tmp_path / "cache", say=said.append)
    assert again.warnings == first.warnings and warning not in said
