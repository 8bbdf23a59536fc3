"""The files of a model that somebody published: on this host, or copied here once from a bucket."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from contracts.errors import RequestError
from contracts.files import is_url
from jobs.flax_mlm.weights import WEIGHTS
from jobs.runtime.cache import build_once

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
PARTS = ("vocab.json", "merges.txt")
"""A byte-level BPE as RoBERTa's older releases have it, where there is no tokenizer.json."""
WANTED = (CONFIG, WEIGHTS, TOKENIZER, *PARTS)


def open_folder(source: str, cache_dir: Path, say: Callable[[str], None]) -> Path:
    """The folder that `source` names, with a model's files in it.

    Raises:
        RequestError: there is no such folder, or no model and tokenizer in it.
    """
    if is_url(source):
        return _copied(source, cache_dir, say)
    folder = Path(os.path.expanduser(source)).absolute()
    try:
        _check(source, os.listdir(folder))
    except OSError as error:
        raise RequestError(
            f"--init-from {source}: {error.strerror}; name a folder with {CONFIG}, {WEIGHTS} and {TOKENIZER} that is "
            "on every host, or a URL"
        ) from None
    return folder


def tokenizer_of(source: str, folder: Path, cache_dir: Path) -> Path:
    """The folder's tokenizer.json; where it has vocab.json and merges.txt only, one that is made from them.

    Raises:
        RequestError: the two are not a byte-level BPE.
    """
    if (folder / TOKENIZER).exists():
        return folder / TOKENIZER
    content = [(folder / name).read_bytes() for name in PARTS]
    key = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in content)).hexdigest()[:32]
    made = cache_dir / "flax_mlm" / "tokenizer" / f"joined-{key}"
    build_once(made, lambda temporary: _join(source, folder, temporary / TOKENIZER), say=lambda _: None)
    return made / TOKENIZER


def _join(source: str, folder: Path, path: Path) -> None:
    """As transformers' RobertaTokenizerFast makes it of the two files."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    try:
        tokenizer = Tokenizer(models.BPE.from_file(*(str(folder / name) for name in PARTS)))
    except Exception as error:  # the library raises nothing narrower
        raise RequestError(f"--init-from {source}: {' and '.join(PARTS)} are no BPE ({error})") from None
    vocabulary = tokenizer.get_vocab()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if {"<s>", "</s>"} <= vocabulary.keys():
        tokenizer.post_processor = processors.RobertaProcessing(
            ("</s>", vocabulary["</s>"]), ("<s>", vocabulary["<s>"]), add_prefix_space=False
        )
    # Those only that the model knows: what is missing is told by whoever reads the tokenizer.
    special = [name for name in ("<s>", "<pad>", "</s>", "<unk>", "<mask>") if name in vocabulary]
    tokenizer.add_special_tokens(
        [AddedToken(name, lstrip=name == "<mask>", special=True, normalized=False) for name in special]
    )
    path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def _check(source: str, names: list[str]) -> None:
    missing = [name for name in (CONFIG, WEIGHTS) if name not in names]
    if TOKENIZER not in names and not set(PARTS) <= set(names):
        missing.append(f"{TOKENIZER} (or {' and '.join(PARTS)})")
    if not missing:
        return
    remedy = "name a folder that has them"
    if missing == [WEIGHTS] and any(name.endswith((".index.json", ".bin")) for name in names):
        remedy = (
            "load it in transformers and save it whole: model.save_pretrained(FOLDER, max_shard_size='100GB')"
        )
    raise RequestError(f"--init-from {source}: has no {', no '.join(missing)}; {remedy}")


def _copied(source: str, cache_dir: Path, say: Callable[[str], None]) -> Path:
    """The files in the cache, named by where they come from and by what their file system says of their content."""
    import fsspec

    try:
        file_system, root = fsspec.core.url_to_fs(source.rstrip("/"), use_listings_cache=False)
        entries = {
            str(entry["name"]).rpartition("/")[2]: entry for entry in file_system.ls(root, detail=True)
        }
        _check(source, list(entries))
        wanted = {name: entries[name] for name in WANTED if name in entries}
        versions = {name: file_system.ukey(entry["name"]) for name, entry in wanted.items()}
        key = hashlib.sha256(
            json.dumps([source, versions], sort_keys=True, default=str).encode()
        ).hexdigest()[:32]
        folder = cache_dir / "flax_mlm" / "init-from" / key

        def fetch(temporary: Path) -> None:
            size = sum(int(entry["size"] or 0) for entry in wanted.values())
            say(f"copying {source} ({size / 2**20:,.0f} MiB)")
            for name, entry in wanted.items():
                file_system.get_file(entry["name"], str(temporary / name))

        build_once(folder, fetch, say=say)
        return folder
    except RequestError:
        raise
    except FileNotFoundError:
        raise RequestError(f"--init-from {source}: there is no such folder; check the address") from None
    except (ImportError, ValueError) as error:
        raise RequestError(f"--init-from {source}: no driver for this kind of URL: {error}") from None
    except Exception as error:  # each driver has exceptions of its own
        raise RequestError(
            f"--init-from {source}: can't be read ({type(error).__name__}: {error}); check the address, the network "
            "and your permission there"
        ) from error
