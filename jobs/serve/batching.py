"""Rows of many requests as batches of a few static shapes.

A batch begins as soon as the model is free, with the rows that wait then; the next one gathers while it computes.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import math
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jobs.runtime.prediction import Predictor, Row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """sizes: numbers of rows; lengths: of positions; both ascending. A batch has one of each."""

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def all(self) -> list[tuple[int, int]]:
        return [(size, length) for length in self.lengths for size in self.sizes]

    def length(self, needed: int) -> int:
        """Return the shortest length that has room for a row."""
        return next(length for length in self.lengths if length >= needed)

    def size(self, rows: int) -> int:
        return next(size for size in self.sizes if size >= rows)


def choose(waiting: Sequence[int], shapes: Shapes) -> tuple[list[int], int, int]:
    """Choose the next batch of rows that wait, of which the lengths are given, oldest first; at least one waits.

    The oldest row is in it, and decides the length. Others of the same padded length follow, then shorter ones where
    the batch is filled up in any case: they cost nothing there, and in a batch of their own they cost less.

    Returns: the places of the chosen rows, oldest first; the batch's size and length.
    """
    length = shapes.length(waiting[0])
    padded = [shapes.length(row_length) for row_length in waiting]
    same = [place for place, padded_length in enumerate(padded) if padded_length == length][
        : shapes.sizes[-1]
    ]
    size = shapes.size(len(same))
    shorter = [place for place, padded_length in enumerate(padded) if padded_length < length][
        : size - len(same)
    ]
    return sorted(same + shorter), size, length


class BatchingEndedError(Exception):
    """No more rows are computed: the batcher has ended with an error of its own."""


class Full(Exception):
    """Too many rows wait. retry_after_s: when there may be room again."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__("too many rows wait")
        self.retry_after_s = retry_after_s


@dataclasses.dataclass(kw_only=True)
class Waiting:
    """A row that waits for its output, which `output` takes."""

    row: Row
    output: asyncio.Future[Any]
    since_s: float = dataclasses.field(default_factory=time.monotonic)

    def settle(self, output: Any) -> None:
        """Answer with an output, or raise an error where it is awaited, unless it was given up."""
        if self.output.done():
            return
        if isinstance(output, Exception):
            self.output.set_exception(output)
        else:
            self.output.set_result(output)


Observe = Callable[[int, int, int, float, float], None]
"""Called after each batch: rows, size, length, seconds that its oldest row has waited, seconds of computing."""


class Batcher:
    """Computes rows in batches, one at a time, in a thread. All else happens in the event loop that `run` is in."""

    def __init__(self, predictor: Predictor, shapes: Shapes, *, most_waiting: int, observe: Observe) -> None:
        self._predictor, self.shapes = predictor, shapes
        self.most_waiting, self._observe = most_waiting, observe
        self._waiting: collections.deque[Waiting] = collections.deque()
        self._some = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._row_s = 0.0
        self.busy_since_s: float | None = None
        """When the batch that is computed now began (monotonic); None: the model is free."""
        self.failure: BaseException | None = None
        """Why the batcher has ended, if it has: no row is computed any more."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def compute(self, rows: Sequence[Row]) -> list[Any]:
        """Return what the model says of each row.

        Raises:
            Full: there is no room for so many.
            BatchingEndedError: none is computed any more.
            Exception: what the model raised for one of these rows.
        """
        if self.failure is not None:
            raise BatchingEndedError
        if len(self._waiting) + len(rows) > self.most_waiting:
            raise Full(max(1, math.ceil(self._row_s * len(self._waiting))))
        loop = asyncio.get_running_loop()
        mine = [Waiting(row=row, output=loop.create_future()) for row in rows]
        self._waiting += mine
        self._some.set()
        try:
            return [await row.output for row in mine]
        finally:
            for row in mine:
                if not row.output.cancel() and not row.output.cancelled():
                    row.output.exception()  # asyncio logs what nobody has looked at
            if any(row.output.cancelled() for row in mine):
                # Who gives up takes the rows along: while the model is busy, they would keep others out.
                self._waiting = collections.deque(row for row in self._waiting if not row.output.done())

    async def run(self) -> None:
        """Compute what comes, until it is cancelled. An error that is not a row's ends it: see `failure`."""
        batch: list[Waiting] = []
        try:
            while True:
                while not self._waiting:
                    self._some.clear()
                    await self._some.wait()
                taken = self._take()
                if taken is None:
                    continue
                batch, size, length = taken
                began_s = self.busy_since_s = time.monotonic()
                for row, output in zip(batch, await self._outputs(batch, size, length), strict=True):
                    row.settle(output)
                took_s, self.busy_since_s = time.monotonic() - began_s, None
                self._row_s = (
                    0.9 * self._row_s + 0.1 * took_s / len(batch) if self._row_s else took_s / len(batch)
                )
                waited_s = began_s - min(row.since_s for row in batch)
                self._observe(len(batch), size, length, waited_s, took_s)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            traceback.print_exc()
            self.failure = error
            for row in [*batch, *self._waiting]:
                row.settle(BatchingEndedError())
            raise

    async def _outputs(self, batch: Sequence[Waiting], size: int, length: int) -> Sequence[Any]:
        """Return the output of each row, or what the model raised for it.

        Rows of a failed batch are computed one by one: only those that fail alone have failed.
        """
        rows = [entry.row for entry in batch]
        compute = functools.partial(self._predictor.compute, rows, size, length)
        try:
            outputs = await asyncio.get_running_loop().run_in_executor(self._thread, compute)
            if len(outputs) != len(rows):
                raise ValueError(f"{len(outputs)} outputs for {len(rows)} rows")
        except Exception as error:
            if len(rows) == 1:
                return [error]
            return [
                output
                for entry in batch
                for output in await self._outputs([entry], self.shapes.sizes[0], length)
            ]
        return outputs

    def _take(self) -> tuple[list[Waiting], int, int] | None:
        """Take the rows of the next batch out of those that wait; None: all that waited have given up."""
        waiting = [row for row in self._waiting if not row.output.done()]
        if not waiting:
            self._waiting.clear()
            return None
        places, size, length = choose([row.row.length for row in waiting], self.shapes)
        chosen = {*places}
        self._waiting = collections.deque(row for place, row in enumerate(waiting) if place not in chosen)
        return [waiting[place] for place in places], size, length
