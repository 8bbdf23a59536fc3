"""Turns a corpus into two files of token ids and their meta.json, in bounded memory.

One thread encodes a batch with all of the library's own threads, while this one reads the next and writes the last.

A journal says how far the files have come: the next call continues the work of one that was killed, and the files are
the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from contracts import atomic
from jobs.flax_mlm.corpus import SPLITS, Corpus, Split, split_documents
from jobs.flax_mlm.tokenizer import TokenizerFacts, load_tokenizer, open_tokenizer

META = "meta.json"
WARNINGS = "warnings.json"
"""The warnings of the preparation, a list of texts: repeated in every run that uses the files."""
JOURNAL = "journal.json"
FORMAT = 1
"""Part of every key and of meta.json: raised when the same corpus gives other files."""
NOTE_CHARACTERS = 64_000_000
"""At most this much is repeated when the work is resumed: some seconds of two cores."""
SAY_PERIOD_S = 20.0
BATCH_CHARACTERS = 2_000_000
"""Encoded at once: some 500,000 tokens, which take the tokenizers library about 120 MB."""
PIECE_CHARACTERS = 500_000
"""A longer document is encoded in pieces, so that threads share it and a batch is only so much longer."""

type Dtype = Literal["<u2", "<u4"]
"""As numpy and meta.json write it; every machine that JAX runs on is little-endian."""

_TYPECODES = {"<u2": "H", "<u4": "I"}
_JOURNAL_VERSION = 2


def tokenise(
    corpus: Corpus, facts: TokenizerFacts, eval_fraction: float, directory: Path, say: Callable[[str], None]
) -> None:
    """Write train.bin, eval.bin and meta.json into `directory`, continuing what a killed call has left there.

    Raises:
        RequestError: the corpus cannot be read, or gives nothing for one of the two splits.
        OSError: the disk is full, above all.
    """
    if not is_whole(directory):  # else killed between the last line below and whatever the caller does then
        warnings: list[str] = []
        meta = _write(corpus, facts, eval_fraction, directory, say, warnings.append)
        atomic.write(directory / WARNINGS, json.dumps(warnings, indent=2) + "\n")
        atomic.write(directory / META, json.dumps(meta, indent=2) + "\n")
    (directory / JOURNAL).unlink(missing_ok=True)


def is_whole(directory: Path) -> bool:
    """Whether the files are as long as meta.json says."""
    try:
        meta = json.loads((directory / META).read_bytes())
        width = int(meta["dtype"][-1])
        return all(
            (directory / f"{split}.bin").stat().st_size == meta[split]["tokens"] * width for split in SPLITS
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write(
    corpus: Corpus,
    facts: TokenizerFacts,
    eval_fraction: float,
    directory: Path,
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> dict[str, object]:
    """Write the two files; returns the content of meta.json."""
    dtype: Dtype = "<u2" if facts.vocab_size <= 1 << 16 else "<u4"
    with contextlib.ExitStack() as files:
        streams = {split: files.enter_context(Stream(directory / f"{split}.bin")) for split in SPLITS}
        _go_on(directory, streams)
        done_before = documents_in(streams)
        behind = f", going on after {done_before:,} documents" if done_before else ""
        say(f"tokenising {corpus.source}{behind}")
        # Documents that are done are read once more and not encoded (5 ms instead of 220 a million characters): so
        # the split's rules, and what is said of damaged text, hold for the whole corpus.
        todo = batches(split_documents(corpus, eval_fraction, warn=warn), skip=done_before)
        started_s = said_s = time.monotonic()
        characters = noted = 0
        for batch, ids in encoded(todo, Encoder(facts.path, dtype)):
            for split, stream in streams.items():
                stream.write(ids[split], batch.documents(split))
            characters += batch.characters
            now_s = time.monotonic()
            if batch.ends_whole and characters - noted >= NOTE_CHARACTERS:
                _note(directory, streams)
                noted = characters
            if now_s - said_s >= SAY_PERIOD_S:
                pace = characters / (now_s - started_s) / 1e6
                say(
                    f"tokenising {corpus.source}: {characters / 1e6:,.0f} million characters so far, {pace:.1f} "
                    f"million a second ({corpus.size_bytes / 1e6:,.0f} MB of files)"
                )
                said_s = now_s
        _note(directory, streams)
        seconds = time.monotonic() - started_s
        say(
            f"tokenised {characters:,} characters of {corpus.source}: {documents_in(streams) - done_before:,} "
            f"documents in {seconds:.1f} s"
        )
        return {
            "version": FORMAT,
            "corpus": corpus.fingerprint,
            "tokenizer": facts.sha256,
            "vocab_size": facts.vocab_size,
            "eval_fraction": eval_fraction,
            "dtype": dtype,
            **{split: stream.described(int(dtype[-1])) for split, stream in streams.items()},
        }


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    split: Split
    text: str
    begins: bool
    ends: bool


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Pieces in the order of the corpus, encoded at once: what bounds memory."""

    pieces: tuple[Piece, ...]

    @property
    def characters(self) -> int:
        return sum(len(piece.text) for piece in self.pieces)

    @property
    def ends_whole(self) -> bool:
        """Whether its last document is whole: only then can the work be continued after it."""
        return self.pieces[-1].ends

    def documents(self, split: Split) -> int:
        """How many documents of `split` end here."""
        return sum(piece.ends for piece in self.pieces if piece.split == split)


def batches(documents: Iterable[tuple[Split, str]], *, skip: int = 0) -> Iterator[Batch]:
    """Yield all documents but the first `skip` in batches; the batch a document is in has no bearing on its tokens."""
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
    """Yield `text` in pieces of at most PIECE_CHARACTERS, cut before a single space between two words.

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
    while (place := text.rfind(" ", lowest + 1, place + 1)) != -1:
        if text[place - 1].isalnum() and text[place + 1 : place + 2].isalnum():
            return place
        place -= 1
    return highest


class Encoder:
    """The tokenizer, and how ids are stored."""

    def __init__(self, tokenizer: Path, dtype: Dtype) -> None:
        facts = load_tokenizer(tokenizer)
        self._bos, self._eos = facts.bos_id, facts.eos_id
        self._tokenizer = open_tokenizer(tokenizer)
        self._typecode = _TYPECODES[dtype]

    def encode(self, batch: Batch) -> dict[Split, bytes]:
        """What a batch adds to each stream: documents as `<s> document </s>`, and of a piece only its part of that.

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
        return {split: stream.tobytes() for split, stream in streams.items()}


def encoded(batches: Iterable[Batch], encoder: Encoder) -> Iterator[tuple[Batch, dict[Split, bytes]]]:
    """Yield each batch with its tokens, in order; while one is used, the next is encoded."""
    under_way: tuple[Batch, Future[dict[Split, bytes]]] | None = None
    with ThreadPoolExecutor(1, "tokenise") as thread:
        for batch in batches:
            before, under_way = under_way, (batch, thread.submit(encoder.encode, batch))
            if before is not None:
                yield before[0], before[1].result()
        if under_way is not None:
            yield under_way[0], under_way[1].result()


class Stream:
    """One split's file. documents: those in it."""

    def __init__(self, path: Path) -> None:
        self.documents = 0
        self._file = path.open("r+b" if path.exists() else "w+b")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def size_bytes(self) -> int:
        return self._file.tell()

    def cut(self, documents: int, size_bytes: int) -> None:
        """Go on after so many documents, which take so many bytes."""
        self._file.seek(size_bytes)
        self._file.truncate()
        self.documents = documents

    def write(self, content: bytes, documents: int) -> None:
        """Add tokens in which `documents` documents end."""
        self._file.write(content)
        self.documents += documents

    def flush(self) -> None:
        """Make what was written outlast a power cut."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def described(self, width: int) -> dict[str, Any]:
        """What meta.json says of it. width: bytes of a token."""
        tokens = self.size_bytes // width
        self._file.seek(0)
        digest = hashlib.file_digest(self._file, "sha256").hexdigest()
        return {"documents": self.documents, "tokens": tokens, "sha256": digest}


def documents_in(streams: Mapping[Split, Stream]) -> int:
    """How many documents of the corpus are done: the first ones."""
    return sum(stream.documents for stream in streams.values())


def _note(directory: Path, streams: Mapping[Split, Stream]) -> None:
    """Note in the journal that a later writer can continue here. To be called where all documents are whole."""
    for stream in streams.values():
        stream.flush()
    noted: dict[str, Any] = {s: [stream.documents, stream.size_bytes] for s, stream in streams.items()}
    atomic.write_json(directory / JOURNAL, {"version": _JOURNAL_VERSION, **noted})


def _go_on(directory: Path, streams: Mapping[Split, Stream]) -> None:
    """Cut the files to what the journal says of them; to nothing where there is none, or it is not of them."""
    try:
        journal = json.loads((directory / JOURNAL).read_bytes())
        noted = {split: journal[split] for split in streams if journal["version"] == _JOURNAL_VERSION}
        for split, stream in streams.items():
            if (directory / f"{split}.bin").stat().st_size < noted[split][1]:
                raise ValueError
            stream.cut(*noted[split])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        for stream in streams.values():
            stream.cut(0, 0)
