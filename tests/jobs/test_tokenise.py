"""Tokenising can be killed at any moment and gone on with: the files are those of one that was left alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from jobs.flax_mlm import batches as batches_module
from jobs.flax_mlm import tokenise
from jobs.flax_mlm.corpus import Corpus, open_corpus
from jobs.flax_mlm.streams import JOURNAL, Stream, Streams, Torn
from jobs.flax_mlm.tokenise import is_whole
from jobs.flax_mlm.tokenizer import TokenizerFacts, load_tokenizer, train_tokenizer

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dogs", "ate", "that", "hat", "when", "it", "rained"]
FRACTION = 0.25


class Killed(BaseException):
    """Stands for whatever ends a process: nothing of ours catches it."""


def texts(count: int) -> list[str]:
    random = Random(0)
    return [f"{n} " + " ".join(random.choices(WORDS, k=random.randint(5, 90))) for n in range(count)]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFacts:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(texts(50), 300, path)
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    for part in range(3):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts(120)[part::3])
        (folder / f"{part}.jsonl").write_text(lines)
    return open_corpus(str(folder))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a document or three, pieces shorter than a document, and a note after every other batch."""
    monkeypatch.setattr(batches_module, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(batches_module, "PIECE_CHARACTERS", 300)
    monkeypatch.setattr(tokenise, "NOTE_CHARACTERS", 1000)


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def undisturbed(corpus: Corpus, facts: TokenizerFacts, tmp_path: Path) -> dict[str, bytes]:
    directory = tmp_path / "undisturbed"
    directory.mkdir()
    tokenise.tokenise(corpus, facts, FRACTION, directory, lambda _: None)
    assert sorted(files(directory)) == ["eval.bin", "meta.json", "train.bin", "warnings.json"]
    return files(directory)


def dies_at(moment: int, *, after: bool) -> Callable[[Stream, bytes, int], None]:
    """A `Stream.write` that ends the process in its `moment`-th call, half of it written, or all."""
    real, calls = Stream.write, iter(range(moment + 1))

    def write(self: Stream, content: bytes, documents: int) -> None:
        if next(calls, 0) < moment:
            return real(self, content, documents)
        self._file.write(content if after else content[: len(content) // 2 | 1])
        self._file.flush()
        raise Killed

    return write


@pytest.mark.parametrize(("seed", "processes"), [*((seed, 0) for seed in range(12)), (12, 2), (13, 2)])
def test_killed_at_any_moment_and_often_the_files_are_the_same(
    corpus: Corpus,
    facts: TokenizerFacts,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    processes: int,
) -> None:
    monkeypatch.setattr(tokenise, "processes_for", lambda *_: processes)
    random, directory, said = Random(seed), tmp_path / "killed", list[str]()
    directory.mkdir()
    for _ in range(2 if processes else 4):
        with monkeypatch.context() as patch:
            patch.setattr(Stream, "write", dies_at(random.randrange(20), after=random.random() < 0.5))
            with pytest.raises(Killed):
                tokenise.tokenise(corpus, facts, FRACTION, directory, said.append)
    assert not is_whole(directory)
    tokenise.tokenise(corpus, facts, FRACTION, directory, said.append)
    assert files(directory) == undisturbed


def test_it_goes_on_where_it_was_and_does_not_begin_anew(
    corpus: Corpus,
    facts: TokenizerFacts,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, said = tmp_path / "killed", list[str]()
    directory.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Stream, "write", dies_at(60, after=True))
        with pytest.raises(Killed):
            tokenise.tokenise(corpus, facts, FRACTION, directory, said.append)
    with Streams(directory) as streams:
        done = streams.documents
    assert done > 40
    tokenise.tokenise(corpus, facts, FRACTION, directory, said.append)
    assert f"going on after {done} documents" in said[-2]
    assert f": {120 - done} documents in" in said[-1]
    assert files(directory) == undisturbed


def test_killed_after_the_last_line_nothing_is_done_again(
    corpus: Corpus, facts: TokenizerFacts, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    directory = tmp_path / "whole"
    directory.mkdir()
    for name, content in undisturbed.items():
        (directory / name).write_bytes(content)
    (directory / JOURNAL).write_text("{}")
    tokenise.tokenise(corpus, facts, FRACTION, directory, lambda line: pytest.fail(line))
    assert files(directory) == undisturbed


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(10)
        byte = file.read(1)
        file.seek(10)
        file.write(bytes([byte[0] ^ 1]))


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(100_000))


@pytest.mark.parametrize("name", ["train.bin", "eval.bin", JOURNAL])
@pytest.mark.parametrize(
    "tear", [cut, flip, grow, Path.unlink], ids=["cut", "one bit flipped", "grown", "gone"]
)
def test_what_is_torn_is_never_gone_on_with(
    corpus: Corpus,
    facts: TokenizerFacts,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    tear: Callable[[Path], None],
) -> None:
    directory = tmp_path / "killed"
    directory.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Stream, "write", dies_at(60, after=True))
        with pytest.raises(Killed):
            tokenise.tokenise(corpus, facts, FRACTION, directory, lambda _: None)
    tear(directory / name)
    tokenise.tokenise(corpus, facts, FRACTION, directory, lambda _: None)
    assert files(directory) == undisturbed


def test_a_journal_of_another_version_is_torn(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text('{"version": 99}')
    with pytest.raises(Torn):
        Streams(tmp_path)
