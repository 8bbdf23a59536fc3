"""A model in Hugging Face's layout, as --init-from names it: a folder of this host, or a URL that is copied once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contracts.errors import RequestError
from contracts.files import is_url
from jobs.runtime.storage.cache import copy_once

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
PARTS = ("vocab.json", "merges.txt")
"""A byte-level BPE as RoBERTa's older releases have it, where there is no tokenizer.json."""
WEIGHTS = "model.safetensors"
WORDPIECES = "vocab.txt"
"""BERT's vocabulary, of which transformers makes a tokenizer."""
SETTINGS, ADDED = "tokenizer_config.json", "added_tokens.json"
FILES = (CONFIG, WEIGHTS, TOKENIZER, *PARTS, WORDPIECES, SETTINGS, ADDED, "special_tokens_map.json")

type Tokenizers = tuple[tuple[str, ...], ...]
"""Files of which one group has to be there."""
BYTE_LEVEL: Tokenizers = ((TOKENIZER,), PARTS)


def open_folder(
    source: str, cache_dir: Path, say: Callable[[str], None], tokenizers: Tokenizers = BYTE_LEVEL
) -> Path:
    """The folder that `source` names, with a model's files in it.

    Raises:
        RequestError: there is no such folder, or no model and tokenizer in it.
    """

    def needed(names: Collection[str]) -> list[str]:
        _check(source, names, tokenizers)
        return [name for name in names if name in FILES]

    if is_url(source):
        return copy_once(source, cache_dir / "models", needed, option="--init-from", say=say)
    folder = Path(os.path.expanduser(source)).absolute()
    try:
        _check(source, os.listdir(folder), tokenizers)
    except OSError as error:
        raise RequestError(
            f"--init-from {source}: {error.strerror}; name a folder with {CONFIG}, {WEIGHTS} and {TOKENIZER} that is "
            "on every host, or a URL"
        ) from None
    return folder


def _check(source: str, names: Collection[str], tokenizers: Tokenizers) -> None:
    missing = [name for name in (CONFIG, WEIGHTS) if name not in names]
    if not any(set(group) <= set(names) for group in tokenizers):
        first, *alternatives = (" and ".join(group) for group in tokenizers)
        missing.append(f"{first} (or {' or '.join(alternatives)})")
    if not missing:
        return
    remedy = "name a folder that has them"
    if missing == [WEIGHTS] and any(name.endswith((".index.json", ".bin")) for name in names):
        remedy = (
            "load it in transformers and save it whole: model.save_pretrained(FOLDER, max_shard_size='100GB')"
        )
    raise RequestError(f"--init-from {source}: has no {', no '.join(missing)}; {remedy}")


def read_config(source: str, folder: Path) -> dict[str, Any]:
    """What the config.json of a folder says.

    Raises:
        RequestError: it is no JSON object.
    """
    try:
        settings = json.loads((folder / CONFIG).read_bytes())
        settings.keys()
    except (ValueError, AttributeError, RecursionError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error
        raise RequestError(
            f"--init-from {source}: its {CONFIG} is no JSON object ({reason}); name a folder that transformers has "
            "saved"
        ) from None
    return dict(settings)


def require_unchanged(source: str | None, began_from: object, fingerprint: str) -> None:
    """Raises RequestError: `source` has another model or tokenizer than when the run began, by their fingerprints.

    source: None: the tokenizer was trained from the run's data.
    """
    if began_from != fingerprint and source is None:
        raise RequestError(
            "the tokenizer that is trained from the run's data is another than when the run began: the data have "
            "changed, or another version of tpu-stack began it. Resume it with the data and in a checkout of the "
            "commit that it began with (`code` in its run.json), or start a new run"
        )
    if began_from != fingerprint:
        raise RequestError(
            f"--init-from {source}: holds another model or tokenizer than when the run began; bring the old one back "
            "there, or start a new run"
        )


def read_special_tokens_as_text(tokenizer: Tokenizer, names: Collection[str]) -> None:
    """Make special tokens text where a text speaks of them. names: of those that are in a vocabulary of RoBERTa or
    BERT; the tokenizer may declare more.

    The library finds none of its own then, but a model of whole words or of pieces has them in its vocabulary too: a
    blank behind the first character keeps that from being found.
    """
    from tokenizers import normalizers

    tokenizer.encode_special_tokens = True
    declared = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    found = []
    for name in dict.fromkeys((*declared, *names)):
        text_ids = tokenizer.encode(f"{name} a{name}a", add_special_tokens=False).ids
        if len(name) > 1 and tokenizer.token_to_id(name) in text_ids:
            found.append(normalizers.Replace(name, f"{name[0]} {name[1:]}"))
    if found:
        before = [tokenizer.normalizer] if tokenizer.normalizer else []
        tokenizer.normalizer = normalizers.Sequence([*before, *found])
