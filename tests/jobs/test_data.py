"""What a step reads is a function of (seed, step) alone, and a corpus that is too small is told before the start."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import RequestError
from jobs.flax_mlm import data
from jobs.flax_mlm.config import Config

sizes = st.integers(1, 300)
seeds = st.integers(0, 2**32 - 1)


def epoch(number: int, *, seed: int, sequences: int, batch_size: int) -> np.ndarray:
    steps = sequences // batch_size
    return np.concatenate(
        [
            data.step_indices(step, seed=seed, sequences=sequences, batch_size=batch_size)
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


@given(seeds)
def test_two_epochs_differ_in_order_and_two_seeds_do(seed: int) -> None:
    first, second = (epoch(number, seed=seed, sequences=64, batch_size=8) for number in (0, 1))
    other = epoch(0, seed=(seed + 1) % 2**32, sequences=64, batch_size=8)
    assert sorted(first) == sorted(second) == list(range(64))
    assert first.tolist() != second.tolist()
    assert first.tolist() != other.tolist()


@given(seeds, st.lists(st.integers(0, 40), min_size=2))
def test_a_step_reads_the_same_whichever_steps_were_asked_for_before(seed: int, steps: list[int]) -> None:
    def rows(step: int) -> list[int]:
        indices: list[int] = data.step_indices(step, seed=seed, sequences=50, batch_size=7).tolist()
        return indices

    known = {step: rows(step) for step in sorted(set(steps))}
    assert [rows(step) for step in steps] == [known[step] for step in steps]


def test_the_order_of_the_data_is_the_same_on_every_machine_and_in_every_version() -> None:
    """A resumed run reads on where it was: another generator would read some sequences twice and others never."""
    epochs = [data.step_indices(step, seed=0, sequences=10, batch_size=10).tolist() for step in (0, 1)]
    assert epochs == [[0, 7, 8, 6, 9, 5, 1, 3, 2, 4], [9, 4, 2, 1, 0, 7, 8, 5, 3, 6]]


def corpus(path: Path, documents: int) -> Path:
    random = Random(0)
    texts = (
        " ".join(random.choices(["the", "cat", "sat", "on", "a", "mat"], k=30)) + f" {n}"
        for n in range(documents)
    )
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def small(path: Path, **changed: object) -> Config:
    settings = {"vocab_size": 300, "sequence_length": 16, "batch_size": 4, "eval_fraction": 0.3, **changed}
    return Config(data=str(path), **settings)  # type: ignore[arg-type]


def test_data_that_fills_a_batch_has_no_problem(tmp_path: Path) -> None:
    source = corpus(tmp_path / "text.jsonl", 40)
    assert data.problems(small(source), tmp_path / "cache") == []
    prepared = data.prepare(small(source), tmp_path / "cache", say=lambda _: None)
    assert prepared.sequences("train", 16) >= 4


def test_a_corpus_too_small_for_one_batch_says_what_it_has_and_what_to_lower(tmp_path: Path) -> None:
    source = corpus(tmp_path / "text.jsonl", 10)
    (said,) = data.problems(small(source, batch_size=400), tmp_path / "cache")
    assert said.startswith(f"--data {source}: has ")
    assert "training sequences of 16 tokens, too few for one batch of 400; lower --batch-size" in said


def test_too_little_held_out_text_for_one_sequence_says_to_hold_out_more(tmp_path: Path) -> None:
    source = tmp_path / "text.jsonl"
    long, short = "the cat sat on a mat " * 100, "cat"
    source.write_text("".join(json.dumps({"text": f"{n} {long}"}) + "\n" for n in range(8)))
    with source.open("a") as file:
        file.writelines(json.dumps({"text": f"{short}{n}"}) + "\n" for n in range(4))
    said = [
        text
        for fraction in (0.001, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
        for text in data.problems(
            small(source, eval_fraction=fraction, sequence_length=512, batch_size=1), tmp_path
        )
    ]
    assert any("tokens, fewer than one sequence of 512; raise --eval-fraction" in text for text in said)


@pytest.mark.parametrize("text", ["", " \n\n "])
def test_data_without_text_is_no_data(tmp_path: Path, text: str) -> None:
    (tmp_path / "empty.txt").write_text(text)
    (said,) = data.problems(small(tmp_path / "empty.txt"), tmp_path / "cache")
    assert "empty.txt" in said


def test_data_that_is_not_there_is_named(tmp_path: Path) -> None:
    (said,) = data.problems(small(tmp_path / "nowhere"), tmp_path / "cache")
    assert str(tmp_path / "nowhere") in said


def test_a_large_corpus_is_looked_for_and_not_tokenised_before_the_start(tmp_path: Path) -> None:
    source = corpus(tmp_path / "text.jsonl", 40)
    assert data.problems(small(source, batch_size=1, sequence_length=8), tmp_path / "cache") == []
    assert not (tmp_path / "cache").exists()


def test_a_tokenizer_that_is_not_there_is_a_problem_of_the_request(tmp_path: Path) -> None:
    config = small(corpus(tmp_path / "text.jsonl", 40), tokenizer=str(tmp_path / "none.json"))
    (said,) = data.problems(config, tmp_path / "cache")
    assert said.startswith(f"--tokenizer {tmp_path}/none.json: ")
    with pytest.raises(RequestError, match="name a tokenizer.json file that is on every host"):
        data.prepare(config, tmp_path / "cache", say=lambda _: None)
