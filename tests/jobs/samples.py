"""What several tests use: made-up documents and their tokens, and a vocabulary with no tokenizer behind it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from jobs.flax_mlm.config import Config
from jobs.flax_mlm.data import Tokens, prepare_tokens
from jobs.flax_mlm.tokenizer import TokenizerFacts, open_tokenizer

FACTS = TokenizerFacts(
    path=Path("none"), vocab_size=48, bos_id=0, pad_id=1, eos_id=2, unk_id=3, mask_id=47, sha256=""
)
"""48 ids with RoBERTa's special tokens."""
PROSE = "the cat sat on a mat and the dog ate the hat that lay there when it rained all day long"


def texts(count: int, *, seed: int = 0) -> list[str]:
    random = Random(seed)
    return [f"{n} " + " ".join(random.choices(PROSE.split(), k=random.randint(5, 60))) for n in range(count)]


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
    given = None if tokenizer is None else str(tokenizer)
    config = Config(data=str(source), vocab_size=300, tokenizer=given, eval_fraction=eval_fraction)
    return prepare_tokens(config, cache_dir, say)


def decoded(tokens: Tokens, ids: np.ndarray) -> list[str]:
    """The documents of a stream, after checking that each is framed by <s> and </s>."""
    tokenizer, facts = open_tokenizer(tokens.tokenizer.path), tokens.tokenizer
    starts = np.flatnonzero(ids == facts.bos_id)
    ends = np.flatnonzero(ids == facts.eos_id)
    assert starts[0] == 0
    assert ends[-1] == ids.size - 1
    assert (starts[1:] == ends[:-1] + 1).all()
    return [tokenizer.decode(ids[start + 1 : end].tolist()) for start, end in zip(starts, ends, strict=True)]
