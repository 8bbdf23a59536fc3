"""Documents cut and grouped into batches of bounded size: what is encoded at once, and so the bound on memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jobs.flax_mlm.split import Split

BATCH_CHARACTERS = 500_000
"""Encoded at once by one process: some 130,000 tokens, which take the tokenizers library about 30 MB."""
PIECE_CHARACTERS = 500_000
"""A longer document is encoded in pieces, so that a batch is never longer than two of these."""
_SPACE = " "


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    split: Split
    text: str
    begins: bool
    ends: bool


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Pieces in the order of the corpus."""

    pieces: tuple[Piece, ...]

    @property
    def characters(self) -> int:
        return sum(len(piece.text) for piece in self.pieces)

    @property
    def ends_whole(self) -> bool:
        """Whether its last document is whole: only then can the work be taken up again behind it."""
        return self.pieces[-1].ends

    def documents(self, split: Split) -> int:
        """How many documents of `split` end here."""
        return sum(piece.ends for piece in self.pieces if piece.split == split)


def batches(documents: Iterable[tuple[Split, str]], *, skip: int = 0) -> Iterator[Batch]:
    """All documents but the first `skip`. Which batch a document is in has no bearing on its tokens."""
    pieces: list[Piece] = []
    characters = 0
    for number, (split, text) in enumerate(documents):
        if number < skip:
            continue
        for piece in cut(split, text):
            pieces.append(piece)
            characters += len(piece.text)
            if characters >= BATCH_CHARACTERS:
                yield Batch(pieces=tuple(pieces))
                pieces, characters = [], 0
    if pieces:
        yield Batch(pieces=tuple(pieces))


def cut(split: Split, text: str) -> Iterator[Piece]:
    """`text` in pieces of at most PIECE_CHARACTERS, cut before a single space between two words.

    There the tokens of the pieces are those of the whole: a byte-level BPE as RoBERTa's never joins what stands
    before such a space to what stands behind it. A text without one in half a piece is cut where the piece is full.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = _place(text, start + PIECE_CHARACTERS // 2, start + PIECE_CHARACTERS)
        yield Piece(split, text[start:end], begins=start == 0, ends=False)
        start = end
    yield Piece(split, text[start:], begins=start == 0, ends=True)


def _place(text: str, lowest: int, highest: int) -> int:
    """The last place to cut in `lowest` < place <= `highest`."""
    place = highest
    while (place := text.rfind(_SPACE, lowest + 1, place + 1)) != -1:
        if text[place - 1].isalnum() and text[place + 1 : place + 2].isalnum():
            return place
        place -= 1
    return highest
