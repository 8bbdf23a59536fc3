"""Cuts the GPU's machine code out of a shared library that no GPU will ever run.

    python gpu_code.py libtorch_cuda.so

It is one section, .nv_fatbin, which only the CUDA runtime reads, to hand it to a device. All other code and data stay,
byte for byte and at their addresses: the segment that the section lies in is split in two, and the pages between are no
longer in the file nor in memory. Standard library alone, because it runs in the build of an image."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

SECTION = b".nv_fatbin"
PAGE_BYTES = 0x1000
COPY_BYTES = 16 << 20
LOAD, NOTE, NOBITS = 1, 4, 8
# ELF for 64 bits, least significant byte first (the System V ABI's "Object Files").
MAGIC = b"\x7fELF\x02\x01"
HEADER = struct.Struct("<32xQQ6xHHHHH")
SECTIONS_AT = struct.Struct("<40xQ")
PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")


class GpuCodeError(Exception):
    """The file is not laid out as expected; the message says what was found."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A program header, in the order of its fields."""

    kind: int
    flags: int
    offset: int
    address: int
    physical: int
    file_bytes: int
    memory_bytes: int
    alignment: int


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section header, in the order of its fields."""

    name: int
    kind: int
    flags: int
    address: int
    offset: int
    length: int
    link: int
    info: int
    alignment: int
    entry_bytes: int


@dataclass(frozen=True, kw_only=True)
class Hole:
    """Offsets in the file, of whole pages."""

    start: int
    end: int

    def moved(self, offset: int) -> int:
        """Where in the file that is afterwards which was there before."""
        return offset if offset < self.end else offset - (self.end - self.start)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What of a file's own description of itself changes."""

    segments_at: int
    segments: Sequence[Segment]
    sections_at: int
    sections: Sequence[Section]
    code: int
    """Which of the sections is the GPU's."""


def hole(section: Section) -> Hole:
    """The pages that lie wholly in it."""
    start = -(-section.offset // PAGE_BYTES) * PAGE_BYTES
    return Hole(start=start, end=max(start, (section.offset + section.length) // PAGE_BYTES * PAGE_BYTES))


def without(layout: Layout, gone: Hole) -> Layout:
    """How the same file describes itself without the hole. Raises GpuCodeError."""
    sections = [replace(section, offset=gone.moved(section.offset)) for section in layout.sections]
    # The ends of the section, less than a page each, belong to no section: a debugger would read across the hole.
    sections[layout.code] = replace(layout.sections[layout.code], kind=NOBITS, length=0)
    return replace(
        layout,
        segments=split(layout.segments, gone),
        sections_at=gone.moved(layout.sections_at),
        sections=sections,
    )


def split(segments: Sequence[Segment], gone: Hole) -> list[Segment]:
    """As many segments as before, at the addresses of before: a note, which nothing reads while a program runs, makes
    room for the second half of the one that is split. Raises GpuCodeError."""
    notes = [segment for segment in segments if segment.kind == NOTE]
    if not notes:
        raise GpuCodeError("it has no note, whose program header the second half could take")
    kept: list[Segment] = []
    halves = 0
    for segment in segments:
        end = segment.offset + segment.file_bytes
        if segment.kind == LOAD and segment.offset <= gone.start and gone.end <= end:
            halves += 1
            kept += _halves(segment, gone)
        elif segment.file_bytes and segment.offset < gone.end and gone.start < end:
            raise GpuCodeError(f"a segment of kind {segment.kind:#x} holds a part of the GPU's code")
        elif segment is not notes[-1]:
            kept.append(replace(segment, offset=gone.moved(segment.offset)))
    if halves != 1:
        raise GpuCodeError(f"{halves} segments hold the GPU's code whole; it has to be one")
    return kept


def _halves(segment: Segment, gone: Hole) -> tuple[Segment, Segment]:
    first, second = gone.start - segment.offset, gone.end - segment.offset
    return (
        replace(segment, file_bytes=first, memory_bytes=first),
        replace(
            segment,
            offset=gone.moved(gone.end),
            address=segment.address + second,
            physical=segment.physical + second,
            file_bytes=segment.file_bytes - second,
            memory_bytes=segment.memory_bytes - second,
        ),
    )


def read(file: BinaryIO) -> Layout:
    """Raises GpuCodeError."""
    head = file.read(HEADER.size)
    if not head.startswith(MAGIC):
        raise GpuCodeError("it is no ELF file of 64 bits")
    segments_at, sections_at, segment_bytes, segments, section_bytes, sections, names = HEADER.unpack(head)
    if (segment_bytes, section_bytes) != (PROGRAM_HEADER.size, SECTION_HEADER.size):
        raise GpuCodeError(f"its headers have {segment_bytes} and {section_bytes} bytes each")
    file.seek(segments_at)
    segment_table = PROGRAM_HEADER.iter_unpack(file.read(segments * segment_bytes))
    file.seek(sections_at)
    section_table = SECTION_HEADER.iter_unpack(file.read(sections * section_bytes))
    found = [Section(**dict(zip(Section.__annotations__, fields, strict=True))) for fields in section_table]
    file.seek(found[names].offset)
    text = file.read(found[names].length)
    ours = [
        place for place, section in enumerate(found) if text[section.name :].partition(b"\0")[0] == SECTION
    ]
    if len(ours) != 1:
        raise GpuCodeError(f"it has {len(ours)} sections {SECTION.decode()}; it has to be one")
    return Layout(
        segments_at=segments_at,
        segments=[
            Segment(**dict(zip(Segment.__annotations__, fields, strict=True))) for fields in segment_table
        ],
        sections_at=sections_at,
        sections=found,
        code=ours[0],
    )


def cut(path: Path) -> int:
    """Writes the file anew without that code; returns how many bytes it got smaller. Raises GpuCodeError."""
    beside = path.with_name(f"{path.name}.new")
    with path.open("rb") as old, beside.open("wb") as new:
        layout = read(old)
        gone = hole(layout.sections[layout.code])
        after = without(layout, gone)
        _copy(old, new, 0, gone.start)
        _copy(old, new, gone.end, path.stat().st_size)
        new.seek(SECTIONS_AT.size - 8)
        new.write(struct.pack("<Q", after.sections_at))
        new.seek(after.segments_at)
        new.writelines(PROGRAM_HEADER.pack(*vars(segment).values()) for segment in after.segments)
        new.seek(after.sections_at)
        new.writelines(SECTION_HEADER.pack(*vars(section).values()) for section in after.sections)
    os.chmod(beside, path.stat().st_mode)
    os.replace(beside, path)
    return gone.end - gone.start


def _copy(old: BinaryIO, new: BinaryIO, start: int, end: int) -> None:
    old.seek(start)
    new.writelines(old.read(min(COPY_BYTES, end - at)) for at in range(start, end, COPY_BYTES))


def main() -> int:
    for name in sys.argv[1:]:
        try:
            print(f"{name}: {cut(Path(name)) / 1e6:.0f} MB of GPU code cut out")
        except GpuCodeError as problem:
            print(f"gpu_code: {name}: {problem}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
