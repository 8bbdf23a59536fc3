"""From `--data` to the rows of each step: what is read in step t is a function of (seed, t) alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from contracts.errors import RequestError
from jobs.flax_mlm.config import Config
from jobs.flax_mlm.config import problems as config_problems

if TYPE_CHECKING:
    import numpy as np

    from jobs.flax_mlm.tokens import Tokens

ENOUGH_BYTES_PER_TOKEN = 64
"""Text of this many bytes for each token of a batch is taken to fill the batch; less is tokenised to find out."""


def prepare(config: Config, cache_dir: Path, say: Callable[[str], None]) -> Tokens:
    """The tokenised corpus, from the cache or made now.

    Raises:
        RequestError: there is no such data, or too little for one batch or one held-out sequence.
    """
    from jobs.flax_mlm import tokens

    prepared = tokens.prepare(
        config.data,
        text_field=config.text_field,
        vocab_size=config.size("vocab_size"),
        tokenizer=config.tokenizer,
        eval_fraction=config.eval_fraction,
        cache_dir=cache_dir,
        say=say,
        remote_cache=config.remote_cache,
    )
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
    """What is wrong with the data, found out before anything is started, where the data can be seen.

    A large corpus is only looked for, a small one is tokenised (into the cache, where the run finds it).
    """
    from jobs.flax_mlm import corpus, pretrained

    try:
        config, _ = pretrained.adopt(config, cache_dir, say=lambda _: None)
        found = corpus.open_corpus(config.data, text_field=config.text_field)
        found.check_text()
        if config.tokenizer is not None:
            from jobs.flax_mlm.tokenizer import load_tokenizer

            load_tokenizer(Path(config.tokenizer))
        if found.size_bytes < ENOUGH_BYTES_PER_TOKEN * config.batch_size * config.sequence_length:
            here = dataclasses.replace(config, remote_cache=None)
            prepare(here, cache_dir, say=lambda _: None)
    except RequestError as error:
        return [str(error)]
    # Of a model that is gone on with, sizes are known only now; the devices have been counted before.
    return config_problems(config, devices=config.fsdp)


def step_indices(step: int, *, seed: int, sequences: int, batch_size: int) -> np.ndarray:
    """The training sequences of step `step` (from 0): (batch_size,) indices below `sequences`.

    An epoch is a permutation drawn from (seed, epoch); the sequences that do not fill a last batch wait for
    the next epoch's permutation.
    """
    epoch, place = divmod(step, sequences // batch_size)
    order = _epoch_order(seed, epoch, sequences)[place * batch_size : (place + 1) * batch_size]
    return order.astype("int64")


@functools.lru_cache(maxsize=1)
def _epoch_order(seed: int, epoch: int, sequences: int) -> np.ndarray:
    import numpy as np

    # A table, of four bytes a sequence (20 million: 80 MB, half a second), shuffled in place. A permutation that needs
    # no table would be another order, and with it every run another one.
    order = np.arange(sequences, dtype=np.uint32)
    np.random.Generator(np.random.Philox(key=[seed, epoch])).shuffle(order)
    return order
