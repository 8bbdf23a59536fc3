"""Fill the masks in a text with an exported model: `python -m jobs.flax_mlm.fill_mask EXPORT CACHE_DIR`, text on stdin.

What `fab fill-mask` runs; it needs no accelerator and no group. Its answer is one JSON object on stdout: {"masks": [of
each mask the best tokens, as {"token", "probability"}]}. Exit code 2 and a line on stderr: the request was wrong.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contracts.errors import RequestError
from jobs.flax_mlm.pretrained import Pretrained, open_pretrained
from jobs.flax_mlm.tokenizer import TokenizerFacts, open_tokenizer

MASK = "<mask>"


def encode(text: str, tokenizer: TokenizerFacts) -> list[int]:
    """Token ids of the text between <s> and </s>; a mask takes the blanks before it along, as RoBERTa's does."""
    encoder = open_tokenizer(tokenizer.path)
    *before, last = text.split(MASK)
    ids = [tokenizer.bos_id]
    for piece in before:
        ids += [*encoder.encode(piece.rstrip(), add_special_tokens=False).ids, tokenizer.mask_id]
    return [*ids, *encoder.encode(last, add_special_tokens=False).ids, tokenizer.eos_id]


def fill(model: Pretrained, text: str) -> list[list[dict[str, Any]]]:
    """Of each mask of the text, all of them hidden at once, the best tokens.

    Raises:
        RequestError: there is no mask in the text, or it is longer than the model's longest sequence.
    """
    if MASK not in text:
        raise RequestError(f"the text has no {MASK}; write {MASK} where a word is to be guessed")
    ids = encode(text, model.tokenizer)
    if len(ids) > model.max_positions:
        raise RequestError(
            f"the text has {len(ids)} tokens, and the model takes at most {model.max_positions}; shorten it"
        )
    import jax
    import numpy as np
    from flax import nnx

    from jobs.flax_mlm.config import Config
    from jobs.flax_mlm.fillings import shown
    from jobs.flax_mlm.guess import make_guess
    from jobs.flax_mlm.model import Mlm
    from jobs.flax_mlm.step import dimensions

    dims = dimensions(model.adopted_by(Config()), model.tokenizer)
    graph = nnx.split(nnx.eval_shape(lambda: Mlm(dims, jax.numpy.dtype("float32"), nnx.Rngs(0))))[0]
    tokens_1S = jax.numpy.asarray([ids])
    positions_1M = jax.numpy.asarray([[n for n, token in enumerate(ids) if token == model.tokenizer.mask_id]])
    params = jax.tree.map(jax.numpy.asarray, model.params())
    guess = make_guess(functools.partial(nnx.merge, graph))
    guessed = guess(params, tokens_1S, positions_1M, jax.numpy.zeros_like(positions_1M))
    reader = open_tokenizer(model.tokenizer.path)
    return [
        [
            {
                "token": shown(reader.decode([int(token)], skip_special_tokens=False)),
                "probability": float(share),
            }
            for token, share in zip(tokens_G, shares_G, strict=True)
        ]
        for tokens_G, shares_G in zip(
            np.asarray(guessed.tokens_BMG)[0], np.asarray(guessed.probabilities_BMG)[0], strict=True
        )
    ]


def main(arguments: Sequence[str]) -> int:
    import jax

    jax.config.update("jax_platforms", "cpu")
    source, cache_dir = arguments
    try:
        model = open_pretrained(source, Path(cache_dir), say=lambda text: print(text, file=sys.stderr))
        print(json.dumps({"masks": fill(model, sys.stdin.read())}))
    except RequestError as error:
        print(f"error: {str(error).removeprefix('--init-from ')}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
