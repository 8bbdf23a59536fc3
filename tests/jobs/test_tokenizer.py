"""The tokenizer is RoBERTa's in everything that others will load, and the same from the same text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

import jobs
from contracts.errors import RequestError
from jobs.flax_mlm.tokenizer import export_tokenizer, load_tokenizer, open_tokenizer, train_tokenizer

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


def test_special_tokens_stand_where_robertas_stand_and_the_mask_is_last(trained: Path) -> None:
    facts = load_tokenizer(trained)
    assert (facts.bos_id, facts.pad_id, facts.eos_id, facts.unk_id) == (0, 1, 2, 3)
    assert facts.mask_id == facts.vocab_size - 1 == 319
    assert sorted(Tokenizer.from_file(str(trained)).get_vocab().values()) == list(range(320))


def test_text_is_framed_and_the_mask_takes_the_space_before_it_as_in_roberta(trained: Path) -> None:
    tokenizer = Tokenizer.from_file(str(trained))
    assert tokenizer.encode("the cat").tokens == ["<s>", "the", "Ġcat", "</s>"]
    assert tokenizer.encode("the", "the").tokens == ["<s>", "the", "</s>", "</s>", "the", "</s>"]
    masked = tokenizer.encode("the <mask> cat").ids
    assert masked == [tokenizer.token_to_id(token) for token in ("<s>", "the", "<mask>", "Ġcat", "</s>")]


@given(st.text())
def test_every_text_comes_back_as_it_was(trained: Path, text: str) -> None:
    tokenizer = open_tokenizer(trained)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True) == text


def test_a_text_that_speaks_of_special_tokens_has_none(trained: Path) -> None:
    facts, tokenizer = load_tokenizer(trained), open_tokenizer(trained)
    ids = tokenizer.encode("write <mask> or <s> or </s>", add_special_tokens=False).ids
    assert not set(ids) & set(facts.special_ids)


def test_a_text_full_of_special_tokens_teaches_none_of_them(tmp_path: Path) -> None:
    train_tokenizer(["<s> </s> <mask> <pad> <unk>"] * 50, 300, tmp_path / "tokenizer.json")
    facts, tokenizer = (
        load_tokenizer(tmp_path / "tokenizer.json"),
        open_tokenizer(tmp_path / "tokenizer.json"),
    )
    ids = tokenizer.encode("<s> </s> <mask> <pad> <unk>", add_special_tokens=False).ids
    assert not set(ids) & set(facts.special_ids)


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


def test_a_vocabulary_smaller_than_all_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--vocab-size 260: must be at least 261"):
        train_tokenizer(DOCUMENTS, 260, tmp_path / "tokenizer.json")
    train_tokenizer(DOCUMENTS, 261, tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path / "tokenizer.json").vocab_size == 261


def test_a_text_that_repeats_too_little_gives_a_smaller_vocabulary_with_the_mask_still_last(
    tmp_path: Path,
) -> None:
    train_tokenizer(["the cat, the hat"], 5_000, tmp_path / "tokenizer.json")
    facts = load_tokenizer(tmp_path / "tokenizer.json")
    assert 261 < facts.vocab_size < 300
    vocabulary = Tokenizer.from_file(str(facts.path)).get_vocab()
    assert "the" in vocabulary
    assert not {"cat", "hat", "Ġcat", "Ġhat"} & set(vocabulary)  # each occurs once
    assert facts.mask_id == facts.vocab_size - 1


def test_a_mistake_in_the_text_ends_the_training(tmp_path: Path) -> None:
    def documents() -> object:
        yield "the cat"
        raise RequestError("line 2")

    with pytest.raises(RequestError, match="line 2"):
        train_tokenizer(documents(), 300, tmp_path / "tokenizer.json")  # type: ignore[arg-type]
    assert not (tmp_path / "tokenizer.json").exists()


def test_a_given_tokenizer_may_name_its_special_tokens_as_bert_does(tmp_path: Path) -> None:
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "cat"]
    facts = load_tokenizer(word_level(tmp_path / "tokenizer.json", words))
    assert (facts.pad_id, facts.bos_id, facts.eos_id, facts.unk_id, facts.mask_id) == (0, 1, 2, 3, 4)
    assert facts.vocab_size == 6


def test_a_given_tokenizer_without_a_special_token_is_refused_with_its_name(tmp_path: Path) -> None:
    path = word_level(tmp_path / "tokenizer.json", ["<s>", "<pad>", "</s>", "<unk>", "cat"])
    with pytest.raises(RequestError, match=r"tokenizer\.json: has no token <mask> or \[MASK\]"):
        load_tokenizer(path)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"model": ', b"\xff\xfe", b"[1, 2]"])
def test_a_given_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(RequestError, match=r"tokenizer\.json: not a tokenizer\.json"):
        load_tokenizer(path)


def test_a_given_tokenizer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"none\.json: No such file or directory; name a tokenizer\.json"):
        load_tokenizer(tmp_path / "none.json")
    with pytest.raises(RequestError, match="Is a directory"):
        load_tokenizer(tmp_path)


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


def test_the_exported_vocabulary_and_merges_alone_give_the_same_ids(trained: Path, tmp_path: Path) -> None:
    export_tokenizer(trained, tmp_path, 128)
    model = models.BPE.from_file(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    rebuilt = Tokenizer(model)
    rebuilt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rebuilt.decoder = decoders.ByteLevel()
    rebuilt.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    rebuilt.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    exported = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in [*DOCUMENTS[:50], "the <mask> cat", "naïve 日本\n\t"]:
        assert rebuilt.encode(text).ids == exported.encode(text).ids
    assert list(json.loads((tmp_path / "vocab.json").read_text()))[-1] == "<mask>"


def test_the_export_says_what_hugging_face_needs_to_know(trained: Path, tmp_path: Path) -> None:
    export_tokenizer(trained, tmp_path / "new", 128)
    config = json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "RobertaTokenizerFast"
    assert config["model_max_length"] == 128
    assert config["added_tokens_decoder"]["319"]["lstrip"] is True
    special = json.loads((tmp_path / "new" / "special_tokens_map.json").read_text())
    assert special["mask_token"]["content"] == "<mask>"
    roles = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>"}
    assert {role: special[f"{role}_token"] for role in roles} == roles


def test_a_tokenizer_that_is_not_robertas_is_not_exported_as_one(tmp_path: Path) -> None:
    given = word_level(tmp_path / "given.json", ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "cat"])
    export_tokenizer(given, tmp_path / "new", 128)
    config = json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["mask_token"] == "[MASK]"
    assert not (tmp_path / "new" / "vocab.json").exists()
