"""Token ids of `--data` on this host's disk: tokenised once, read at random by every process and run.

Light: the launching side calls `problems` before anything is started.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contracts.errors import RequestError, Unreachable, noted_in
from jobs.flax_mlm.config import Config
from jobs.flax_mlm.config import problems as config_problems
from jobs.flax_mlm.corpus import RULE_VERSION, Corpus, Split, open_corpus, split_documents
from jobs.flax_mlm.preprocess import FORMAT, META, WARNINGS, is_whole, tokenise
from jobs.flax_mlm.tokenizer import (
    TokenizerFacts,
    load_tokenizer,
    sample,
    sample_share,
    train_tokenizer,
)
from jobs.runtime.storage.cache import CacheRefused, RemoteCache, build_once

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    type Ids = npt.NDArray[np.uint16 | np.uint32]

ENOUGH_BYTES_PER_TOKEN = 64
"""Text of this many bytes for each token of a batch counts as enough to fill it; less is tokenised to find out."""


def prepare(
    config: Config, cache_dir: Path, say: Callable[[str], None], offered: str | None = None
) -> Tokens:
    """The tokenised corpus, from the cache or made now. offered: the URL of a cache that takes the place of
    `--remote-cache` where that is not given; as nobody has asked for it, it need not answer.

    Raises:
        RequestError: there is no such data, or too little for one batch or one held-out sequence.
    """
    try:
        with_cache = dataclasses.replace(config, remote_cache=config.remote_cache or offered)
        prepared = prepare_tokens(with_cache, cache_dir, say)
    except (Unreachable, CacheRefused) as error:
        if with_cache == config:
            raise
        say(f"{error}; nobody has asked for this cache, and the run goes on without it")
        prepared = prepare_tokens(config, cache_dir, say)
    sequences = prepared.sequences("train", config.sequence_length)
    if sequences < config.batch_size:
        raise RequestError(
            f"--data {config.data}: has {sequences} training sequences of {config.sequence_length} tokens, too few "
            f"for one batch of {config.batch_size}; lower --batch-size or --sequence-length, or bring more text"
        )
    if prepared.sequences("eval", config.sequence_length) < 1:
        raise RequestError(
            f"--data {config.data}: the held-out documents have {prepared.eval.size} tokens, fewer than one sequence "
            f"of {config.sequence_length}; raise --eval-fraction ({config.eval_fraction}) or bring more text"
        )
    return prepared


def problems(config: Config, cache_dir: Path) -> list[str]:
    """What is wrong with the data, as far as the launching side can read it; called before anything is started.

    A large corpus is only looked for, a small one is tokenised (into the cache, where the run finds it).

    Raises:
        Unreachable: a place does not answer now.
    """
    messages: list[str] = []
    with noted_in(messages):
        if config.init_from is not None:
            from jobs.flax_mlm import hugging_face  # a run from scratch does without

            config, _ = hugging_face.adopt(config, cache_dir, say=lambda _: None)
        corpus = open_corpus(config.data, text_field=config.text_field)
        corpus.check()
        if config.tokenizer is not None:
            load_tokenizer(Path(config.tokenizer))
        if corpus.size_bytes < ENOUGH_BYTES_PER_TOKEN * config.batch_size * config.sequence_length:
            local = dataclasses.replace(config, remote_cache=None)
            prepare(local, cache_dir, say=lambda _: None)
    # The sizes of a pretrained model are known only now; the devices have been counted before.
    return messages or config_problems(config, devices=config.fsdp)


_COUNT_AT_ONCE = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """Two flat streams of ids, `<s> document </s> <s> document </s> …`, memory-mapped and read-only.

    `fingerprint` covers all that training reads: hosts that differ in it would learn from different data.
    `warnings`: what whoever trains on it should know, as of text that is not UTF-8.
    """

    directory: Path
    tokenizer: TokenizerFacts
    train: Ids
    eval: Ids
    train_documents: int
    eval_documents: int
    fingerprint: str
    warnings: tuple[str, ...] = ()

    def sequences(self, split: Split, length: int) -> int:
        """How many full sequences of `length` tokens the split has; the rest of its tail is left out."""
        return self._ids(split).size // length

    def rows(self, split: Split, indices: npt.NDArray[np.integer[Any]], length: int) -> npt.NDArray[np.int32]:
        """Sequences `indices` (N,) of the split as (N, length) int32."""
        import numpy as np

        count = self.sequences(split, length)
        ids = np.asarray(self._ids(split))[: count * length].reshape(count, length)
        rows: npt.NDArray[np.int32] = ids[indices].astype(np.int32)
        return rows

    def _ids(self, split: Split) -> Ids:
        return self.train if split == "train" else self.eval


def prepare_tokens(config: Config, cache_dir: Path, say: Callable[[str], None]) -> Tokens:
    """Open the corpus, get the tokenizer (the given one, or trained on the training documents), tokenise.

    Each result is kept under `cache_dir`, and in `--remote-cache` where there is one, and found again by the content
    that it was made from. Raises RequestError for a mistake in what was asked for, and OSError where the disk is full.
    """
    corpus = open_corpus(config.data, text_field=config.text_field)
    root = cache_dir / "flax_mlm"
    shared = None if config.remote_cache is None else RemoteCache(config.remote_cache)
    if config.tokenizer is None:
        facts = _trained_tokenizer(corpus, config, root, shared, say)
    else:
        facts = load_tokenizer(Path(config.tokenizer))

    directory = root / "tokens" / _key(corpus.fingerprint, facts.sha256, config.eval_fraction)

    def build(temporary: Path) -> None:
        tokenise(corpus, facts, config.eval_fraction, temporary, say)

    _make(directory, build, shared, say, is_complete=is_whole, goes_on=True)
    tokens = _open(directory, facts)
    say(f"{tokens.train.size:,} training tokens, {tokens.eval.size:,} held out (cached in {directory})")
    return tokens


def unigram_entropy(tokens_eval: Ids, special_ids: Collection[int]) -> float:
    """Entropy, in nats, of the held-out tokens' own frequencies, special tokens left out.

    It is the loss of the best predictor that knows nothing but how often each token occurs in the held-out
    text, so a model whose loss lies below it has learned from context.
    """
    import numpy as np

    size = int(tokens_eval.max(initial=0)) + 1
    counts = np.zeros(size, np.int64)
    for start in range(0, tokens_eval.size, _COUNT_AT_ONCE):
        counts += np.bincount(tokens_eval[start : start + _COUNT_AT_ONCE], minlength=size)
    counts[[special for special in special_ids if special < size]] = 0
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps([FORMAT, RULE_VERSION, *parts]).encode()).hexdigest()[:32]


def _trained_tokenizer(
    corpus: Corpus, config: Config, root: Path, shared: RemoteCache | None, say: Callable[[str], None]
) -> TokenizerFacts:
    share, vocab_size = sample_share(corpus.text_bytes), config.size("vocab_size")

    def build(temporary: Path) -> None:
        share_text = "" if share == 1 else f"{share:.1%} of "
        say(f"training a tokenizer of {vocab_size:,} tokens on {share_text}{corpus.source}")
        # What is not UTF-8 is said when the same documents are tokenised.
        documents = split_documents(corpus, config.eval_fraction, warn=lambda _: None)
        texts = (text for split, text in documents if split == "train")
        train_tokenizer(sample(texts, share), vocab_size, temporary / "tokenizer.json")

    key = _key(corpus.fingerprint, vocab_size, config.eval_fraction, *([] if share == 1 else [share]))
    directory = root / "tokenizer" / key
    _make(directory, build, shared, say, is_complete=_is_tokenizer)
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


def _make(
    directory: Path,
    build: Callable[[Path], None],
    shared: RemoteCache | None,
    say: Callable[[str], None],
    *,
    is_complete: Callable[[Path], bool],
    goes_on: bool = False,
) -> None:
    """Fetch a folder of the cache from the remote one, or build it, unless it is there; give that what it lacks."""
    place = f"{directory.parent.name}/{directory.name}"

    def fetch_or_build(temporary: Path) -> None:
        if shared is None or not shared.fetch(place, temporary, say=say):
            build(temporary)

    build_once(directory, fetch_or_build, is_complete=is_complete, goes_on=goes_on, say=say)
    if shared is not None:
        shared.put(directory, place, say=say)


def _open(directory: Path, facts: TokenizerFacts) -> Tokens:
    import numpy as np

    content, warnings = (directory / META).read_bytes(), directory / WARNINGS
    meta = json.loads(content)
    return Tokens(
        directory=directory,
        tokenizer=facts,
        train=np.memmap(directory / "train.bin", meta["dtype"], mode="r"),
        eval=np.memmap(directory / "eval.bin", meta["dtype"], mode="r"),
        train_documents=meta["train"]["documents"],
        eval_documents=meta["eval"]["documents"],
        fingerprint=hashlib.sha256(content).hexdigest(),
        warnings=tuple(json.loads(warnings.read_bytes())) if warnings.exists() else (),
    )
