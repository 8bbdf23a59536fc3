"""The shards of `--data`: their index, whether they are whole, and which of them a host reads.

Light: the launching side calls `problems` before anything is started, and nothing here needs TensorFlow.

A shard is a TFRecord file of tf.train.Example with `image/encoded` (JPEG or PNG) and `image/class/label`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from contracts.errors import RequestError, noted_in
from contracts.files import is_url
from jobs.runtime.storage.bucket_files import open_url
from jobs.tf_images.config import Config

DIGITS = "digits"
INDEX = "index.json"
INDEX_VERSION = 1
SPLITS = ("train", "eval")
DEFAULT_SIZE = 224
HEADER = struct.Struct("<QI")
FOOTER = struct.Struct("<I")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """One file. counts: records of each class. size_bytes: that it should have."""

    name: str
    split: str
    size_bytes: int
    sha256: str
    counts: tuple[int, ...]

    @property
    def records(self) -> int:
        return sum(self.counts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
    """What a folder of shards has in it. size: side of all its pictures, which are squares; None: they differ.
    channels: 1 where all are grey, else 3."""

    place: str
    labels: tuple[str, ...]
    size: int | None
    channels: int
    shards: tuple[Shard, ...]

    def split_shards(self, split: str) -> tuple[Shard, ...]:
        return tuple(shard for shard in self.shards if shard.split == split)

    def counts(self, split: str) -> tuple[int, ...]:
        """Records of each class in a split."""
        return tuple(map(sum, zip(*(shard.counts for shard in self.split_shards(split)), strict=True)))

    @property
    def fingerprint(self) -> str:
        """A sha256 of all that training and evaluation read."""
        described = [
            self.labels,
            self.size,
            self.channels,
            [dataclasses.astuple(shard) for shard in self.shards],
        ]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()

    def baseline(self) -> float:
        """The share of the most frequent class among the held-out pictures."""
        counts = self.counts("eval")
        return max(counts) / sum(counts)


def problems(config: Config, cache_dir: Path) -> list[str]:  # noqa: ARG001 - as every job's
    """What is wrong with the shards; called before anything is started.

    Raises:
        Unreachable: a place does not answer now.
    """
    messages: list[str] = []
    if config.data != DIGITS:  # made by the job itself
        with noted_in(messages):
            read_index(config.data)
    return messages


def read_index(place: str) -> Index:
    """The index of a folder of shards, once it is sure that these are as long as it says.

    Raises:
        RequestError: there is none, or shards are missing or cut off; all of them are named.
    """
    place = place.rstrip("/")
    if is_url(place) and not place.startswith("gs://"):
        raise RequestError(
            f"--data {place}: TensorFlow reads shards from a folder or from gs://…; copy them there"
        )
    file_system, folder = open_url(place, option="--data")
    try:
        content = json.loads(file_system.cat_file(f"{folder}/{INDEX}"))
        if content["version"] != INDEX_VERSION:
            raise RequestError(
                f"--data {place}: {INDEX} is of version {content['version']}, and this code reads {INDEX_VERSION}; "
                "make the shards again with `python -m jobs.tf_images.shards`"
            )
        shards = tuple(Shard(**{**entry, "counts": tuple(entry["counts"])}) for entry in content["shards"])
        index = Index(
            place=place,
            labels=tuple(content["labels"]),
            size=content["size"],
            channels=content["channels"],
            shards=shards,
        )
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise RequestError(
            f"--data {place}: has no {INDEX}; make shards of a folder of pictures with `python -m jobs.tf_images."
            f"shards FOLDER {place}`, or bring them here; digits needs nothing"
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(
            f"--data {place}: {INDEX} is damaged ({type(error).__name__}: {error}); make the shards again"
        ) from None
    sizes = {entry["name"].rpartition("/")[2]: entry["size"] for entry in file_system.ls(folder, detail=True)}
    wrong = []
    for shard in index.shards:
        size = sizes.get(shard.name)
        if size is None:
            wrong.append(f"--data {place}/{shard.name}: is missing; bring it here, or make the shards again")
        elif size != shard.size_bytes:
            with file_system.open(f"{folder}/{shard.name}", "rb") as file:
                at = first_damaged(file) or f"record {shard.records}: there are more than {INDEX} says"
            wrong.append(
                f"--data {place}/{shard.name}: has {size:,} bytes of {shard.size_bytes:,}; {at}; bring the whole file, "
                "or make the shards again"
            )
    if wrong:
        raise RequestError("\n".join(wrong))
    empty = [split for split in SPLITS if not sum(index.counts(split))] if index.shards else list(SPLITS)
    if empty:
        raise RequestError(
            f"--data {place}: has no pictures to {'learn from' if empty[0] == 'train' else 'evaluate on'}; make the "
            "shards again with more pictures, or another --eval-fraction"
        )
    return index


def verified(index: Index, damaged: str) -> dict[str, int]:
    """Of each shard how many records are whole, from its beginning on, by checksums; all are read.

    Raises:
        RequestError: some shard is damaged, and `damaged` is "refuse".
    """
    file_system, folder = open_url(index.place, option="--data")
    records, wrong = {}, []
    for shard in index.shards:
        with file_system.open(f"{folder}/{shard.name}", "rb") as file:
            good = 0
            for problem in _walk(file):
                if problem is not None:
                    wrong.append(f"--data {index.place}/{shard.name}: {problem}")
                    break
                good += 1
        records[shard.name] = good
    if wrong and damaged == "refuse":
        wrong.append(
            "bring whole files, make the shards again, or leave out what is damaged with --damaged skip"
        )
        raise RequestError("; ".join(wrong))
    for line in wrong:
        print(f"{line}; left out from there on", flush=True)
    return records


def first_damaged(file: IO[bytes]) -> str | None:
    """The first damaged record of a shard, from 0, or None where all are whole."""
    return next((problem for problem in _walk(file) if problem is not None), None)


def _walk(file: IO[bytes]) -> Iterator[str | None]:
    """None for each complete record; the problem of the first damaged one."""
    from google_crc32c import value

    number = at = 0
    while header := file.read(HEADER.size):
        place = f"record {number} (byte {at:,})"
        if len(header) < HEADER.size:
            yield f"{place} is cut off"
            return
        length, checksum = HEADER.unpack(header)
        if masked(value(header[:8])) != checksum:
            yield f"{place} is damaged: its length fails its checksum"
            return
        data = file.read(length + FOOTER.size)
        if len(data) < length + FOOTER.size:
            yield f"{place} is cut off"
            return
        if masked(value(data[:-4])) != FOOTER.unpack(data[-4:])[0]:
            yield f"{place} is damaged: its data fails its checksum"
            return
        yield None
        number, at = number + 1, at + HEADER.size + len(data)


def masked(crc: int) -> int:
    """TFRecord's form of a CRC-32C (tensorflow/core/lib/hash/crc32c.h)."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What one host reads of a split: `names`, and of their records every `every`-th from `first` on."""

    names: tuple[str, ...]
    stride: int
    first: int


def choose_part(shards: Sequence[Shard], *, host: int, hosts: int) -> Part:
    """Whole shards where their number divides the hosts, as then each reads its own; else records of all."""
    names = tuple(shard.name for shard in shards)
    if hosts > 1 and len(shards) % hosts == 0:
        return Part(names=names[host::hosts], stride=1, first=0)
    return Part(names=names, stride=hosts, first=host)
