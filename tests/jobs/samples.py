"""What several tests use: made-up documents and their tokens, and a vocabulary with no tokenizer behind it."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from jobs.flax_mlm.config import Config, dimensions
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


def write_export(folder: Path) -> Path:
    """An export of flax_mlm with weights as they are drawn, of a model with 32 positions."""
    import jax.numpy as jnp
    from flax import nnx

    from contracts.run_directory import RunDirectory
    from jobs.flax_mlm.hugging_face import export
    from jobs.flax_mlm.model import Mlm
    from jobs.flax_mlm.tokenizer import load_tokenizer, train_tokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.parent / "tokenizer.json"
    train_tokenizer(["the cat sat on the mat and the dog ate the hat"] * 20, 300, path)
    facts = load_tokenizer(path)
    config = Config(
        layers=2, width=16, heads=4, ff_width=24, max_positions=32, sequence_length=32, dtype="float32"
    )
    model = Mlm(dimensions(config, facts), jnp.dtype("float32"), nnx.Rngs(0))
    export(RunDirectory(str(folder.parent)), config, nnx.to_pure_dict(nnx.state(model, nnx.Param)), facts)
    return folder
