"""What a model would write in place of hidden tokens, and how surprised it is by what stands there.

As a program, `python -m jobs.flax_mlm.predict EXPORT CACHE_DIR` fills the masks of the text on stdin with an exported
model: what `fab fill-mask` runs. It needs no accelerator and no group. Its answer is one JSON object on stdout:
{"masks": [of each mask the best tokens, as {"token", "probability"}]}. Exit code 2 and a line on stderr: the request
was wrong.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from contracts.errors import RequestError
from jobs.flax_mlm import sharding
from jobs.flax_mlm.config import Config
from jobs.flax_mlm.hugging_face import Pretrained, open_pretrained
from jobs.flax_mlm.model import Mlm
from jobs.flax_mlm.sharding import ModelOf, model_of
from jobs.flax_mlm.step import dimensions
from jobs.flax_mlm.tokenizer import TokenizerFacts, open_tokenizer

BEST = 5
"""Tokens that are kept for each hidden one; G in shapes."""
MASK = "<mask>"


class Predictions(NamedTuple):
    """Of M hidden tokens in each of B rows: the surprise at the true one, in nats, and the best tokens, best first."""

    nats_BM: jax.Array
    probabilities_BMG: jax.Array
    tokens_BMG: jax.Array


Predict = Callable[[Any, jax.Array, jax.Array, jax.Array], Predictions]


def make_predict(model: ModelOf) -> Predict:
    """(params, inputs_BS, positions_BM, truth_BM) to Predictions; to be compiled by the caller, or not."""

    def predict(
        params: Any, inputs_BS: jax.Array, positions_BM: jax.Array, truth_BM: jax.Array
    ) -> Predictions:
        log_BMV = jax.nn.log_softmax(model(params)(inputs_BS, positions_BM))
        log_BMG, tokens_BMG = jax.lax.top_k(log_BMV, BEST)
        nats_BM = -jnp.take_along_axis(log_BMV, truth_BM[..., None], axis=-1)[..., 0]
        return Predictions(nats_BM, jnp.exp(log_BMG), tokens_BMG)

    return predict


def make_sharded_predict(graph: nnx.GraphDef[Mlm], mesh: Mesh, params: Any) -> Predict:
    """As `make_predict`, on devices that each have their own rows, and perhaps only parts of such parameters."""
    specs, rows = sharding.specs(params, mesh), sharding.ROWS
    predict = make_predict(model_of(graph, specs))
    return sharding.on_each_device(predict, mesh, (specs, rows, rows, rows), rows)


def shown(token: str) -> str:
    """A token for people: without the blanks around it; what cannot be seen is escaped, as a line end is."""
    seen = token.strip(" ")
    return seen if seen.isprintable() else repr(seen)[1:-1]


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
    dims = dimensions(model.adopted_by(Config()), model.tokenizer)
    graph = nnx.split(nnx.eval_shape(lambda: Mlm(dims, jnp.dtype("float32"), nnx.Rngs(0))))[0]
    positions_1M = jnp.asarray([[n for n, token in enumerate(ids) if token == model.tokenizer.mask_id]])
    predict = make_predict(functools.partial(nnx.merge, graph))
    params = jax.tree.map(jnp.asarray, model.params())
    found = predict(params, jnp.asarray([ids]), positions_1M, jnp.zeros_like(positions_1M))
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
            np.asarray(found.tokens_BMG)[0], np.asarray(found.probabilities_BMG)[0], strict=True
        )
    ]


def main(arguments: Sequence[str]) -> int:
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
