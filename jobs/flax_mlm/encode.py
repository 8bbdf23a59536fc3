"""Batches to token ids, in this process or in one that is asked through its standard input and output.

The program of that process: `python -P -m jobs.flax_mlm.encode TOKENIZER_JSON DTYPE`. It ends when its input does.
"""

from __future__ import annotations

import signal
import struct
import sys
from array import array
from pathlib import Path
from typing import IO, Literal, NamedTuple

from jobs.flax_mlm.batches import Batch, Piece
from jobs.flax_mlm.split import SPLITS
from jobs.flax_mlm.tokenizer import load_tokenizer, open_tokenizer

type Dtype = Literal["<u2", "<u4"]
"""As numpy and meta.json write it; every machine that JAX runs on is little-endian."""

_TYPECODES = {"<u2": "H", "<u4": "I"}
_COUNT = struct.Struct("<I")
_ANSWER = struct.Struct("<QQ")
_EVAL, _BEGINS, _ENDS = 1, 2, 4


class Encoded(NamedTuple):
    """What a batch adds to the two streams."""

    train: bytes
    eval: bytes


class Encoder:
    """The tokenizer, and how ids are stored."""

    def __init__(self, tokenizer: Path, dtype: Dtype) -> None:
        facts = load_tokenizer(tokenizer)
        self._bos, self._eos = facts.bos_id, facts.eos_id
        self._tokenizer = open_tokenizer(tokenizer)
        self._typecode = _TYPECODES[dtype]

    def encode(self, batch: Batch) -> Encoded:
        """`<s> document </s>` for each document; of a piece only what it has of these.

        Raises:
            OverflowError: an id does not fit.
        """
        texts = [piece.text for piece in batch.pieces]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        streams = {split: array(self._typecode) for split in SPLITS}
        for piece, encoding in zip(batch.pieces, encodings, strict=True):
            stream = streams[piece.split]
            if piece.begins:
                stream.append(self._bos)
            stream.fromlist(encoding.ids)
            if piece.ends:
                stream.append(self._eos)
        return Encoded(streams["train"].tobytes(), streams["eval"].tobytes())


def question(batch: Batch) -> bytes:
    """A batch as bytes: the number of pieces, each one's length in bytes, each one's flags, the texts."""
    texts = [piece.text.encode() for piece in batch.pieces]
    flags = bytes(
        _EVAL * (piece.split == "eval") | _BEGINS * piece.begins | _ENDS * piece.ends
        for piece in batch.pieces
    )
    lengths = array("I", map(len, texts)).tobytes()
    return b"".join([_COUNT.pack(len(texts)), lengths, flags, *texts])


def read_question(stream: IO[bytes]) -> Batch | None:
    """The next batch; None where the stream has ended."""
    head = stream.read(_COUNT.size)
    if not head:
        return None
    (count,) = _COUNT.unpack(head)
    lengths = array("I", _exactly(stream, count * 4))
    flags = _exactly(stream, count)
    return Batch(
        pieces=tuple(
            Piece(
                split="eval" if flag & _EVAL else "train",
                text=_exactly(stream, length).decode(),
                begins=bool(flag & _BEGINS),
                ends=bool(flag & _ENDS),
            )
            for length, flag in zip(lengths, flags, strict=True)
        )
    )


def answer(encoded: Encoded) -> bytes:
    return _ANSWER.pack(len(encoded.train), len(encoded.eval)) + encoded.train + encoded.eval


def read_answer(stream: IO[bytes]) -> Encoded:
    """The next answer.

    Raises:
        EOFError: the process has ended.
    """
    lengths = _ANSWER.unpack(_exactly(stream, _ANSWER.size))
    return Encoded(*(_exactly(stream, length) for length in lengths))


def _exactly(stream: IO[bytes], size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise EOFError(f"ended after {len(content)} of {size} bytes")
    return content


def serve(tokenizer: Path, dtype: Dtype) -> None:
    """Answer every batch on standard input, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks; this process ends with its input
    encoder = Encoder(tokenizer, dtype)
    while (batch := read_question(sys.stdin.buffer)) is not None:
        sys.stdout.buffer.write(answer(encoder.encode(batch)))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), "<u2" if sys.argv[2] == "<u2" else "<u4")
