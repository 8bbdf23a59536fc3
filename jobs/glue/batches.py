"""Rows as batches of a few shapes: padded (`Batches`), or one after the other (`PackedBatches`). What step t reads is a
function of (seed, t) only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from contracts.errors import RequestError
from jobs.glue.data import Dataset, Rows
from jobs.glue.options import Options

if TYPE_CHECKING:
    from tokenizers import Tokenizer

type Array = np.ndarray[Any, Any]

MULTIPLE = 8
"""Lengths are multiples of this, as wide as a vector of any device is."""


type Blocks = tuple[tuple[int, int], ...]
"""A batch's rows in their order: so many rows padded to such a length, then so many to a longer one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """ids_BS, mask_BS (1: a token, 0: padding), types_BS (which text of a pair, where the model asks): int64.
    labels_B: int64 classes or float32 numbers. rows_B: the rows' indices; -1: a row that only fills the batch."""

    ids_BS: Array
    mask_BS: Array
    types_BS: Array
    labels_B: Array
    rows_B: Array

    def share(self, rank: int, size: int) -> Batch:
        """The rows of one process of `size`, which take equal shares."""
        each = len(self.rows_B) // size
        mine = slice(rank * each, (rank + 1) * each)
        return Batch(**{name: values[mine] for name, values in vars(self).items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """A batch in `shares`, each of T tokens: its rows one after the other, those of a block padded to one length.

    ids_GT, mask_GT, types_GT, labels_GN, rows_GN: as in Batch. places_GT: each token's place in its row. blocks: of one
    share.
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
        each = len(self.rows_GN) // size
        arrays = {name: values for name, values in vars(self).items() if name != "blocks"}
        mine = {name: values[rank * each : (rank + 1) * each] for name, values in arrays.items()}
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
        told = tokenizer.encode_batch(texts)
        self._ids = [each.ids for each in told]
        self._types = [each.type_ids for each in told]
        self._pad_id = pad_id
        self.lengths_N = np.array([len(ids) for ids in self._ids])
        self.labels_N = np.array(rows.labels, dtype=np.float32 if is_regression else np.int64)

    def __len__(self) -> int:
        return len(self._ids)

    def batch(self, rows_B: Array, length: int) -> Batch:
        """These rows padded to one length; -1 only fills the batch, with the first row again."""
        filled_B = np.where(rows_B < 0, rows_B[0], rows_B)
        ids_BS = np.full((len(rows_B), length), self._pad_id, dtype=np.int64)
        mask_BS, types_BS = np.zeros_like(ids_BS), np.zeros_like(ids_BS)
        for place, row in enumerate(filled_B):
            ids = self._ids[row]
            ids_BS[place, : len(ids)] = ids
            mask_BS[place, : len(ids)] = 1
            types_BS[place, : len(ids)] = self._types[row]
        return Batch(
            ids_BS=ids_BS,
            mask_BS=mask_BS,
            types_BS=types_BS,
            labels_B=self.labels_N[filled_B],
            rows_B=rows_B,
        )

    def packed(self, rows_B: Array, blocks: Blocks, shares: int) -> Packed:
        """These rows, which fit into the blocks; -1 only fills the batch, with the shortest row."""
        filled_B = np.where(rows_B < 0, self.lengths_N.argmin(), rows_B)
        # (block, share, row of the block) to (share, block, row): each share has its part of every block.
        ends = np.cumsum([rows for rows, _ in blocks])
        order_GN = np.concatenate(
            [part.reshape(shares, -1) for part in np.split(np.arange(len(rows_B)), ends[:-1])], axis=1
        )
        own = tuple((rows // shares, length) for rows, length in blocks)
        begins_N = np.concatenate([[0], np.cumsum([length for rows, length in own for _ in range(rows)])])
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
            blocks=own,
        )


def choose_lengths(lengths_N: Array, most: int) -> list[int]:
    """At most `most` lengths to pad to, multiples of MULTIPLE, the last as long as the longest row: those that pad the
    fewest tokens, found over all ways to divide the lengths that occur."""
    needed = -(-lengths_N // MULTIPLE) * MULTIPLE
    values, counts = np.unique(needed, return_counts=True)
    total = np.concatenate([[0], np.cumsum(counts)])
    best = np.where(np.arange(len(values) + 1) == 0, 0.0, np.inf)
    cuts = []
    for _ in range(min(most, len(values))):
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


def make_blocks(longest_B: Array, most: int, shares: int) -> Blocks:
    """Blocks of at most `most` lengths for rows that are at most so long, in this order, each for equal `shares`."""
    longest_B = np.repeat(longest_B.reshape(-1, shares).max(axis=1), shares)
    lengths = choose_lengths(longest_B, most)
    counts = np.bincount(np.searchsorted(lengths, longest_B), minlength=len(lengths))
    return tuple((int(count), length) for count, length in zip(counts, lengths, strict=True))


def in_order(rows_N: Array, values_N: Array) -> Array:
    """The values of all held-out rows in the rows' order; those of rows that only fill a batch are left out."""
    order = np.argsort(rows_N, kind="stable")[(rows_N < 0).sum() :]
    found: Array = values_N[order]
    return found


def encode(options: Options, dataset: Dataset, tokenizer: Tokenizer, pad_id: int) -> tuple[Encoded, Encoded]:
    """The rows to learn from and those held out.

    Raises:
        RequestError: there are fewer rows to learn from than a batch has.
    """
    train, held_out = (
        Encoded(
            rows,
            tokenizer,
            pad_id=pad_id,
            max_length=options.max_length,
            is_regression=dataset.task == "regression",
        )
        for rows in (dataset.train, dataset.eval)
    )
    if len(train) < options.batch_size:
        raise RequestError(
            f"--batch-size {options.batch_size}: {options.data} has only {len(train)} rows to learn from"
        )
    return train, held_out


def make_batches(options: Options, dataset: Dataset, tokenizer: Tokenizer, pad_id: int) -> Batches:
    """The padded batches that the options ask for. Raises RequestError as `encode` does."""
    train, held_out = encode(options, dataset, tokenizer, pad_id)
    return Batches(train, held_out, batch_size=options.batch_size, lengths=options.lengths, seed=options.seed)


def pack_batches(
    options: Options, dataset: Dataset, tokenizer: Tokenizer, pad_id: int, shares: int
) -> PackedBatches:
    """The packed batches that the options ask for, each in so many shares. Raises RequestError as `encode` does."""
    train, held_out = encode(options, dataset, tokenizer, pad_id)
    return PackedBatches(
        train,
        held_out,
        batch_size=options.batch_size,
        lengths=options.lengths,
        seed=options.seed,
        shares=shares,
    )


class Batches:
    """The training rows step by step, and the held-out rows once through."""

    def __init__(
        self, train: Encoded, held_out: Encoded, *, batch_size: int, lengths: int, seed: int
    ) -> None:
        self._train, self._held_out, self._batch_size, self._seed = train, held_out, batch_size, seed
        self.lengths = choose_lengths(np.concatenate([train.lengths_N, held_out.lengths_N]), lengths)
        self.steps_per_epoch = len(train) // batch_size

    def described(self) -> str:
        """For the log: how many rows there are, and what is padded."""
        return (
            f"{len(self._train):,} rows to learn from, {len(self._held_out):,} held out; padded to "
            f"{', '.join(map(str, self.lengths))} tokens, {self.padding:.1%} of them padding"
        )

    @property
    def padding(self) -> float:
        """Share of an epoch's tokens that are padding."""
        padded = sum(length * len(rows_B) for length, rows_B in self._epoch(0))
        real = sum(int(self._train.lengths_N[rows_B].sum()) for _, rows_B in self._epoch(0))
        return 1 - real / padded

    @property
    def tokens_per_step(self) -> float:
        """Padded tokens, on the average."""
        return sum(length * len(rows_B) for length, rows_B in self._epoch(0)) / self.steps_per_epoch

    def step(self, step: int) -> Batch:
        """The batch of a step, from 1."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        length, rows_B = self._epoch(epoch)[place]
        return self._train.batch(rows_B, length)

    def held_out(self) -> Iterator[Batch]:
        """All held-out rows; the last batch of each length is filled up."""
        left = np.argsort(self._held_out.lengths_N, kind="stable")
        for length in self.lengths:
            mine = left[self._held_out.lengths_N[left] <= length]
            left = left[len(mine) :]
            for begin in range(0, len(mine), self._batch_size):
                rows_B = np.full(self._batch_size, -1)
                here = mine[begin : begin + self._batch_size]
                rows_B[: len(here)] = here
                yield self._held_out.batch(rows_B, length)

    def one_of_each(self) -> list[Batch]:
        """A batch of each length, of rows that fit, for what is compiled ahead."""
        shortest = np.full(self._batch_size, int(self._train.lengths_N.argmin()))
        return [self._train.batch(shortest, length) for length in self.lengths]

    @functools.lru_cache(maxsize=2)  # noqa: B019 - there is one of these in a process
    def _epoch(self, epoch: int) -> list[tuple[int, Array]]:
        """The batches of an epoch: a permutation drawn from (seed, epoch), its rows gathered by length.

        What does not fill a batch of its length goes into one of the next; the last few rows are left out, others in
        each epoch.
        """
        random = np.random.Generator(np.random.Philox(key=[self._seed, epoch]))
        order = random.permutation(len(self._train))
        bounds = np.searchsorted(self.lengths, self._train.lengths_N[order])
        found: list[tuple[int, Array]] = []
        left = np.array([], dtype=order.dtype)
        for index, length in enumerate(self.lengths):
            here = np.concatenate([left, order[bounds == index]])
            whole = len(here) // self._batch_size * self._batch_size
            found += [(length, rows_B) for rows_B in here[:whole].reshape(-1, self._batch_size)]
            left = here[whole:]
        return [found[index] for index in random.permutation(len(found))]


class PackedBatches:
    """As `Batches`, but every batch has the same blocks. Its n-th row is one of the n-th part of the rows.

    The parts are cut from all rows, the shortest first. So a batch's n-th row is never longer than the n-th part's
    longest, and a few lengths pad all batches a little. blocks: of a whole batch of training rows.
    """

    def __init__(
        self, train: Encoded, held_out: Encoded, *, batch_size: int, lengths: int, seed: int, shares: int
    ) -> None:
        self._train, self._held_out, self._batch_size, self._seed = train, held_out, batch_size, seed
        self._shares = shares
        self.steps_per_epoch = len(train) // batch_size
        # Some rows are left out in each epoch. If they are all short, those of the n-th part are so much longer.
        last_B = np.arange(1, batch_size + 1) * self.steps_per_epoch - 1 + len(train) % batch_size
        self.blocks = make_blocks(np.sort(train.lengths_N)[last_B], lengths, shares)
        by_length = np.argsort(held_out.lengths_N, kind="stable")
        fill = np.full(-len(held_out) % batch_size, -1)
        self._held_out_BE = np.concatenate([fill, by_length]).reshape(batch_size, -1)
        self._held_out_blocks = make_blocks(held_out.lengths_N[self._held_out_BE[:, -1]], lengths, shares)

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
        return sum(rows * length for rows, length in self.blocks)

    def step(self, step: int) -> Packed:
        """The batch of a step, from 1."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        return self._train.packed(self._epoch(epoch)[place], self.blocks, self._shares)

    def held_out(self) -> Iterator[Packed]:
        """All held-out rows; each batch has some of every length, and the first ones are filled up."""
        for rows_B in self._held_out_BE.T:
            yield self._held_out.packed(rows_B, self._held_out_blocks, self._shares)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - there is one of these in a process
    def _epoch(self, epoch: int) -> Array:
        """The rows of an epoch's batches, (steps, rows of a batch) from short to long, drawn from (seed, epoch).

        The last few rows of a permutation are left out, others in each epoch.
        """
        random = np.random.Generator(np.random.Philox(key=[self._seed, epoch]))
        order = random.permutation(len(self._train))[: self.steps_per_epoch * self._batch_size]
        by_length = order[np.argsort(self._train.lengths_N[order], kind="stable")]
        found: Array = random.permuted(by_length.reshape(self._batch_size, -1), axis=1).T
        return found
