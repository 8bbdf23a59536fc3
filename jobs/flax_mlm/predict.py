"""Predictions of hidden tokens, and the pseudo-perplexity of held-out text: at the end of a run (`final_eval`), and for
`fab predict`.

Pseudo-perplexity (Salazar et al. 2020, arXiv:1910.14659, section 2.2) is exp of the mean surprise, in nats, at each
token of a text when only that token is hidden. It is taken over whole held-out sequences, spread evenly over the
held-out text, special tokens left out.

What it costs: a forward pass of one row for each token, so it is bounded: MOST_ROWS rows, and no more than SHARE of the
rows that the run has trained on (a forward pass is a third of a training step, so under 2 % of the run's time), but one
sequence at least. A mean over 2,048 tokens whose surprise varies by 2 or 3 nats is good to about 0.06 nats, the
perplexity to 6 %.

As a program (`jobs.runtime.prediction`) it fills the masks of texts with an exported model, without an accelerator or a
group.
"""

from __future__ import annotations

import dataclasses
import functools
import math
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
from jobs.flax_mlm.config import Config, dimensions
from jobs.flax_mlm.hugging_face import Pretrained, open_pretrained
from jobs.flax_mlm.model import Mlm
from jobs.flax_mlm.sharding import ModelOf, make_model
from jobs.flax_mlm.tokenizer import TokenizerFacts, open_tokenizer
from jobs.runtime.jax.executables import Executables
from jobs.runtime.prediction import TEXT, Answer, Encoded, Guess, Row, refuse_second

BEST = 5
"""Tokens that are kept for each hidden one; G in shapes."""
MASK = "<mask>"
MOST_ROWS = 2048
SHARE = 1 / 20
SHOWN = 8
"""Fillings."""
CONTEXT_CHARACTERS = 90
_SHORTEST_WORD = 3


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
    predict = make_predict(make_model(graph, specs))
    return sharding.on_each_device(predict, mesh, (specs, rows, rows, rows), rows)


def shown(token: str) -> str:
    """A token as people read it: without the blanks around it; what cannot be seen, such as a line end, is escaped."""
    text = token.strip(" ")
    return text if text.isprintable() else repr(text)[1:-1]


class Place(NamedTuple):
    """Where a token was hidden: row of the sample, position in its sequence, and the number of the prediction."""

    row: int
    position: int
    number: int


def sample(*, sequences: int, length: int, trained_rows: int) -> np.ndarray:
    """Choose held-out sequences for the final evaluation: (N,) indices, spread evenly."""
    rows = min(MOST_ROWS, int(trained_rows * SHARE))
    count = max(1, min(sequences, rows // length))
    return np.linspace(0, sequences - 1, count).round().astype(np.int64)


def final_eval(
    predict: Predict,
    params: Any,
    rows_NS: np.ndarray,
    tokenizer: TokenizerFacts,
    place: Callable[[np.ndarray], jax.Array],
    *,
    batch_size: int,
    tick: Callable[[], None],
) -> dict[str, Any]:
    """Compute `pseudo_perplexity` and `fillings` for result.json. Every process makes the same call.

    Args:
        predict: see `make_sharded_predict`, compiled so that what it returns is whole on every device.
        rows_NS: whole held-out sequences, the same on all processes.
        place: (B, …) values to an array over all devices.
        tick: called at every sign of progress.
    """
    places = hidden_places(rows_NS, tokenizer.special_ids)
    nats, best = [], []
    for first in range(0, len(places), batch_size):
        batch = places[first : first + batch_size]
        filled = [*batch, *[batch[-1]] * (batch_size - len(batch))]
        rows_B = np.array([hidden.row for hidden in filled])
        positions_B1 = np.array([[hidden.position] for hidden in filled], np.int32)
        inputs_BS = rows_NS[rows_B]
        truth_B1 = np.take_along_axis(inputs_BS, positions_B1, axis=1)
        np.put_along_axis(inputs_BS, positions_B1, tokenizer.mask_id, axis=1)
        predicted = predict(params, place(inputs_BS), place(positions_B1), place(truth_B1))
        nats += np.asarray(predicted.nats_BM)[: len(batch), 0].tolist()
        pairs_B = zip(np.asarray(predicted.tokens_BMG), np.asarray(predicted.probabilities_BMG), strict=True)
        best += [
            list(zip(tokens[0].tolist(), shares[0].tolist(), strict=True)) for tokens, shares in pairs_B
        ][: len(batch)]
        tick()
    reader = open_tokenizer(tokenizer.path)

    def decode(ids: Sequence[int]) -> str:
        return str(reader.decode(list(ids), skip_special_tokens=False))

    return {
        "pseudo_perplexity": math.exp(sum(nats) / len(nats)) if nats else None,
        "fillings": [
            filling(rows_NS[hidden.row], hidden.position, best[hidden.number], decode, tokenizer.special_ids)
            for hidden in readable(places, rows_NS, decode)
        ],
    }


def hidden_places(rows_NS: np.ndarray, special_ids: Sequence[int]) -> list[Place]:
    """Every ordinary token of every row, in order."""
    places_N2 = np.argwhere(~np.isin(rows_NS, list(special_ids)))
    return [Place(int(row), int(position), number) for number, (row, position) in enumerate(places_N2)]


def readable(
    places: Sequence[Place], rows_NS: np.ndarray, decode: Callable[[Sequence[int]], str]
) -> list[Place]:
    """Those of `places` that begin a word and have text on both sides, SHOWN at most, spread over the sample."""
    length = rows_NS.shape[1]
    inner = [
        place for place in places if length // 4 <= place.position < max(length // 4 + 1, 3 * length // 4)
    ]
    word_places = [place for place in inner if _is_word(decode([int(rows_NS[place.row, place.position])]))]
    if len(word_places) <= SHOWN:
        return word_places
    return [word_places[index] for index in np.linspace(0, len(word_places) - 1, SHOWN).astype(int)]


def filling(
    tokens_S: np.ndarray,
    position: int,
    guesses: Sequence[tuple[int, float]],
    decode: Callable[[Sequence[int]], str],
    special_ids: Sequence[int],
) -> dict[str, Any]:
    """An entry of `fillings`: the text before and after within its document, the true word, and the guesses.

    guesses: (token, probability) pairs, best first.
    """
    special = set(special_ids)
    start = max((i + 1 for i in range(position) if int(tokens_S[i]) in special), default=0)
    ends = (i for i in range(position + 1, len(tokens_S)) if int(tokens_S[i]) in special)
    end = next(ends, len(tokens_S))
    before = " ".join(decode([int(token) for token in tokens_S[start:position]]).split())
    follows = decode([int(token) for token in tokens_S[position + 1 : end]])
    after = (" " if follows[:1].isspace() else "") + " ".join(follows.split())
    return {
        "before": before if len(before) <= CONTEXT_CHARACTERS else f"…{before[-CONTEXT_CHARACTERS:]}",
        "after": after if len(after) <= CONTEXT_CHARACTERS else f"{after[:CONTEXT_CHARACTERS]}…",
        "truth": shown(decode([int(tokens_S[position])])),
        "guesses": [[shown(decode([token])), round(probability, 4)] for token, probability in guesses],
    }


def _is_word(text: str) -> bool:
    word = text.strip()
    return text[:1].isspace() and len(word) >= _SHORTEST_WORD and word.isalpha()


class MaskFiller:
    """Fills the masks of texts: a row for each mask, all masks of its text hidden at once.

    A row's padding is seen by nobody: the padding token begins a document of its own, in a model whose positions see
    their own document only.
    """

    task, takes = "fill-mask", TEXT
    example = f"Return {MASK}.", None

    def __init__(self, model: Pretrained, cache_dir: Path) -> None:
        self._tokenizer, self.longest = model.tokenizer, model.dims.max_positions
        self._encoder = open_tokenizer(model.tokenizer.path)
        dims = dataclasses.replace(
            dimensions(model.adopted_by(Config()), model.tokenizer), document_start=model.tokenizer.pad_id
        )
        graph = nnx.split(nnx.eval_shape(lambda: Mlm(dims, jnp.dtype("float32"), nnx.Rngs(0))))[0]
        self._params = jax.tree.map(jnp.asarray, model.params())
        self._predict = jax.jit(make_predict(functools.partial(nnx.merge, graph)))
        self._executables = Executables(str(cache_dir), jax.devices()[:1])
        self._texts: dict[int, str] = {}
        self._compiled: dict[tuple[int, int], Callable[..., Predictions]] = {}

    def token_ids(self, text: str) -> list[int]:
        """Of the text between <s> and </s>; a mask takes the blanks before it along, as RoBERTa's does."""
        *before, last = text.split(MASK)
        ids = [self._tokenizer.bos_id]
        for piece in before:
            ids += self._encoder.encode(piece.rstrip(), add_special_tokens=False).ids
            ids.append(self._tokenizer.mask_id)
        return [*ids, *self._encoder.encode(last, add_special_tokens=False).ids, self._tokenizer.eos_id]

    def encode(self, value: str | bytes, second: str | None) -> Encoded:
        """As `Predictor` has it: an answer for each mask; of several, the heading says which it is.

        Raises:
            RequestError: the text has no mask, or is longer than the model's longest sequence.
        """
        refuse_second(second, "a model that fills masks")
        assert isinstance(value, str)
        if MASK not in value:
            raise RequestError(f'"{value:.60}" has no {MASK}; write {MASK} where a word is to be guessed')
        ids = self.token_ids(value)
        if len(ids) > self.longest:
            raise RequestError(
                f'"{value:.60}" has {len(ids)} tokens, and the model takes at most {self.longest}; shorten it'
            )
        places = [place for place, token in enumerate(ids) if token == self._tokenizer.mask_id]

        def answers(outputs: Sequence[Any]) -> list[Answer]:
            pieces, results = value.split(MASK), []
            for number, (tokens_G, shares_G) in enumerate(outputs, 1):
                before, after = MASK.join(pieces[:number]), MASK.join(pieces[number:])
                best = [
                    Guess(text=self._shown(int(token)), probability=float(share))
                    for token, share in zip(tokens_G, shares_G, strict=True)
                ]
                heading = f"{before}[{number}]{after}" if len(pieces) > 2 else None
                results.append(Answer(input=value, heading=heading, best=best))
            return results

        return Encoded(rows=[Row(length=len(ids), values=(ids, place)) for place in places], answers=answers)

    def compute(self, rows: Sequence[Row], size: int, length: int) -> list[tuple[np.ndarray, np.ndarray]]:
        inputs_BS = np.full((size, length), self._tokenizer.pad_id, np.int32)
        positions_B1 = np.zeros((size, 1), np.int32)
        for row, encoded in enumerate(rows):
            ids, positions_B1[row, 0] = encoded.values
            inputs_BS[row, : len(ids)] = ids
        arguments = self._params, inputs_BS, positions_B1, np.zeros_like(positions_B1)
        if (size, length) not in self._compiled:
            self._compiled[size, length] = self._executables.compiled(self._predict, *arguments)
        predicted = self._compiled[size, length](*arguments)
        tokens_BG, shares_BG = (
            np.asarray(values)[:, 0] for values in (predicted.tokens_BMG, predicted.probabilities_BMG)
        )
        return list(zip(tokens_BG, shares_BG, strict=True))[: len(rows)]

    def _shown(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = shown(self._encoder.decode([token], skip_special_tokens=False))
        return self._texts[token]


def load(export: Path, cache_dir: Path) -> MaskFiller:
    """The predictor of an export. Raises RequestError: it is none of this job."""
    model = open_pretrained(str(export), cache_dir, say=lambda line: print(line, file=sys.stderr))
    return MaskFiller(model, cache_dir)
