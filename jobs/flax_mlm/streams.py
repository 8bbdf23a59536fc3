"""The two files of token ids while they are written, and the journal from which a killed writer's work goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contracts.files import DiskFiles
from jobs.flax_mlm.encode import Encoded
from jobs.flax_mlm.split import SPLITS, Split

JOURNAL = "journal.json"

_VERSION = 1
_READ_BYTES = 1 << 22


class Torn(Exception):
    """What is there is not what the journal says."""


class Stream:
    """One split's file. `documents` and `size_bytes` are what has been written."""

    def __init__(self, path: Path, noted: Mapping[str, Any] | None) -> None:
        """Begin the file, or go on behind what was `noted` of it.

        Raises:
            Torn: it does not begin with that.
        """
        self.documents = self.size_bytes = 0
        self._digest = hashlib.sha256()
        self._file = path.open("r+b" if noted else "wb")
        if noted:
            try:
                self._take_up(noted)
            except BaseException:
                self._file.close()
                raise

    def _take_up(self, noted: Mapping[str, Any]) -> None:
        left: int = noted["size_bytes"]
        while left:
            content = self._file.read(min(_READ_BYTES, left))
            if not content:
                raise Torn
            self._digest.update(content)
            left -= len(content)
        if self._digest.hexdigest() != noted["sha256"]:
            raise Torn
        self._file.seek(noted["size_bytes"])
        self._file.truncate()
        self.size_bytes, self.documents = noted["size_bytes"], noted["documents"]

    def write(self, content: bytes, documents: int) -> None:
        """Add tokens in which `documents` documents end."""
        self._file.write(content)
        self._digest.update(content)
        self.size_bytes += len(content)
        self.documents += documents

    def flush(self) -> None:
        """Make what was written outlast a power cut."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def facts(self) -> dict[str, Any]:
        return {
            "documents": self.documents,
            "size_bytes": self.size_bytes,
            "sha256": self._digest.hexdigest(),
        }


class Streams:
    """train.bin and eval.bin in `directory`, as far as a former writer has come. To be used in a `with`.

    Raises (on opening):
        Torn: what the former writer left does not fit together; `clear` it and open again.
    """

    def __init__(self, directory: Path) -> None:
        noted = _journal(directory)
        self._directory = directory
        self._streams: dict[Split, Stream] = {}
        try:
            for split in SPLITS:
                self._streams[split] = Stream(directory / f"{split}.bin", noted and noted[split])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def documents(self) -> int:
        """How many documents of the corpus are done: the first ones."""
        return sum(stream.documents for stream in self._streams.values())

    def write(self, encoded: Encoded, *, train_documents: int, eval_documents: int) -> None:
        self._streams["train"].write(encoded.train, train_documents)
        self._streams["eval"].write(encoded.eval, eval_documents)

    def note(self) -> None:
        """From here a later writer goes on. To be called where all documents are whole."""
        journal: dict[str, Any] = {"version": _VERSION}
        for split, stream in self._streams.items():
            stream.flush()
            journal[split] = stream.facts()
        DiskFiles().write(str(self._directory / JOURNAL), json.dumps(journal).encode())

    def facts(self, width: int) -> dict[str, dict[str, Any]]:
        """Of each split what meta.json has, ids being `width` bytes wide."""
        return {
            split: {
                "documents": stream.documents,
                "tokens": stream.size_bytes // width,
                "sha256": stream.facts()["sha256"],
            }
            for split, stream in self._streams.items()
        }

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


def clear(directory: Path) -> None:
    """Remove the journal: the work begins anew."""
    (directory / JOURNAL).unlink(missing_ok=True)


def _journal(directory: Path) -> dict[str, Any] | None:
    try:
        content = (directory / JOURNAL).read_bytes()
    except FileNotFoundError:
        return None
    try:
        noted: dict[str, Any] = json.loads(content)
        if noted["version"] != _VERSION:
            raise Torn
        for split in SPLITS:
            _ = noted[split]["size_bytes"] + noted[split]["documents"], noted[split]["sha256"]
    except (ValueError, KeyError, TypeError):
        raise Torn from None
    if not all((directory / f"{split}.bin").exists() for split in SPLITS):
        raise Torn
    return noted
