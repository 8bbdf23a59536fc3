"""The tokenizer: trained on the rows, or of a model's folder, by the library that is beneath transformers' own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contracts.errors import RequestError
from jobs.glue.options import VOCAB_SIZE
from jobs.runtime.storage.model_folder import (
    ADDED,
    CONFIG,
    FILES,
    PARTS,
    SETTINGS,
    TOKENIZER,
    WEIGHTS,
    WORDPIECES,
    read_special_tokens_as_text,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
"""RoBERTa's, with the ids from 0 on in a tokenizer that is trained here."""


def train_tokenizer(texts: Iterable[str], folder: Path) -> None:
    """Train RoBERTa's byte-level BPE on texts, and write the two files that transformers reads it from."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer(add_prefix_space=False)
    trained.train_from_iterator(texts, VOCAB_SIZE, special_tokens=list(SPECIAL), show_progress=False)
    trained.save_model(str(folder))


def open_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder, which makes of a text the tokens that transformers makes of it, but for special tokens
    such as </s>: in a text, these are text.

    Raises:
        RequestError: its files are no tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        if (folder / TOKENIZER).exists():
            tokenizer: Tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        else:
            tokenizer = _wordpieces(folder) if (folder / WORDPIECES).exists() else _byte_level(folder)
    except Exception as error:  # the library raises nothing narrower
        raise RequestError(
            f"--init-from {folder}: its files are no tokenizer ({error}); save it with transformers again"
        ) from None
    read_special_tokens_as_text(tokenizer, SPECIAL)
    return tokenizer


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of a folder's tokenizer into another folder."""
    for name in FILES:
        if name not in (CONFIG, WEIGHTS) and (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def vocabulary_size(folder: Path) -> int:
    """The highest id that the tokenizer of a folder gives, plus 1, with the tokens that transformers adds to it.

    Raises:
        RequestError: its files are no tokenizer.
    """
    ids = [*open_tokenizer(folder).get_vocab().values()]
    try:
        for name, added in ((ADDED, lambda content: content.values()), (SETTINGS, _added)):
            if (folder / name).exists():
                ids += map(int, added(json.loads((folder / name).read_bytes())))
    except (ValueError, TypeError, AttributeError) as error:
        raise RequestError(f"--init-from {folder}: its {name} is damaged ({error}); save it again") from None
    return max(ids, default=-1) + 1


def _added(settings: dict[str, Any]) -> Iterable[str]:
    return settings.get("added_tokens_decoder") or ()


def _byte_level(folder: Path) -> Tokenizer:
    """What transformers' RobertaTokenizerFast makes of vocab.json and merges.txt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.BPE.from_file(*(str(folder / name) for name in PARTS)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ids = tokenizer.get_vocab()
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", ids["</s>"]), ("<s>", ids["<s>"]), add_prefix_space=False
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def _wordpieces(folder: Path) -> Tokenizer:
    """What transformers' BertTokenizerFast makes of vocab.txt."""
    from tokenizers import BertWordPieceTokenizer, Tokenizer

    settings = folder / SETTINGS
    options = json.loads(settings.read_text("utf-8")) if settings.exists() else {}
    tokenizer = BertWordPieceTokenizer(
        str(folder / WORDPIECES),
        lowercase=options.get("do_lower_case", True),
        strip_accents=options.get("strip_accents"),
        handle_chinese_chars=options.get("tokenize_chinese_chars", True),
    )
    return Tokenizer.from_str(tokenizer.to_str())
