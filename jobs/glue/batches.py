"""Rows as batches of one shape, one row after the other. What step t reads is a function of (seed, t) only."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs.glue.data import Rows

if TYPE_CHECKING:
    from tokenizers import Tokenizer

type Array = np.ndarray[Any, Any]

MULTIPLE = 8
"""Lengths are multiples of this on accelerators, as wide as their vectors are."""


type Blocks = tuple[tuple[int, int], ...]
"""A batch's rows in their order: so many rows padded to such a length, then so many to a longer one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """A batch in `shares`, each of T tokens: its rows one after the other, those of a block padded to one length.

    mask_GT: 1: a token, 0: padding. types_GT: which text of a pair, where the model asks. places_GT: each token's place
    in its row. labels_GN: int64 classes or float32 numbers. rows_GN: the rows' indices; -1: a row that only fills the
    batch. blocks: of one share.
    """

    ids_GT: Array
    mask_GT: Array
    types_GT: Array
    places_GT: Array
    labels_GN: Array
    rows_GN: Array
    blocks: Blocks

    def share(self, rank: int, size: int) -> Packed:
        """The shares of one process of `size`, which take equally many."""
        shares = len(self.rows_GN) // size
        arrays = {name: values for name, values in vars(self).items() if name != "blocks"}
        mine = {name: values[rank * shares : (rank + 1) * shares] for name, values in arrays.items()}
        return Packed(**mine, blocks=self.blocks)


class Encoded:
    """Tokenised rows. lengths_N: of each row, `max_length` at most."""

    def __init__(
        self, rows: Rows, tokenizer: Tokenizer, *, pad_id: int, max_length: int, is_regression: bool
    ) -> None:
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_length)
        tokenizer.encode_special_tokens = True  # a text that speaks of </s> does not bring the token in
        texts = list(zip(rows.texts_a, rows.texts_b, strict=True)) if rows.texts_b else list(rows.texts_a)
        encodings = tokenizer.encode_batch(texts)
        self._ids = [encoding.ids for encoding in encodings]
        self._types = [encoding.type_ids for encoding in encodings]
        self._pad_id = pad_id
        self.lengths_N = np.array([len(ids) for ids in self._ids])
        self.labels_N = np.array(rows.labels, dtype=np.float32 if is_regression else np.int64)

    def __len__(self) -> int:
        return len(self._ids)

    def packed(self, rows_B: Array, blocks: Blocks, shares: int) -> Packed:
        """These rows, which fit into the blocks of each share; -1 only fills the batch, with the shortest row."""
        filled_B = np.where(rows_B < 0, self.lengths_N.argmin(), rows_B)
        # (block, share, row of the block) to (share, block, row): each share has its part of every block.
        ends = shares * np.cumsum([rows for rows, _ in blocks])
        order_GN = np.concatenate(
            [part.reshape(shares, -1) for part in np.split(np.arange(len(rows_B)), ends[:-1])], axis=1
        )
        begins_N = np.cumsum([0, *row_lengths(blocks)])
        ids_GT = np.full((shares, begins_N[-1]), self._pad_id, dtype=np.int64)
        mask_GT, types_GT, places_GT = np.zeros_like(ids_GT), np.zeros_like(ids_GT), np.zeros_like(ids_GT)
        for share, order_N in enumerate(order_GN):
            for begin, row in zip(begins_N[:-1], filled_B[order_N], strict=True):
                ids = self._ids[row]
                tokens = slice(begin, begin + len(ids))
                ids_GT[share, tokens], types_GT[share, tokens] = ids, self._types[row]
                mask_GT[share, tokens], places_GT[share, tokens] = 1, range(len(ids))
        return Packed(
            ids_GT=ids_GT,
            mask_GT=mask_GT,
            types_GT=types_GT,
            places_GT=places_GT,
            labels_GN=self.labels_N[filled_B[order_GN]],
            rows_GN=rows_B[order_GN],
            blocks=blocks,
        )


def choose_lengths(lengths_N: Array, limit: int, multiple: int) -> list[int]:
    """At most `limit` lengths to pad to, multiples of `multiple`, the last as long as the longest row: those that pad
    the fewest tokens, found over all ways to divide the lengths that occur."""
    needed = -(-lengths_N // multiple) * multiple
    values, counts = np.unique(needed, return_counts=True)
    total = np.concatenate([[0], np.cumsum(counts)])
    best = np.where(np.arange(len(values) + 1) == 0, 0.0, np.inf)
    cuts = []
    for _ in range(min(limit, len(values))):
        # [end, begin]: the tokens of rows `begin` to `end` padded to the length of the last of them.
        cost = best[None, :] + values[:, None] * (total[1:, None] - total[None, :])
        cost[np.arange(len(values) + 1)[None, :] > np.arange(len(values))[:, None]] = np.inf
        cuts.append(cost.argmin(axis=1))
        best = np.concatenate([[np.inf], cost.min(axis=1)])
    chosen, end = [], len(values)
    for cut in reversed(cuts):
        if end == 0:
            break
        chosen.append(int(values[end - 1]))
        end = int(cut[end - 1])
    return sorted(chosen)


def make_blocks(longest_B: Array, limit: int, shares: int = 1, multiple: int = 1) -> Blocks:
    """Blocks of at most `limit` lengths for each of `shares` that are equal. longest_B: what the batch's rows are at
    most, in this order."""
    longest_N = longest_B.reshape(-1, shares).max(axis=1)
    lengths = choose_lengths(longest_N, limit, multiple)
    counts = np.bincount(np.searchsorted(lengths, longest_N), minlength=len(lengths))
    return tuple((int(count), length) for count, length in zip(counts, lengths, strict=True))


def row_lengths(blocks: Blocks) -> list[int]:
    """What each row is padded to."""
    return [length for rows, length in blocks for _ in range(rows)]


def in_order(rows_N: Array, values_N: Array) -> Array:
    """The values of all held-out rows in the rows' order; those of rows that only fill a batch are left out."""
    order = np.argsort(rows_N, kind="stable")[(rows_N < 0).sum() :]
    ordered_N: Array = values_N[order]
    return ordered_N


class PackedBatches:
    """The training rows step by step, and the held-out rows once through, every batch in the same blocks.

    A batch's n-th row is one of the n-th part of the rows. The parts are cut from all rows, the shortest first. So a
    batch's n-th row is never longer than the n-th part's longest, and a few lengths pad all batches a little.
    blocks, held_out_blocks: of each share.
    """

    def __init__(
        self,
        train: Encoded,
        held_out: Encoded,
        *,
        batch_size: int,
        lengths: int,
        seed: int,
        shares: int,
        multiple: int,
    ) -> None:
        self._train, self._held_out, self._batch_size, self._seed = train, held_out, batch_size, seed
        self._shares = shares
        self.steps_per_epoch = len(train) // batch_size
        # Some rows are left out in each epoch. If they are all short, those of the n-th part are so much longer.
        last_B = np.arange(1, batch_size + 1) * self.steps_per_epoch - 1 + len(train) % batch_size
        self.blocks = make_blocks(np.sort(train.lengths_N)[last_B], lengths, shares, multiple)
        by_length = np.argsort(held_out.lengths_N, kind="stable")
        fill = np.full(-len(held_out) % batch_size, -1)
        self._held_out_BE = np.concatenate([fill, by_length]).reshape(batch_size, -1)
        longest_B = held_out.lengths_N[self._held_out_BE[:, -1]]
        self.held_out_blocks = make_blocks(longest_B, lengths, shares, multiple)

    def described(self) -> str:
        """For the log: how many rows there are, and what is padded."""
        return (
            f"{len(self._train):,} rows to learn from, {len(self._held_out):,} held out; padded to "
            f"{', '.join(map(str, self.lengths))} tokens, {self.padding:.1%} of them padding"
        )

    @property
    def lengths(self) -> list[int]:
        """What the rows of a batch are padded to."""
        return [length for _, length in self.blocks]

    @property
    def padding(self) -> float:
        """Share of an epoch's tokens that are padding."""
        real = int(self._train.lengths_N[self._epoch(0)].sum())
        return 1 - real / (self.tokens_per_step * self.steps_per_epoch)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a batch, padding among them."""
        return self._shares * sum(row_lengths(self.blocks))

    def step(self, step: int) -> Packed:
        """The batch of a step, from 1."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        return self._train.packed(self._epoch(epoch)[place], self.blocks, self._shares)

    def held_out(self) -> Iterator[Packed]:
        """All held-out rows; each batch has some of every length, and the first ones are filled up."""
        for rows_B in self._held_out_BE.T:
            yield self._held_out.packed(rows_B, self.held_out_blocks, self._shares)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - there is one of these in a process
    def _epoch(self, epoch: int) -> Array:
        """The rows of an epoch's batches, (steps, rows of a batch) from short to long, drawn from (seed, epoch).

        The last few rows of a permutation are left out, others in each epoch.
        """
        random = np.random.Generator(np.random.Philox(key=[self._seed, epoch]))
        order = random.permutation(len(self._train))[: self.steps_per_epoch * self._batch_size]
        by_length = order[np.argsort(self._train.lengths_N[order], kind="stable")]
        batches: Array = random.permuted(by_length.reshape(self._batch_size, -1), axis=1).T
        return batches
