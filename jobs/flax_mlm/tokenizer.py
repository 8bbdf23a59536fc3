"""The tokenizer: a byte-level BPE as RoBERTa's, trained or given, and exported as Hugging Face reads it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contracts.errors import RequestError
from jobs.runtime.storage.model_folder import read_special_tokens_as_text

if TYPE_CHECKING:
    import tokenizers

_ROLES = {
    "bos": ("<s>", "[CLS]"),
    "pad": ("<pad>", "[PAD]"),
    "eos": ("</s>", "[SEP]"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
}
_FIRST_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
"""Ids 0 to 3, as in RoBERTa's vocabulary; <mask> is its last."""
_MASK = "<mask>"


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """What the job has to know of a tokenizer.json. `vocab_size` is the highest id + 1, gaps included."""

    path: Path
    vocab_size: int
    bos_id: int
    pad_id: int
    eos_id: int
    unk_id: int
    mask_id: int
    sha256: str

    @property
    def special_ids(self) -> tuple[int, ...]:
        return (self.bos_id, self.pad_id, self.eos_id, self.unk_id, self.mask_id)


def facts_of_size(vocab_size: int) -> TokenizerFacts:
    """Of a tokenizer that `train_tokenizer` would make with so many tokens."""
    bos, pad, eos, unk = range(len(_FIRST_TOKENS))
    return TokenizerFacts(
        path=Path(),
        vocab_size=vocab_size,
        bos_id=bos,
        pad_id=pad,
        eos_id=eos,
        unk_id=unk,
        mask_id=vocab_size - 1,
        sha256="",
    )


def train_tokenizer(documents: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train on `documents` (streamed) and write tokenizer.json to `path`; the same documents, the same bytes.

    The vocabulary has exactly `vocab_size` tokens unless the documents run out of pairs that occur twice.
    It has room for every byte and the special tokens, 261. Raises OSError where the disk is full.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        special_tokens=list(_FIRST_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator(documents, trainer)

    # The trainer numbers special tokens first, but RoBERTa's mask is last: it joins the finished vocabulary.
    learned = json.loads(learner.to_str())["model"]
    vocabulary = {**learned["vocab"], _MASK: len(learned["vocab"])}
    write_tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(pair) for pair in learned["merges"]]), path)


def write_tokenizer(model: tokenizers.models.BPE, path: Path) -> None:
    """Write tokenizer.json: a byte-level BPE framed as RoBERTa's, with those of its special tokens that it knows."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors

    tokenizer = Tokenizer(model)
    vocabulary = tokenizer.get_vocab()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if {"<s>", "</s>"} <= vocabulary.keys():
        tokenizer.post_processor = processors.RobertaProcessing(
            ("</s>", vocabulary["</s>"]), ("<s>", vocabulary["<s>"]), add_prefix_space=False
        )
    special = [name for name in (*_FIRST_TOKENS, _MASK) if name in vocabulary]
    tokenizer.add_special_tokens(
        [AddedToken(name, lstrip=name == _MASK, special=True, normalized=False) for name in special]
    )
    path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def load_tokenizer(path: Path) -> TokenizerFacts:
    """Read a tokenizer.json of ours or of Hugging Face's, with RoBERTa's or BERT's special tokens.

    Raises RequestError when there is no such file, it is no tokenizer, or a special token is missing.
    """
    content, vocabulary = _read(path)
    ids: dict[str, int] = {}
    for role, names in _ROLES.items():
        name = next((name for name in names if name in vocabulary), None)
        if name is None:
            raise RequestError(
                f"--tokenizer {path}: has no token {' or '.join(names)}; masked-language-model training "
                "needs it: give a tokenizer made for RoBERTa or BERT, or none, to train one on the data"
            )
        ids[f"{role}_id"] = vocabulary[name]
    return TokenizerFacts(
        path=path, vocab_size=max(vocabulary.values()) + 1, sha256=hashlib.sha256(content).hexdigest(), **ids
    )


def open_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer ready to encode whole documents: nothing cut or padded, and "<mask>" in a text mere text.

    Otherwise a document that speaks of `<s>` or `<mask>` would bring the special tokens into the data.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    read_special_tokens_as_text(tokenizer, [name for names in _ROLES.values() for name in names])
    return tokenizer


def export_tokenizer(source_path: Path, out_dir: Path, max_length: int) -> None:
    """Write into `out_dir` what Hugging Face's AutoTokenizer loads, for texts of up to `max_length` tokens.

    tokenizer.json as it is, tokenizer_config.json, special_tokens_map.json, and for a BPE vocab.json and
    merges.txt. A byte-level BPE with RoBERTa's names is a RobertaTokenizerFast; any other tokenizer gets the
    general class, which adds nothing to what tokenizer.json says.
    """
    content, vocabulary = _read(source_path)
    tokenizer_json = json.loads(content)
    out_dir.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source_path, out_dir / "tokenizer.json")

    names = {role: next(name for name in names if name in vocabulary) for role, names in _ROLES.items()}
    special = {f"{role}_token": name for role, name in names.items()}
    special |= {"sep_token": names["eos"], "cls_token": names["bos"]}
    matched = {name: _matching(tokenizer_json, name) for name in names.values()}
    _write_json(out_dir / "special_tokens_map.json", special | {"mask_token": matched[names["mask"]]})

    config: dict[str, Any] = {
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    config["added_tokens_decoder"] = {str(vocabulary[name]): token for name, token in matched.items()}
    pre_tokenizer = tokenizer_json["pre_tokenizer"] or {}
    if (
        tokenizer_json["model"]["type"] == "BPE"
        and pre_tokenizer.get("type") == "ByteLevel"
        and names["bos"] == "<s>"
    ):
        config["tokenizer_class"] = "RobertaTokenizerFast"
        config["add_prefix_space"] = pre_tokenizer["add_prefix_space"]
        config["trim_offsets"] = True
        config["errors"] = "replace"
    else:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    _write_json(out_dir / "tokenizer_config.json", config)
    if tokenizer_json["model"]["type"] == "BPE":
        open_tokenizer(source_path).model.save(str(out_dir))


def _read(path: Path) -> tuple[bytes, dict[str, int]]:
    from tokenizers import Tokenizer

    try:
        content = path.read_bytes()
    except OSError as error:
        raise RequestError(
            f"--tokenizer {path}: {error.strerror}; name a tokenizer.json file that is on every host"
        ) from None
    try:
        return content, Tokenizer.from_buffer(content).get_vocab()
    except Exception as error:  # the library raises nothing narrower
        raise RequestError(
            f"--tokenizer {path}: not a tokenizer.json as Hugging Face's tokenizers writes it ({error}); name one, "
            "or leave it out to train one"
        ) from None


def _matching(tokenizer_json: dict[str, Any], name: str) -> dict[str, Any]:
    """How a special token is matched in text, in Hugging Face's words."""
    token: dict[str, Any] = next(
        (token for token in tokenizer_json["added_tokens"] if token["content"] == name), {}
    )
    flags = {flag: token.get(flag, False) for flag in ("lstrip", "rstrip", "single_word", "normalized")}
    return {"content": name, "special": True, **flags}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


SAMPLE_BYTES = 1 << 27
"""The trainer's table takes 0.7 to 1 kB for each different word (measured, tokenizers 0.23): up to 1 GB for this much
prose of a million different words. Text whose words hardly ever come again, such as hashes, takes more."""


def sample_share(text_bytes: int) -> float:
    """The share of a corpus of `text_bytes` that is about SAMPLE_BYTES; 1.0: all of it."""
    return min(1.0, SAMPLE_BYTES / text_bytes)


def sample(documents: Iterable[str], share: float) -> Iterator[str]:
    """About `share` of the documents. A hash of its own text decides for each: order and neighbours don't matter."""
    if share == 1:
        yield from documents
        return
    for text in documents:
        # Other bytes than the split's, so that the two draws have nothing to do with each other.
        place = int.from_bytes(hashlib.sha256(text.encode()).digest()[8:16]) / 2**64
        if place < share:
            yield text
