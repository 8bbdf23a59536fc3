"""Cutting GPU code out of a library: all else stays where it was, and a file that is laid out otherwise is refused."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from images.cuda_free import gpu_code
from images.cuda_free.gpu_code import LOAD, NOTE, PAGE_BYTES, GpuCodeError, Hole, Section, Segment

CODE_PAGES = 64
# The GPU's code between two constants that are read through it, as in torch.
SOURCE = f"""
const char before[] = "before";
__attribute__((section(".nv_fatbin"))) const char code[{CODE_PAGES * PAGE_BYTES}] = {{1, 2, 3}};
int number = 41;
int *where = &number;
const char *text(void) {{ return before; }}
int next(void) {{ return *where + 1; }}
"""


def segment(offset: int, length: int, kind: int = LOAD) -> Segment:
    """Its address is not its offset, as after the first writable one."""
    return Segment(
        kind=kind, flags=4, offset=offset, address=offset + PAGE_BYTES, physical=offset + PAGE_BYTES, file_bytes=length,
        memory_bytes=length, alignment=PAGE_BYTES,
    )  # fmt: skip


def section(offset: int, length: int) -> Section:
    return Section(
        name=1,
        kind=1,
        flags=2,
        address=offset,
        offset=offset,
        length=length,
        link=0,
        info=0,
        alignment=8,
        entry_bytes=0,
    )


@given(offset=st.integers(0, 5 * PAGE_BYTES), length=st.integers(0, 9 * PAGE_BYTES))
def test_only_whole_pages_of_the_code_go(offset: int, length: int) -> None:
    gone = gpu_code.hole(section(offset, length))
    assert gone.start % PAGE_BYTES == gone.end % PAGE_BYTES == 0
    assert gone.start == gone.end or offset <= gone.start < gone.end <= offset + length
    assert length - (gone.end - gone.start) < 2 * PAGE_BYTES


@given(
    first=st.integers(1, 4 * PAGE_BYTES), pages=st.integers(1, 5), last=st.integers(1, 4 * PAGE_BYTES),
    at=st.integers(0, 99),
)  # fmt: skip
def test_every_address_outside_the_code_shows_the_byte_that_it_showed(
    first: int, pages: int, last: int, at: int
) -> None:
    start = -(-(PAGE_BYTES + first) // PAGE_BYTES) * PAGE_BYTES
    gone = Hole(start=start, end=start + pages * PAGE_BYTES)
    middle = segment(PAGE_BYTES, gone.end - PAGE_BYTES + last)
    behind = -(-(gone.end + last) // PAGE_BYTES) * PAGE_BYTES
    before = [segment(0, PAGE_BYTES), middle, segment(behind, PAGE_BYTES), segment(0, 8, NOTE)]
    after = gpu_code.split(before, gone)
    assert len(after) == len(before)
    assert [part.address for part in after] == sorted(part.address for part in after)
    assert all((part.address - part.offset) % PAGE_BYTES == 0 for part in after)
    for part in before[:3]:
        offset = part.offset + part.file_bytes * at // 100
        if not gone.start <= offset < gone.end:
            address = part.address + offset - part.offset
            assert [
                new.offset + address - new.address
                for new in after
                if new.address <= address < new.address + new.memory_bytes
            ] == [gone.moved(offset)]


@pytest.mark.parametrize(
    ("segments", "said"),
    [
        ([segment(0, 9 * PAGE_BYTES)], "no note"),
        ([segment(0, 3 * PAGE_BYTES), segment(0, 8, NOTE)], "holds a part"),
        ([segment(8 * PAGE_BYTES, 8), segment(0, 8, NOTE)], "0 segments"),
        ([segment(0, 9 * PAGE_BYTES), segment(2 * PAGE_BYTES, 8, kind=7), segment(0, 8, NOTE)], "kind 0x7"),
    ],
)
def test_a_library_that_is_laid_out_otherwise_is_refused(segments: list[Segment], said: str) -> None:
    with pytest.raises(GpuCodeError, match=said):
        gpu_code.split(segments, Hole(start=2 * PAGE_BYTES, end=5 * PAGE_BYTES))


def test_what_is_no_library_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "text.so"
    path.write_text("INPUT(libm.so.6)")
    with pytest.raises(GpuCodeError, match="no ELF file"):
        gpu_code.cut(path)
    assert path.read_text() == "INPUT(libm.so.6)"


def names(path: Path) -> list[int]:
    """Where in the table of names each section's is; the table itself is read on the way."""
    with path.open("rb") as file:
        return [section.name for section in gpu_code.read(file).sections]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="makes a library: needs gcc")
def test_a_library_is_loaded_and_works_without_its_gpu_code(tmp_path: Path) -> None:
    code, path = tmp_path / "library.c", tmp_path / "library.so"
    code.write_text(SOURCE)
    # fmt: off
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O0", "-Wl,-z,noseparate-code", "-Wl,--build-id", "-o", str(path), str(code)],
        check=True, timeout=60,
    )
    # fmt: on
    size, sections = path.stat().st_size, names(path)
    saved = gpu_code.cut(path)
    assert saved >= (CODE_PAGES - 1) * PAGE_BYTES
    assert path.stat().st_size == size - saved
    assert names(path) == sections
    library = ctypes.CDLL(str(path))
    library.text.restype = ctypes.c_char_p
    assert (library.text(), library.next()) == (b"before", 42)
