"""A corpus is tokenised once, whole or not at all, and split by its documents' own text."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

import jobs
from jobs.flax_mlm import batches as batches_module
from jobs.flax_mlm import tokens as tokens_module
from jobs.flax_mlm.tokenizer import open_tokenizer, train_tokenizer
from jobs.flax_mlm.tokens import Tokens, prepare, unigram_entropy
from jobs.runtime.errors import RequestError

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "the",
    "dog",
    "ate",
    "the",
    "hat",
    "that",
    "lay",
    "there",
    "when",
    "it",
    "rained",
    "all",
    "day",
    "long",
]


def texts(count: int, *, seed: int = 0) -> list[str]:
    random = Random(seed)
    return [f"{n} " + " ".join(random.choices(WORDS, k=random.randint(5, 60))) for n in range(count)]


def write(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def tokenised(
    source: Path,
    cache_dir: Path,
    *,
    eval_fraction: float = 0.25,
    tokenizer: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Tokens:
    return prepare(
        str(source),
        text_field="text",
        vocab_size=300,
        tokenizer=None if tokenizer is None else str(tokenizer),
        eval_fraction=eval_fraction,
        cache_dir=cache_dir,
        say=say,
    )


def decoded(tokens: Tokens, ids: np.ndarray) -> list[str]:
    """The documents of a stream, after checking that each is framed by <s> and </s>."""
    tokenizer, facts = open_tokenizer(tokens.tokenizer.path), tokens.tokenizer
    starts = np.flatnonzero(ids == facts.bos_id)
    ends = np.flatnonzero(ids == facts.eos_id)
    assert starts[0] == 0
    assert ends[-1] == ids.size - 1
    assert (starts[1:] == ends[:-1] + 1).all()
    return [tokenizer.decode(ids[start + 1 : end].tolist()) for start, end in zip(starts, ends, strict=True)]


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


def test_what_is_not_utf8_is_said_once(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", texts(50))
    source.write_bytes(source.read_bytes() + b'{"text": "caf\xe9"}\n')
    said = list[str]()
    tokenised(source, tmp_path / "cache", say=said.append)
    assert len([line for line in said if "1 places are not UTF-8" in line]) == 1


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("name", ["train.bin", "eval.bin", "meta.json", "tokenizer.json"])
@pytest.mark.parametrize("tear", [cut_in_half, Path.unlink], ids=["cut in half", "gone"])
def test_a_torn_cache_is_said_and_made_again(tmp_path: Path, name: str, tear: Callable[[Path], None]) -> None:
    source, said = write(tmp_path / "a.jsonl", texts(50)), list[str]()
    before = tokenised(source, tmp_path / "cache").fingerprint
    [path] = (tmp_path / "cache").rglob(name)
    tear(path)
    assert tokenised(source, tmp_path / "cache", say=said.append).fingerprint == before
    assert f"{path.parent} is torn: removed, to be built again" in said


# A process that prepares argv[1] in argv[2]; given a third argument, it waits at the line that has it.
PREPARER = """
import sys
from pathlib import Path
from jobs.flax_mlm.tokens import prepare

def say(line):
    print(line, flush=True)
    if len(sys.argv) > 3 and sys.argv[3] in line:
        sys.stdin.readline()

tokens = prepare(sys.argv[1], text_field="text", vocab_size=300, tokenizer=None, eval_fraction=0.25,
                 cache_dir=Path(sys.argv[2]), say=say)
print(tokens.fingerprint)
"""


def preparer(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PREPARER, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(jobs.__file__).parents[1])},
    )


def test_of_two_processes_at_once_one_tokenises_and_both_have_the_same(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", texts(200))
    with preparer(source, tmp_path / "cache") as one, preparer(source, tmp_path / "cache") as two:
        said = [process.communicate()[0].splitlines() for process in (one, two)]
    assert said[0][-1] == said[1][-1] == tokenised(source, tmp_path / "cache").fingerprint
    assert len([line for lines in said for line in lines if line.startswith("tokenised ")]) == 1
    assert len([line for lines in said for line in lines if line.startswith("training a ")]) == 1


@pytest.mark.parametrize("moment", ["training a tokenizer", "not UTF-8"])
def test_a_process_killed_at_work_leaves_nothing_that_is_taken_for_whole(tmp_path: Path, moment: str) -> None:
    source = write(tmp_path / "a.jsonl", texts(50))
    source.write_bytes(source.read_bytes() + b'{"text": "caf\xe9"}\n')  # said half-way
    with preparer(source, tmp_path / "cache", moment) as process:
        assert process.stdout is not None
        assert any(moment in line for line in process.stdout)
        process.send_signal(signal.SIGKILL)
    assert list((tmp_path / "cache").rglob("*.building"))
    left = tokenised(source, tmp_path / "cache")
    assert left.fingerprint == tokenised(source, tmp_path / "clean").fingerprint
    assert not list((tmp_path / "cache").rglob("*.building"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 128 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may mount the small disk")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize("given", [True, False], ids=["in the tokens", "in the tokenizer"])
def test_a_full_disk_is_an_error_that_says_so_and_leaves_nothing(
    tmp_path: Path, small_disk: Path, prepared: Tokens, given: bool
) -> None:
    source = write(tmp_path / "a.jsonl", texts(3_000))
    if not given:
        (small_disk / "ballast").write_bytes(bytes(120 * 1024))
    with pytest.raises(OSError, match="No space left") as caught:
        tokenised(source, small_disk, tokenizer=prepared.tokenizer.path if given else None)
    assert caught.value.errno == errno.ENOSPC
    left = {path.name for path in small_disk.rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert left <= {"ballast"}


@given(st.lists(st.integers(5, 40), min_size=1, max_size=200), st.sampled_from([np.uint16, np.uint32]))
def test_unigram_entropy_is_the_loss_of_guessing_by_frequency(ids: list[int], dtype: type) -> None:
    loss = -sum(math.log(ids.count(token) / len(ids)) for token in ids) / len(ids)
    framed: np.ndarray = np.array([0, *ids, 2, 1, 60_000], dtype)
    assert unigram_entropy(framed, (0, 1, 2, 3, 60_000, 60_001)) == pytest.approx(loss)


def test_tokens_equally_frequent_have_the_logarithm_of_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "_COUNT_AT_ONCE", 64)
    assert unigram_entropy(np.arange(1_000, dtype=np.uint16), ()) == pytest.approx(math.log(1_000))


@pytest.mark.parametrize("ids", [[], [0, 2]])
def test_without_a_plain_token_there_is_no_entropy(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="all special"):
        unigram_entropy(np.array(ids, np.uint16), (0, 1, 2))
