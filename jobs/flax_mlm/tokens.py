"""A corpus as token ids on this host's disk: tokenised once, read at random by every process and run."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from jobs.flax_mlm.corpus import Corpus, open_corpus
from jobs.flax_mlm.split import RULE_VERSION, Split, split_documents
from jobs.flax_mlm.tokenizer import TokenizerFacts, load_tokenizer, open_tokenizer, train_tokenizer
from jobs.runtime.cache import build_once
from jobs.runtime.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    type Ids = npt.NDArray[np.uint16 | np.uint32]

_FORMAT = 1  # part of every key: raise it when the same corpus gives other files
_BATCH_CHARACTERS = 1_000_000  # encoded at once: enough to keep all cores busy, and the bound on memory
_COUNT_AT_ONCE = 1 << 24


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """Two flat streams of ids, `<s> document </s> <s> document </s> …`, memory-mapped and read-only.

    `fingerprint` covers all that training reads: hosts that differ in it would learn from different data.
    """

    directory: Path
    tokenizer: TokenizerFacts
    train: Ids
    eval: Ids
    train_documents: int
    eval_documents: int
    fingerprint: str

    def sequences(self, split: Split, length: int) -> int:
        """How many full sequences of `length` tokens the split has; the rest of its tail is left out."""
        return self._ids(split).size // length

    def rows(self, split: Split, indices: npt.NDArray[np.integer[Any]], length: int) -> npt.NDArray[np.int32]:
        """Sequences `indices` (N,) of the split as (N, length) int32; IndexError where there is none."""
        import numpy as np

        count = self.sequences(split, length)
        if indices.size and not (indices.min() >= 0 and indices.max() < count):
            raise IndexError(
                f"{split} has sequences 0 to {count - 1}, not {indices.min()} to {indices.max()}"
            )
        ids = np.asarray(self._ids(split))[: count * length].reshape(count, length)
        rows: npt.NDArray[np.int32] = ids[indices].astype(np.int32)
        return rows

    def _ids(self, split: Split) -> Ids:
        return self.train if split == "train" else self.eval


def prepare(
    source: str,
    *,
    text_field: str,
    vocab_size: int,
    tokenizer: str | None,
    eval_fraction: float,
    cache_dir: Path,
    say: Callable[[str], None],
) -> Tokens:
    """Open the corpus, get the tokenizer (the given one, or trained on the training documents), tokenise.

    Each result is kept under `cache_dir` and found again by the content that it was made from. Raises
    RequestError for a mistake in what was asked for, and OSError where the disk is full.
    """
    if not 0 < eval_fraction < 1:
        raise RequestError(f"--eval-fraction {eval_fraction}: must lie between 0 and 1, as 0.05 does")
    corpus = open_corpus(source, text_field=text_field)
    root = cache_dir / "flax_mlm"
    if tokenizer is None:
        facts = _trained_tokenizer(corpus, vocab_size, eval_fraction, root, say)
    else:
        facts = load_tokenizer(Path(tokenizer))

    directory = root / "tokens" / _key(corpus.fingerprint, facts.sha256, eval_fraction)
    build_once(
        directory,
        lambda temporary: _tokenise(corpus, facts, eval_fraction, temporary, say),
        whole=_is_whole,
        say=say,
    )
    tokens = _open(directory, facts)
    say(f"{tokens.train.size:,} training tokens, {tokens.eval.size:,} held out (cached in {directory})")
    return tokens


def unigram_entropy(tokens_eval: Ids, special_ids: Collection[int]) -> float:
    """Entropy, in nats, of the held-out tokens' own frequencies, special tokens left out.

    It is the loss of the best predictor that knows nothing but how often each token occurs in the held-out
    text, so a model whose loss lies below it has learned from context. ValueError where there is no token.
    """
    import numpy as np

    size = int(tokens_eval.max(initial=0)) + 1
    counts = np.zeros(size, np.int64)
    for start in range(0, tokens_eval.size, _COUNT_AT_ONCE):
        counts += np.bincount(tokens_eval[start : start + _COUNT_AT_ONCE], minlength=size)
    counts[[special for special in special_ids if special < size]] = 0
    total = counts.sum()
    if total == 0:
        raise ValueError("the held-out tokens are all special: no frequencies to take an entropy of")
    shares = counts[counts > 0] / total
    return float(-(shares * np.log(shares)).sum())


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps([_FORMAT, RULE_VERSION, *parts]).encode()).hexdigest()[:32]


def _trained_tokenizer(
    corpus: Corpus, vocab_size: int, eval_fraction: float, root: Path, say: Callable[[str], None]
) -> TokenizerFacts:
    def build(temporary: Path) -> None:
        say(f"training a tokenizer of {vocab_size:,} tokens on {corpus.source}")
        # What is not UTF-8 is said when the same documents are tokenised.
        sides = split_documents(corpus, eval_fraction, warn=lambda _: None)
        texts = (text for side, text in sides if side == "train")
        train_tokenizer(texts, vocab_size, temporary / "tokenizer.json")

    directory = root / "tokenizer" / _key(corpus.fingerprint, vocab_size, eval_fraction)
    build_once(directory, build, whole=_is_tokenizer, say=say)
    facts = load_tokenizer(directory / "tokenizer.json")
    if facts.vocab_size < vocab_size:
        say(
            f"the tokenizer has {facts.vocab_size:,} tokens, fewer than --vocab-size {vocab_size}: the text "
            "has no more pairs that occur twice"
        )
    return facts


def _is_tokenizer(directory: Path) -> bool:
    try:
        load_tokenizer(directory / "tokenizer.json")
    except RequestError:
        return False
    return True


@dataclass(kw_only=True)
class _Stream:
    """One side's file while it is written."""

    file: IO[bytes]
    digest: Any = field(default_factory=hashlib.sha256)
    documents: int = 0
    tokens: int = 0

    def write(self, ids: list[int], dtype: str) -> None:
        import numpy as np

        content = np.array(ids, dtype).tobytes()
        self.file.write(content)
        self.digest.update(content)
        self.documents += 1
        self.tokens += len(ids)

    def facts(self) -> dict[str, Any]:
        return {"documents": self.documents, "tokens": self.tokens, "sha256": self.digest.hexdigest()}


def _tokenise(
    corpus: Corpus, facts: TokenizerFacts, eval_fraction: float, directory: Path, say: Callable[[str], None]
) -> None:
    say(f"tokenising {corpus.source}")
    started_s = time.monotonic()
    encoder = open_tokenizer(facts.path)
    dtype = "<u2" if facts.vocab_size <= 1 << 16 else "<u4"
    characters = 0
    with (directory / "train.bin").open("wb") as train, (directory / "eval.bin").open("wb") as held_out:
        streams = {"train": _Stream(file=train), "eval": _Stream(file=held_out)}
        for batch in _batches(split_documents(corpus, eval_fraction, warn=say)):
            texts = [text for _, text in batch]
            characters += sum(map(len, texts))
            encodings = encoder.encode_batch_fast(texts, add_special_tokens=False)
            for (side, _), encoding in zip(batch, encodings, strict=True):
                streams[side].write([facts.bos_id, *encoding.ids, facts.eos_id], dtype)
    meta = {
        "version": _FORMAT,
        "corpus": corpus.fingerprint,
        "tokenizer": facts.sha256,
        "vocab_size": facts.vocab_size,
        "eval_fraction": eval_fraction,
        "dtype": dtype,
        **{side: stream.facts() for side, stream in streams.items()},
    }
    (directory / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    documents = sum(stream.documents for stream in streams.values())
    seconds = time.monotonic() - started_s
    say(f"tokenised {characters:,} characters of {corpus.source}: {documents:,} documents in {seconds:.1f} s")


def _batches(sides: Iterable[tuple[Split, str]]) -> Iterator[list[tuple[Split, str]]]:
    batch: list[tuple[Split, str]] = []
    characters = 0
    for side, text in sides:
        batch.append((side, text))
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _is_whole(directory: Path) -> bool:
    """Whether the files are as long as meta.json says: something outside may have torn them."""
    try:
        meta = json.loads((directory / "meta.json").read_bytes())
        width = int(meta["dtype"][-1])
        return all(
            (directory / f"{side}.bin").stat().st_size == meta[side]["tokens"] * width
            for side in ("train", "eval")
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _open(directory: Path, facts: TokenizerFacts) -> Tokens:
    import numpy as np

    content = (directory / "meta.json").read_bytes()
    meta = json.loads(content)
    return Tokens(
        directory=directory,
        tokenizer=facts,
        train=np.memmap(directory / "train.bin", meta["dtype"], mode="r"),
        eval=np.memmap(directory / "eval.bin", meta["dtype"], mode="r"),
        train_documents=meta["train"]["documents"],
        eval_documents=meta["eval"]["documents"],
        fingerprint=hashlib.sha256(content).hexdigest(),
    )
