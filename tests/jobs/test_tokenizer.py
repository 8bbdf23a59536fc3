"""The tokenizer is RoBERTa's in everything that others will load, and the same from the same text."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

import jobs
from contracts.errors import RequestError
from jobs.flax_mlm.tokenizer import export_tokenizer, load_tokenizer, open_tokenizer, train_tokenizer
from jobs.glue.tokenizer import open_tokenizer as glue_tokenizer
from tests.jobs.samples import PROSE

WORDS = PROSE.split()
DOCUMENTS = [f"{one} {two} {one}{three}" for one in WORDS for two in WORDS for three in WORDS[:5]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(DOCUMENTS, 320, path)
    return path


def word_level(path: Path, words: list[str]) -> Path:
    """A given tokenizer of another kind: one token a word."""
    tokenizer = Tokenizer(
        models.WordLevel(vocab={word: n for n, word in enumerate(words)}, unk_token=words[3])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words if word[0] in "[<"])
    path.write_text(tokenizer.to_str())
    return path


def test_special_tokens_stand_and_frame_a_text_as_robertas_do_and_the_mask_is_last(trained: Path) -> None:
    facts, tokenizer = load_tokenizer(trained), Tokenizer.from_file(str(trained))
    assert (facts.bos_id, facts.pad_id, facts.eos_id, facts.unk_id) == (0, 1, 2, 3)
    assert facts.mask_id == facts.vocab_size - 1 == 319
    assert sorted(tokenizer.get_vocab().values()) == list(range(320))
    assert tokenizer.encode("the cat").tokens == ["<s>", "the", "Ġcat", "</s>"]
    assert tokenizer.encode("the", "the").tokens == ["<s>", "the", "</s>", "</s>", "the", "</s>"]
    masked = tokenizer.encode("the <mask> cat").ids  # the mask takes the space before it
    assert masked == [tokenizer.token_to_id(token) for token in ("<s>", "the", "<mask>", "Ġcat", "</s>")]


@given(st.text())
def test_every_text_comes_back_as_it_was(trained: Path, text: str) -> None:
    tokenizer = open_tokenizer(trained)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True) == text


def test_a_text_that_speaks_of_special_tokens_has_none_and_teaches_none(
    trained: Path, tmp_path: Path
) -> None:
    named = "<s> </s> <mask> <pad> <unk>"
    train_tokenizer([named] * 50, 300, tmp_path / "tokenizer.json")
    for path in (trained, tmp_path / "tokenizer.json"):
        ids = open_tokenizer(path).encode(f"write {named}", add_special_tokens=False).ids
        assert not set(ids) & set(load_tokenizer(path).special_ids)


WHOLE_WORDS: dict[str, Callable[[dict[str, int]], tuple[Any, Any]]] = {
    "words": lambda ids: (models.WordLevel(ids, unk_token="<unk>"), pre_tokenizers.WhitespaceSplit()),
    "word pieces": lambda ids: (models.WordPiece(ids, unk_token="<unk>"), pre_tokenizers.WhitespaceSplit()),
    "unigrams": lambda ids: (
        models.Unigram([(name, -1.0) for name in ids], unk_id=3),
        pre_tokenizers.Metaspace(),
    ),
}


@pytest.mark.parametrize("kind", WHOLE_WORDS)
def test_a_model_that_knows_special_tokens_as_words_finds_none_in_a_text(tmp_path: Path, kind: str) -> None:
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    ids = {name: place for place, name in enumerate([*special, "▁", *map(chr, range(33, 127))])}
    model, pre_tokenizer = WHOLE_WORDS[kind](ids)
    written = Tokenizer(model)
    written.pre_tokenizer = pre_tokenizer
    written.add_special_tokens(special)
    written.save(str(tmp_path / "tokenizer.json"))
    for tokenizer in (open_tokenizer(tmp_path / "tokenizer.json"), glue_tokenizer(tmp_path)):
        encoded = tokenizer.encode("a <s> </s> <mask>a <pad>", add_special_tokens=False)
        assert not {*encoded.ids} & {0, 1, 2, 4}
        assert encoded.offsets[-1][1] == len("a <s> </s> <mask>a <pad>")


def test_the_same_text_gives_the_same_bytes_whatever_the_hash_seed_and_the_threads(
    tmp_path: Path, trained: Path
) -> None:
    program = (
        "import json, sys; from pathlib import Path; from jobs.flax_mlm.tokenizer import train_tokenizer; "
        "train_tokenizer(json.load(sys.stdin), 320, Path(sys.argv[1]))"
    )
    for hash_seed, threads in (("1", "1"), ("2", "2")):
        path = tmp_path / f"{threads}.json"
        subprocess.run(
            [sys.executable, "-c", program, str(path)],
            input=json.dumps(DOCUMENTS),
            text=True,
            check=True,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(jobs.__file__).parents[1]),
                "PYTHONHASHSEED": hash_seed,
                "RAYON_NUM_THREADS": threads,
            },
        )
        assert path.read_bytes() == trained.read_bytes()


def test_a_vocabulary_may_hold_the_bytes_alone_and_one_too_large_for_the_text_comes_out_smaller(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokenizer.json"
    train_tokenizer(DOCUMENTS, 261, path)
    assert load_tokenizer(path).vocab_size == 261
    train_tokenizer(["the cat, the hat"], 5_000, path)
    facts, vocabulary = load_tokenizer(path), Tokenizer.from_file(str(path)).get_vocab()
    assert 261 < facts.vocab_size < 300 and facts.mask_id == facts.vocab_size - 1
    assert "the" in vocabulary and not {"cat", "hat", "Ġcat", "Ġhat"} & set(vocabulary)  # each occurs once


def test_a_given_tokenizer_may_be_berts_and_is_not_exported_as_robertas(tmp_path: Path) -> None:
    given = word_level(tmp_path / "tokenizer.json", ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "cat"])
    facts = load_tokenizer(given)
    assert (facts.pad_id, facts.bos_id, facts.eos_id, facts.unk_id, facts.mask_id) == (0, 1, 2, 3, 4)
    assert facts.vocab_size == 6
    export_tokenizer(given, tmp_path / "new", 128)
    config = json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())
    assert (config["tokenizer_class"], config["mask_token"]) == ("PreTrainedTokenizerFast", "[MASK]")
    assert not (tmp_path / "new" / "vocab.json").exists()


@pytest.mark.parametrize("content", [None, b"", b'{"model": ', b"\xff\xfe", b"[1, 2]"])
def test_a_given_file_that_is_no_tokenizer_is_refused_with_the_reason(
    tmp_path: Path, content: bytes | None
) -> None:
    path, says = tmp_path / "tokenizer.json", r"not a tokenizer\.json"
    if content is None:
        word_level(path, ["<s>", "<pad>", "</s>", "<unk>", "cat"])
        says = r"has no token <mask> or \[MASK\]"
    else:
        path.write_bytes(content)
    for wrong, reason in (
        (path, says),
        (tmp_path / "none.json", r"No such file or directory; name a tokenizer\.json"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(RequestError, match=f"{wrong}: {reason}"):
            load_tokenizer(wrong)


def test_a_given_tokenizer_that_cuts_and_pads_does_neither_to_the_data(trained: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(trained))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "the cat sat on a mat"
    assert (
        open_tokenizer(tmp_path / "tokenizer.json").encode(text).ids
        == Tokenizer.from_file(str(trained)).encode(text).ids
    )
