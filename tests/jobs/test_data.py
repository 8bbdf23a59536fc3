"""A corpus is tokenised once, whole or not at all, and what a step reads of it is a function of (seed, step) only."""

import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from contracts.errors import RequestError
from jobs.flax_mlm import data, input_pipeline
from jobs.flax_mlm.config import Config
from jobs.flax_mlm.data import Tokens, unigram_entropy
from jobs.flax_mlm.tokenizer import train_tokenizer
from tests.jobs.samples import decoded, texts, tokenised, write

sizes = st.integers(1, 300)
seeds = st.integers(0, 2**32 - 1)


def epoch(number: int, *, seed: int, sequences: int, batch_size: int) -> np.ndarray:
    steps = sequences // batch_size
    return np.concatenate(
        [
            input_pipeline.step_indices(step, seed=seed, sequences=sequences, batch_size=batch_size)
            for step in range(number * steps, (number + 1) * steps)
        ]
    )


@given(sizes, seeds, st.data())
def test_an_epoch_reads_no_sequence_twice_and_leaves_out_less_than_a_batch(
    sequences: int, seed: int, more: st.DataObject
) -> None:
    batch_size = more.draw(st.integers(1, sequences))
    read = epoch(more.draw(st.integers(0, 3)), seed=seed, sequences=sequences, batch_size=batch_size)
    assert len(set(read.tolist())) == read.size > sequences - batch_size
    assert read.min() >= 0
    assert read.max() < sequences


def test_the_order_of_the_data_is_the_same_on_every_machine_and_in_every_version() -> None:
    """A resumed run reads on where it was: another generator would read some sequences twice and others never."""
    epochs = [
        epoch(n, seed=seed, sequences=10, batch_size=10).tolist() for n, seed in ((0, 0), (1, 0), (0, 1))
    ]
    assert epochs[:2] == [[0, 7, 8, 6, 9, 5, 1, 3, 2, 4], [9, 4, 2, 1, 0, 7, 8, 5, 3, 6]]
    assert epochs[2] not in epochs[:2]


def small(path: Path, **changed: object) -> Config:
    settings = {"vocab_size": 300, "sequence_length": 16, "batch_size": 4, "eval_fraction": 0.3, **changed}
    return Config(data=str(path), **settings)  # type: ignore[arg-type]


def test_before_the_start_data_is_looked_for_and_only_a_small_corpus_is_tokenised_to_find_out_if_it_is_enough(
    tmp_path: Path,
) -> None:
    (said,) = data.problems(small(tmp_path / "nowhere"), tmp_path / "cache")
    assert str(tmp_path / "nowhere") in said
    source = write(tmp_path / "text.jsonl", texts(60))
    (said,) = data.problems(small(source, tokenizer=str(tmp_path / "none.json")), tmp_path / "cache")
    assert said.startswith(f"--tokenizer {tmp_path}/none.json: ")
    assert data.problems(small(source, batch_size=1, sequence_length=8), tmp_path / "cache") == []
    assert not (tmp_path / "cache").exists()
    assert data.problems(small(source), tmp_path / "cache") == []
    assert data.prepare(small(source), tmp_path / "cache", say=lambda _: None).sequences("train", 16) >= 4
    (said,) = data.problems(small(source, batch_size=4000), tmp_path / "cache")
    assert said.startswith(f"--data {source}: has ")
    assert "training sequences of 16 tokens, too few for one batch of 4000; lower --batch-size" in said


def test_too_little_held_out_text_for_one_sequence_says_to_hold_out_more(tmp_path: Path) -> None:
    documents = [*(f"{n} {'the cat sat on a mat ' * 100}" for n in range(8)), *(f"cat{n}" for n in range(4))]
    source = write(tmp_path / "text.jsonl", documents)
    said = [
        text
        for fraction in (0.001, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
        for text in data.problems(
            small(source, eval_fraction=fraction, sequence_length=512, batch_size=1), tmp_path
        )
    ]
    assert any("tokens, fewer than one sequence of 512; raise --eval-fraction" in text for text in said)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    folder = tmp_path_factory.mktemp("prepared")
    return tokenised(write(folder / "a.jsonl", texts(200)), folder / "cache")


def test_the_streams_hold_every_document_once_framed_and_in_order_and_the_tokenizer_learns_from_one_only(
    tmp_path: Path, prepared: Tokens
) -> None:
    train, held_out = decoded(prepared, prepared.train), decoded(prepared, prepared.eval)
    assert (len(train), len(held_out)) == (prepared.train_documents, prepared.eval_documents)
    held = set(held_out)
    assert train == [text for text in texts(200) if text not in held]
    assert held_out == [text for text in texts(200) if text in held]
    assert 25 < len(held_out) < 75  # 50 of 200 expected; 4 standard deviations
    train_tokenizer(train, 300, tmp_path / "tokenizer.json")
    assert prepared.tokenizer.path.read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


def test_a_documents_side_does_not_depend_on_its_neighbours(tmp_path: Path, prepared: Tokens) -> None:
    shuffled = [*texts(100, seed=1), *reversed(texts(200))]
    other = tokenised(write(tmp_path / "b.jsonl", shuffled), tmp_path / "cache")
    assert set(decoded(prepared, prepared.eval)) < set(decoded(other, other.eval))
    assert set(decoded(prepared, prepared.train)) < set(decoded(other, other.train))


def test_prepared_again_it_is_found_and_other_data_another_split_or_another_tokenizer_is_another_entry(
    tmp_path: Path,
) -> None:
    source, said = write(tmp_path / "a.jsonl", texts(50)), list[str]()
    one = tokenised(source, tmp_path / "cache", say=said.append)
    assert [line.split()[0] for line in said[:3]] == ["training", "tokenising", "tokenised"]
    del said[:]
    assert tokenised(source, tmp_path / "cache", say=said.append).fingerprint == one.fingerprint
    assert said == [
        f"{one.train.size:,} training tokens, {one.eval.size:,} held out (cached in {one.directory})"
    ]
    elsewhere = tokenised(write(tmp_path / "b.jsonl", texts(50)), tmp_path / "other cache")
    assert elsewhere.fingerprint == one.fingerprint  # of the same data on another host
    longer = tokenised(write(tmp_path / "b.jsonl", texts(51)), tmp_path / "other cache")
    assert longer.fingerprint != one.fingerprint
    split = tokenised(source, tmp_path / "cache", eval_fraction=0.5)
    given = tokenised(source, tmp_path / "cache", eval_fraction=0.5, tokenizer=one.tokenizer.path)
    assert len({one.directory, split.directory, given.directory}) == 3
    assert given.eval_documents == split.eval_documents > one.eval_documents


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
    ],
)
def test_data_that_leaves_one_side_empty_is_refused(
    tmp_path: Path, prepared: Tokens, documents: list[str], eval_fraction: float, says: str
) -> None:
    source = write(tmp_path / "a.jsonl", documents)
    for tokenizer in (prepared.tokenizer.path, None):
        with pytest.raises(RequestError, match=says):
            tokenised(source, tmp_path / "cache", eval_fraction=eval_fraction, tokenizer=tokenizer)
        assert not list(tmp_path.rglob("*.bin"))


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("name", "tear"),
    [
        ("train.bin", cut_in_half),
        ("meta.json", Path.unlink),
        ("tokenizer.json", cut_in_half),
    ],
)
def test_a_torn_cache_is_said_and_made_again(tmp_path: Path, name: str, tear: Callable[[Path], None]) -> None:
    source, said = write(tmp_path / "a.jsonl", texts(50)), list[str]()
    before = tokenised(source, tmp_path / "cache").fingerprint
    [path] = (tmp_path / "cache").rglob(name)
    tear(path)
    assert tokenised(source, tmp_path / "cache", say=said.append).fingerprint == before
    assert f"{path.parent} is torn: removed, to be built again" in said


@given(st.lists(st.integers(5, 40), min_size=1, max_size=200), st.sampled_from([np.uint16, np.uint32]))
def test_unigram_entropy_is_the_loss_of_guessing_by_frequency(ids: list[int], dtype: type) -> None:
    loss = -sum(math.log(ids.count(token) / len(ids)) for token in ids) / len(ids)
    framed: np.ndarray = np.array([0, *ids, 2, 1, 60_000], dtype)
    assert unigram_entropy(framed, (0, 1, 2, 3, 60_000, 60_001)) == pytest.approx(loss)
