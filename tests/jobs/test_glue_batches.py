"""Batches of rows: every row once in an epoch, little padding, the same rows for a step however it is reached."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from jobs.glue.batches import MULTIPLE, Encoded, Packed, PackedBatches, choose_lengths
from jobs.glue.data import Rows

PAD_ID = 7


VOCABULARY = Tokenizer(models.WordLevel({"word": 1}, unk_token="word"))
VOCABULARY.pre_tokenizer = pre_tokenizers.WhitespaceSplit()


def encoded(lengths: Sequence[int]) -> Encoded:
    rows = Rows(
        texts_a=tuple("word " * length for length in lengths),
        texts_b=(),
        labels=tuple(length % 2 for length in lengths),
    )
    return Encoded(rows, VOCABULARY, pad_id=PAD_ID, max_length=64, is_regression=False)


LENGTHS = st.lists(st.integers(1, 100), min_size=4, max_size=60)


@given(LENGTHS, st.integers(1, 5), st.sampled_from([1, MULTIPLE]))
def test_no_other_choice_of_lengths_pads_fewer_tokens(lengths: list[int], limit: int, multiple: int) -> None:
    lengths_N = np.array(lengths)
    chosen = choose_lengths(lengths_N, limit, multiple)
    assert len(chosen) <= limit and max(chosen) >= max(lengths)
    assert all(length % multiple == 0 for length in chosen)

    def padded(choice: Sequence[int]) -> int:
        return int(np.array(choice)[np.searchsorted(choice, lengths_N)].sum())

    possible = sorted({-(-length // multiple) * multiple for length in lengths})
    if limit >= 2:
        pairs = [[shorter, possible[-1]] for shorter in possible[:-1]] or [possible]
        assert padded(chosen) <= min(map(padded, pairs))
    if limit >= len(possible):
        assert chosen == possible


def make_batches(
    train: Sequence[int], held_out: Sequence[int] = (5,), *, size: int = 8, shares: int = 1, multiple: int = 1
) -> PackedBatches:
    return PackedBatches(
        encoded(train),
        encoded(held_out),
        batch_size=size,
        lengths=3,
        seed=1,
        shares=shares,
        multiple=multiple,
    )


def read_rows(batch: Packed) -> list[tuple[int, int]]:
    """Of each row in the batch its index and how many tokens are seen, which begin where the row does."""
    actual = []
    for share in range(len(batch.rows_GN)):
        row, begin = 0, 0
        for rows, length in batch.blocks:
            for _ in range(rows):
                place = slice(begin, begin + length)
                observed = int(batch.mask_GT[share, place].sum())
                assert batch.mask_GT[share, place].tolist() == [1] * observed + [0] * (length - observed)
                assert batch.places_GT[share, place].tolist() == [
                    *range(observed),
                    *[0] * (length - observed),
                ]
                assert (batch.ids_GT[share, place][observed:] == PAD_ID).all()
                actual.append((int(batch.rows_GN[share, row]), observed))
                row, begin = row + 1, begin + length
        assert (row, begin) == (batch.rows_GN.shape[1], batch.ids_GT.shape[1])
    return actual


@given(LENGTHS, st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_an_epoch_has_every_row_once_but_for_what_does_not_fill_a_batch(
    lengths: list[int], batch_size: int, epoch: int
) -> None:
    batches = make_batches(lengths, size=batch_size)
    actual = [
        batches.step(epoch * batches.steps_per_epoch + step + 1) for step in range(batches.steps_per_epoch)
    ]
    assert {batch.blocks for batch in actual} == {batches.blocks}  # one program takes them all
    assert len(batches.blocks) <= 3 and all(shorter < longer for shorter, longer in pairwise(batches.lengths))
    observed = [row for batch in actual for row in read_rows(batch)]
    assert len(observed) == len(dict(observed)) == len(lengths) // batch_size * batch_size
    assert all(tokens == min(lengths[row], 64) for row, tokens in observed)


def test_a_step_reads_the_same_rows_in_a_process_that_has_just_started() -> None:
    def start() -> PackedBatches:
        return make_batches(range(1, 60))

    walked = start()
    rows = [walked.step(step).rows_GN.tolist() for step in range(1, 31)]
    assert [start().step(step).rows_GN.tolist() for step in (1, 8, 30)] == [rows[0], rows[7], rows[29]]
    assert rows[:7] != rows[7:14]  # another order in the next epoch


@pytest.mark.parametrize("shares", [1, 2, 4])
def test_however_many_processes_share_a_batch_its_rows_are_the_same(shares: int) -> None:
    complete = make_batches(range(1, 60)).step(1)
    batch = make_batches(range(1, 60), shares=shares).step(1)
    parts = [batch.share(rank, shares) for rank in range(shares)]
    assert sorted(row for part in parts for row in read_rows(part)) == sorted(read_rows(complete))
    assert {(part.blocks, part.ids_GT.shape) for part in parts} == {
        (batch.blocks, (1, batch.ids_GT.shape[1]))
    }


@given(LENGTHS, st.sampled_from([1, 2, 7]))
def test_every_held_out_row_is_evaluated_once(lengths: list[int], batch_size: int) -> None:
    held_out = list(make_batches([3] * 8, lengths, size=batch_size).held_out())
    observed = [row for batch in held_out for row in read_rows(batch) if row[0] >= 0]
    assert sorted(observed) == [(row, min(length, 64)) for row, length in enumerate(lengths)]
    assert len({batch.blocks for batch in held_out}) == 1
