"""What a file is, its bytes say: files of all kinds under any name give their rows, or are refused by what they are."""

import bz2
import csv
import dataclasses
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import RequestError
from jobs.flax_mlm.corpus import open_corpus
from jobs.glue.data import read
from jobs.glue.options import Options
from jobs.runtime.storage.data_files import HEAD_BYTES, NotData, read_rows, recognise

type Rows = Sequence[tuple[str, str]]

COMPRESSIONS: Mapping[str, Callable[[bytes], bytes]] = {
    "none": lambda data: data,
    "gzip": gzip.compress,
    "two gzip members": lambda data: gzip.compress(data[:3]) + gzip.compress(data[3:]),
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "two bzip2 streams": lambda data: bz2.compress(data[:3]) + bz2.compress(data[3:]),
    "two xz streams, padded": lambda data: lzma.compress(data[:3]) + bytes(8) + lzma.compress(data[3:]),
    "zstd": lambda data: bytes(pyarrow.compress(data, codec="zstd", asbytes=True)),
    "gzip in xz": lambda data: lzma.compress(gzip.compress(data)),
}
NAMES = (
    "rows.csv",
    "rows.tsv.gz",
    "rows.jsonl",
    "rows.json.zst",
    "rows.txt",
    "rows.parquet",
    "ROWS",
    "rows.md",
)
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-32")
LABELS = (
    "0",
    "00",
    "1",
    "1.0",
    "1_1",
    "11",
    "0101",
    "101",
    "9007199254740993",
    "9007199254740992",
    "a",
    " a",
    "Ä",
)

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30)
LONG = st.builds(lambda text, size: text + "long, " * size, TEXT, st.sampled_from([30_000, 12_000]))


@dataclasses.dataclass(frozen=True)
class Table:
    rows: Rows
    line_end: str

    def delimited(self, delimiter: str, quoting: Any) -> str:
        text = io.StringIO(newline="")
        writer = csv.writer(text, delimiter=delimiter, quoting=quoting, lineterminator=self.line_end)
        writer.writerows([("text", "label"), *self.rows])
        return text.getvalue()

    def json_lines(self) -> str:
        return "".join(json.dumps(row, ensure_ascii=False) + self.line_end for row in self.objects())

    def objects(self) -> list[dict[str, str]]:
        return [{"label": label, "text": text} for text, label in self.rows]


FORMATS: Mapping[str, Callable[[Table], str | bytes]] = {
    "CSV": lambda table: table.delimited(",", csv.QUOTE_MINIMAL),
    "CSV, all quoted": lambda table: table.delimited(",", csv.QUOTE_ALL),
    "semicolons": lambda table: table.delimited(";", csv.QUOTE_MINIMAL),
    "TSV": lambda table: table.delimited("\t", csv.QUOTE_MINIMAL),
    "TSV, all quoted": lambda table: table.delimited("\t", csv.QUOTE_ALL),
    "JSON lines": lambda table: table.json_lines(),
    "JSON": lambda table: json.dumps(table.objects(), ensure_ascii=False),
    "JSON, indented": lambda table: json.dumps(table.objects(), indent=1),
    "Parquet": lambda table: parquet(table.objects()),
}


def parquet(records: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file, row_group_size=3)
    return file.getvalue()


@st.composite
def tables(draw: st.DrawFn) -> Table:
    line_end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    # A writer of CSV does not quote a line end that is not its own, and a reader then takes it for one.
    texts = TEXT.map(lambda text: text.replace("\r", "\n").replace("\n", line_end))
    rows = draw(st.lists(st.tuples(texts, st.sampled_from(LABELS)), min_size=1, max_size=9))
    if draw(st.integers(0, 19)) == 0:
        rows.append((draw(LONG).replace("\r", "").replace("\n", ""), "a"))
    kept = [(text, label) for text, label in rows if not text.isspace()]
    return Table([*kept, ("first", "0"), ("second, last", "1")], line_end)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@settings(max_examples=500)
@given(
    table=tables(),
    kind=st.sampled_from([*FORMATS]),
    encoding=st.sampled_from(ENCODINGS),
    compression=st.sampled_from([*COMPRESSIONS]),
    name=st.sampled_from(NAMES),
)
def test_rows_are_what_was_written_whatever_the_file_is_called(
    folder: Path, table: Table, kind: str, encoding: str, compression: str, name: str
) -> None:
    content = FORMATS[kind](table)
    data = content.encode(encoding) if isinstance(content, str) else content
    path = folder / name
    path.write_bytes(COMPRESSIONS[compression](data))
    found = read(Options(data=str(path), eval_data=str(path), task="classification"))
    assert found.train.texts_a == tuple(text for text, _ in table.rows)
    assert [found.labels[int(label)] for label in found.train.labels] == [label for _, label in table.rows]
    warnings: list[str] = []
    assert list(open_corpus(str(path)).documents(warn=warnings.append)) == [text for text, _ in table.rows]
    assert not warnings
    path.unlink()


@settings(max_examples=200)
@given(
    table=tables(),
    kind=st.sampled_from([*FORMATS]),
    compression=st.sampled_from([*COMPRESSIONS]),
    damage=st.data(),
)
def test_a_file_that_is_torn_or_damaged_anywhere_is_read_or_refused_and_nothing_else(
    folder: Path, table: Table, kind: str, compression: str, damage: st.DataObject
) -> None:
    content = FORMATS[kind](table)
    data = bytearray(COMPRESSIONS[compression](content.encode() if isinstance(content, str) else content))
    if damage.draw(st.booleans()):
        del data[damage.draw(st.integers(0, len(data))) :]
    else:
        data[damage.draw(st.integers(0, len(data) - 1))] ^= damage.draw(st.integers(1, 255))
    path = folder / "damaged"
    path.write_bytes(data)
    for action in (
        lambda: read(Options(data=str(path), eval_data=str(path))),
        lambda: list(open_corpus(str(path)).documents(warn=lambda _: None)),
    ):
        try:
            action()
        except RequestError as error:
            assert str(path) in str(error)


def tar(name: str, data: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    return file.getvalue()


PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
NOT_DATA = [
    ("Привет, мир. ".encode("cp1251") * 20, r"another encoding \([67]\d% of its first 260 bytes .*iconv"),
    ("日本語の文章。".encode("shift-jis") * 9000, r"another encoding .*iconv -f ENCODING -t UTF-8"),
    ("text".encode("utf-16-be"), r"UTF-16 without a byte order mark \(it has NUL bytes\); convert it"),
    (b"%PDF-1.7\n", "a PDF; save its text"),
    (b"PK\x03\x04\0", "a ZIP archive or an office document; unpack it"),
    (gzip.compress(tar("a.txt", b"text")), "a tar archive; unpack it"),
    (PICTURE, "binary"),
    (b"ARROW1\0\0", "save it as Parquet"),
    (gzip.compress(b"\xef\xbb\xbf\n<!DOCTYPE html><p>Not found</p>"), "HTML or XML; save its text"),
    (b"<?xml version='1.0'?><a>text</a>", "HTML or XML; save its text"),
    (rb"{\rtf1\ansi text}", "RTF or PostScript; save its text"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS.*; fetch that"),
    (
        bytes.fromhex("28b52ffd00a8090000") + b"a",
        "zstd with a window of over 128 MiB; compress it without --long",
    ),
    (gzip.compress(gzip.compress(gzip.compress(gzip.compress(b"text")))), "compressed more than 3 times"),
]


@pytest.mark.parametrize(("content", "says"), NOT_DATA, ids=[each[1][:20] for each in NOT_DATA])
def test_what_is_neither_text_nor_rows_is_refused_by_what_it_is(
    tmp_path: Path, content: bytes, says: str
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(NotData, match=f"a.txt: .*{says}"):
        recognise(str(tmp_path / "a.txt"), column="text")


@pytest.mark.parametrize("compress", [bz2.compress, lzma.compress])
def test_damage_between_two_streams_is_not_taken_for_the_end(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    stream = compress(b"text,label\na,1\n")
    for name, content in (("a", stream + b"junk" + stream), ("b", stream + stream[:5])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RequestError, match=f"{name}: damaged"):
            list(read_rows(str(tmp_path / name), recognise(str(tmp_path / name))))


PROSE = [
    "One line.",
    "text\nand nothing else, but one comma\n",
    "[1] The first, [2] the second\n[3] The third\n" * 20,
    "[[a link]] of a wiki\n",
    "{curly}, braces: and more\n",
    "{\n  function() { return 1; }\n}\n",
    "A poem, of commas\nin each line, one\nuntil the last\nthat has, well, three\n",
    "Dear Ms. X,\n\nhow are you, and how is he?\nText, text, text.\n\nYours, Y\n",
    '"Quoted," she said.\n"Again," he said.\n',
    "# A heading\n\n| a | b |\n|---|---|\n| 1 | 2 |\n",
]


@pytest.mark.parametrize("text", PROSE)
def test_prose_is_no_table_and_no_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert recognise(str(tmp_path / "a.txt"), column="text").kind == "text"


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.txt", "id,body\n" + "".join(f"{n},word {n}\n" for n in range(9)), "table"),
        ("a.csv", "body\nalone\n", "table"),
        ("a", "text,label\na,1\nb\n", "table"),
        ("a", '{"text": "a"\n{"text": "b"}\n', "JSON lines"),
        ("a", "{'text': 'as Python writes it'}\n", "JSON lines"),
        ("a.ndjson.gz", "{text: 1}\n", "JSON lines"),
        ("a.jsonl", "Error: no such file\n", "JSON lines"),
        ("a.jsonl", '"one"\n"two"\n', "JSON lines"),
        ("a.json", "text,label\na,1\n", "table"),
        ("a", '{"data": [\n{"text": "a"}\n]}', "JSON"),
        ("a", '["a", "b"]', "JSON"),
        ("a", "[]", "JSON"),
        ("a", '["a"]\n["b"]\n', "JSON lines"),
    ],
)
def test_what_looks_like_rows_is_rows_even_where_some_are_wrong(
    tmp_path: Path, name: str, content: str, kind: str
) -> None:
    (tmp_path / name).write_text(content)
    assert recognise(str(tmp_path / name), column="text").kind == kind


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ('[\n {"a": 1},\n {"a": 2}\n {"a": 3}]', [(2, {"a": "1"}), (3, {"a": "2"}), (3, "neither a comma")]),
        ('[{"a": 1},\n [2],\n]', [(1, {"a": "1"}), (2, "no object with columns"), (3, "not JSON")]),
        ('[{"a": 1}] x', [(1, {"a": "1"}), (1, "more follows its end")]),
        ('{"a": -0.10, "b": 9007199254740993, "c": NaN}', [(1, {"a": "-0.10", "b": "9007199254740993", "c": None})]),
        (f'{{"a": {"9" * 5_000}}}', [(1, {"a": "9" * 5_000})]),
        ('{"a": ' + "[" * 100_000, [(1, "nested too deeply")]),
        ('{\n "a": 1,\n "b" 2\n}', [(3, "not JSON")]),
        ('{"a": 1, "a": 2}\n{"a": 3}', [(1, "an object names a column twice"), (2, {"a": "3"})]),
        ('{"a": 1}\r{"a":\r{"a": 3}', [(1, {"a": "1"}), (2, "not JSON (Expecting value at column"), (3, {"a": "3"})]),
        ("a,b,,a,\n1,2,3,4,5\n6,7,8,9,0\n", [(1, "the first line names a column twice")]),
        ("a,b,,\n1,2,3,4\n", [(2, {"a": "1", "b": "2", "": "4"})]),
        ("a\tb\r1\t2\r3\r", [(2, {"a": "1", "b": "2"}), (3, "1 columns, and the first line has 2")]),
        ('a\tb\n"1\t2"\n3\t"4\n', [(2, {"a": '"1', "b": '2"'}), (3, {"a": "3", "b": '"4'})]),
        ('a,b\n"1,\n2",3\n"4,5\n', [(2, {"a": "1,\n2", "b": "3"}), (4, "never closes")]),
    ],
)  # fmt: skip
def test_numbers_are_what_was_written_and_mistakes_have_their_lines(
    tmp_path: Path, content: str, rows: list[tuple[int, Any]]
) -> None:
    (tmp_path / "a").write_text(content, newline="")
    found = list(read_rows(str(tmp_path / "a"), recognise(str(tmp_path / "a"))))
    assert [line for line, _ in found] == [line for line, _ in rows]
    for (_, record), (_, expected) in zip(found, rows, strict=True):
        assert record == expected or (isinstance(expected, str) and expected in record)


def test_of_parquet_only_the_column_is_read_and_values_of_all_types_are_text(tmp_path: Path) -> None:
    records = [{"text": "a", "label": value} for value in (1.5, float("nan"), None, -2.0)]
    (tmp_path / "a").write_bytes(parquet(records))
    form = recognise(str(tmp_path / "a"))
    assert list(read_rows(str(tmp_path / "a"), form, column="text"))[3] == (4, {"text": "a"})
    with pytest.raises(RequestError, match=r"a:2: 'label' is empty\n.*a:3: 'label' is empty; mend"):
        read(Options(data=str(tmp_path / "a")))


def test_a_table_is_told_by_its_beginning_however_long_it_is(tmp_path: Path) -> None:
    row = "word;" + "x, " * 50 + "\n"
    (tmp_path / "a").write_text("text;other\n" + row * (2 * HEAD_BYTES // len(row)))
    assert recognise(str(tmp_path / "a"), column="text").delimiter == ";"


@pytest.mark.parametrize("place", [0, HEAD_BYTES, 2 * HEAD_BYTES])
def test_lines_longer_than_a_beginning_change_nothing(tmp_path: Path, place: int) -> None:
    def rows(content: str) -> list[Any]:
        (tmp_path / "a").write_text(content, newline="")
        return [row for _, row in read_rows(str(tmp_path / "a"), recognise(str(tmp_path / "a")))]

    # What a cut line ends with must not count.
    line = json.dumps({"text": "x" * (place - len('{"text": "') - 1) + ",,", "label": "1"})
    assert rows(f"{line}\n{line}\n") == [json.loads(line)] * 2
    text = "x, y; z\n" * (place // 8) + 'said "so"'
    quoted = text.replace('"', '""')
    assert rows(f'label\ttext\n1\t"{quoted}"\n') == [{"label": "1", "text": text}]
    assert rows(f'label;text\n1;"{quoted}"\n') == [{"label": "1", "text": text}]
    names = ";".join(f"column {number}" for number in range(1 + place // 8))
    assert rows(f"{names}\n{names}\n") == [{name: name for name in names.split(";")}]


def test_a_first_line_without_names_is_no_column(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(",,\n1,2,3\n")
    with pytest.raises(RequestError, match="no column with a usual name"):
        read(Options(data=str(tmp_path / "a.csv")))


@pytest.mark.parametrize("kind", [pyarrow.float16(), pyarrow.float32(), pyarrow.float64()])
def test_a_number_of_a_typed_column_is_the_shortest_that_stands_for_it(tmp_path: Path, kind: Any) -> None:
    array = pyarrow.array([0.1, None, 2.0], pyarrow.float64()).cast(kind)
    pyarrow.parquet.write_table(pyarrow.table({"label": array}), tmp_path / "a")
    rows = [row for _, row in read_rows(str(tmp_path / "a"), recognise(str(tmp_path / "a")))]
    assert rows == [{"label": 0.1}, {"label": None}, {"label": 2.0}]
