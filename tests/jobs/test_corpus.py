"""What --data may name, what comes out of it, and what is said when it can't be read."""

import bz2
import gzip
import os
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry, known_implementations

from contracts.errors import RequestError
from jobs.flax_mlm.corpus import DOCUMENT_LIMIT_CHARACTERS, open_corpus


def read(source: str | Path, *, text_field: str = "text") -> list[str]:
    """The documents of a corpus in which nothing has to be warned of."""
    return list(open_corpus(str(source), text_field=text_field).documents(warn=pytest.fail))


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    file_system = fsspec.filesystem("memory")
    yield file_system
    file_system.store.clear()
    file_system.pseudo_dirs[:] = [""]


@pytest.mark.parametrize(
    ("names", "source", "found"),
    [
        (
            ["b.md", "a.txt", "sub/c.RST", "sub/d", ".hidden.txt", ".git/e.txt", "g.txt~"],
            "",
            ["a.txt", "b.md", "sub/c.RST", "sub/d"],
        ),
        (["a.log", "sub/b.log", "sub/c.txt"], "**/*.log", ["a.log", "sub/b.log"]),
        (["a.log", "sub/b.log", "sub/c.txt"], "*.log", ["a.log"]),
        (["data[1].txt", "data1.txt"], "data[1].txt", ["data[1].txt"]),
    ],
    ids=["a folder without hidden files", "a deep glob", "a glob", "a name like a glob"],
)
def test_a_folder_gives_its_files_and_a_glob_whatever_it_matches_sorted(
    tmp_path: Path, names: list[str], source: str, found: list[str]
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path / source) == found


def test_a_url_gives_what_the_same_local_files_give(tmp_path: Path, memory: MemoryFileSystem) -> None:
    contents = {
        "a.txt": b"plain",
        "sub/b.txt.gz": gzip.compress(b"packed"),
        "sub/c.jsonl": b'{"text": "line"}',
        ".hidden.txt": b"hidden",
        "d.txt~": b"other",
    }
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
        memory.pipe(f"/bucket/{name}", content)
    for pattern in ("", "/a.txt", "/*.txt", "/**/*.gz"):
        assert read(f"memory://bucket{pattern}") == read(f"{tmp_path}{pattern}"), pattern
    assert read("memory://bucket") == ["plain", "packed", "line"]


def test_the_fingerprint_is_of_content_and_not_of_the_place_and_of_a_url_nothing_is_read_for_it(
    tmp_path: Path, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprint(name: str, content: str, text_field: str = "text") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        return open_corpus(str(path), text_field=text_field).fingerprint

    first = fingerprint("here/a.txt", '{"text": "x"}')
    assert fingerprint("there/b.txt", '{"text": "x"}') == first
    assert fingerprint("there/b.txt", '{"text": "y"}') != first
    assert fingerprint("there/b.jsonl", '{"text": "x"}') == first
    assert fingerprint("there/b.jsonl", '{"text": "x"}', "title") != first

    memory.pipe("/bucket/a.txt", b"one")
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "_open", lambda *_, **__: pytest.fail("downloaded"))
        before = open_corpus("memory://bucket").fingerprint
        assert open_corpus("memory://bucket").fingerprint == before
    memory.rm("/bucket/a.txt")
    memory.pipe("/bucket/a.txt", b"two")
    assert open_corpus("memory://bucket").fingerprint != before


def test_a_text_file_is_cut_at_the_first_blank_line_after_2000_characters_or_somewhere(
    tmp_path: Path,
) -> None:
    paragraph, path = "x" * 999, tmp_path / "a.txt"
    path.write_text("\n\n".join([paragraph] * 5) + "\n")
    assert read(path) == [f"{paragraph}\n\n{paragraph}", f"{paragraph}\n\n{paragraph}", paragraph]
    for line in ("word " * 20 + "\n", "x"):  # no blank line; no line end
        text = line * (500_000 // len(line))
        path.write_text(text)
        documents = read(path)
        assert "".join("".join(documents).split()) == "".join(text.split())
        assert len(documents) >= 4
        assert max(map(len, documents)) < 2 * DOCUMENT_LIMIT_CHARACTERS


def test_reading_takes_no_more_memory_for_more_text(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.txt.gz", "wb", compresslevel=1) as file:
        for _ in range(50):
            file.write(("word " * 19 + "\n\n").encode() * 1_000)  # 5 MB in all
    corpus = open_corpus(str(tmp_path / "a.txt.gz"))
    tracemalloc.start()
    try:
        assert sum(map(len, corpus.documents())) > 4_000_000
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_what_is_not_utf8_is_replaced_counted_and_said_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 and caf\xe9 and a true \xef\xbf\xbd")
    (tmp_path / "b.jsonl").write_bytes(
        b'{"text": "caf\xe9"}\n{"text": "\\ud800 alone"}\n{"text": "\\ud83d\\ude00"}'
    )
    said: list[str] = []
    documents = list(open_corpus(str(tmp_path)).documents(warn=said.append))
    assert documents == ["caf� and caf� and a true �", "caf�", "� alone", "😀"]
    assert len(said) == 1
    assert said[0].startswith("4 bytes in 3 of 4 documents are not UTF-8 and were read as U+FFFD: ")
    assert f"{tmp_path / 'a.txt'} (2), {tmp_path / 'b.jsonl'} (2); convert them" in said[0]


def test_what_is_no_text_is_skipped_in_a_folder_named_once_with_its_reason_and_refused_by_itself(
    tmp_path: Path,
) -> None:
    others = {
        "b.png": (b"\x89PNG\r\n\x1a\n\0\0", "binary, or UTF-16 without a byte order mark (it has NUL bytes)"),
        "c.txt": (b"%PDF-1.7\n", "a PDF"),
        "d.json": (b'{"name": "x"}', "no field 'text'; the fields there are 'name'"),
    }
    for name, (content, _) in others.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RequestError, match=name):
            open_corpus(str(tmp_path / name)).check()
    named = [f"{tmp_path / name} ({reason})" for name, (_, reason) in others.items()]
    with pytest.raises(RequestError) as refused:
        open_corpus(str(tmp_path)).check()
    assert str(refused.value) == f"--data {tmp_path}: none of its files can be read: " + "\n".join(named)
    os.mkfifo(tmp_path / "f")
    (tmp_path / "g").symlink_to("nothing")
    named += [f"{tmp_path / name} (not a regular file, and it is read more than once)" for name in "fg"]
    (tmp_path / "a.log").write_bytes(b"true text")
    (tmp_path / "e.csv").write_bytes(bz2.compress(b"id,text\n1,row\n"))
    warnings: list[str] = []
    open_corpus(str(tmp_path)).check()
    assert list(open_corpus(str(tmp_path)).documents(warn=warnings.append)) == ["true text", "row"]
    assert warnings == [f"5 of 7 files of {tmp_path} are skipped: {', '.join(named)}"]


def test_byte_order_marks_and_documents_of_white_space_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x"}\r\n{"text": ""}\n\n{"text": " \\n"}\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfy\r\nz")
    (tmp_path / "c.txt").write_text("\n" * 5_000)
    assert read(tmp_path) == ["x", "y\nz"]


def test_western_text_in_an_old_encoding_and_utf8_cut_anywhere_are_text(tmp_path: Path) -> None:
    for name, text in (("a.txt", "déjà vu, où ça? "), ("b.txt", "größer Übung ")):
        (tmp_path / name).write_bytes(text.encode("latin-1") * 100)
    for start in range(4):
        (tmp_path / f"cut{start}.txt").write_bytes("日本語の文章。".encode()[start:] * 4000)
    open_corpus(str(tmp_path)).check()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"title": "x", "body": "y"}', r"a\.jsonl:3: no field 'text'; the fields there are 'body', 'title'"),
        ("{}", r"a\.jsonl:3: no field 'text'; the fields there are none"),
        ('{"text": null}', r"a\.jsonl:3: field 'text' is no text: None"),
        ('{"text": 1}', r"a\.jsonl:3: field 'text' is no text: '1'"),
        ('{"n": ' + "9" * 5_000 + "}", r"a\.jsonl:3: no field 'text'; the fields there are 'n'"),
        (
            '{"text": 1}\n' * 20,
            r"(?s)a\.jsonl:3: .*a\.jsonl:12: field 'text' is no text: '1'; mend or remove",
        ),
    ],
)
def test_a_bad_jsonl_line_is_named_with_what_is_wrong_and_what_is_there(
    tmp_path: Path, line: str, says: str
) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "x"}}\n\n{line}\n')
    with pytest.raises(RequestError, match=says):
        read(tmp_path)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{}/none.txt", r"none\.txt: No such file or directory; give 'stdlib', a file"),
        ("{}/none/*.txt", r"none/\*\.txt: no file matches"),
        ("{}/hidden", r"no file in this folder or below"),
        ("{}/empty", r"empty: 2 files of 0 bytes"),
        ("{}/pipe", r"pipe: not a regular file"),
        ("", r"--data: is empty; give 'stdlib', a file"),
        ("nosuch://bucket/a.txt", r"no driver for this kind of URL \(.*nosuch.*name a path"),
        ("undriven://bucket/a.txt", r"no driver for this kind of URL \(install the package undriven-fs"),
        ("memory://none", r"memory://none: No such file or directory"),
        ("memory://none/*", r"memory://none/\*: no file matches"),
        ("refusing://bucket", "RuntimeError: 401; check the address, the network"),
    ],
)
def test_data_that_cannot_be_read_is_refused_with_the_rule_and_the_remedy(
    tmp_path: Path, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, source: str, says: str
) -> None:
    class Refusing(MemoryFileSystem):  # type: ignore[misc]
        protocol = "refusing"

        def info(self, path: str, **_: object) -> dict[str, object]:
            raise RuntimeError("401")

    driver = {"class": "no_such_package.Driver", "err": "install the package undriven-fs"}
    monkeypatch.setitem(known_implementations, "undriven", driver)
    monkeypatch.setitem(_registry, "refusing", Refusing)
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / ".a.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").touch()
    (tmp_path / "empty" / "b.txt").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RequestError, match=says):
        open_corpus(source.format(tmp_path))


@pytest.mark.parametrize("locked", ["a.txt", "sub"])
def test_data_without_permission_is_refused_when_it_is_opened(locked: str) -> None:
    # Not below tmp_path, which only its owner may enter.
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        (root / "sub").mkdir()
        (root / "a.txt").write_text("x")
        (root / "sub" / "b.txt").write_text("x")
        (root / locked).chmod(0)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(RequestError, match=f"no permission to read .*{locked}; change its mode"):
                open_corpus(folder)
        finally:
            os.seteuid(user)
            (root / locked).chmod(0o755)


def test_stdlib_is_the_modules_docstrings_in_source_order_and_the_same_every_time() -> None:
    corpus = open_corpus("stdlib")
    documents = read("stdlib")
    paths = [file.path for file in corpus.files]
    assert paths == sorted(paths)
    parts = {part for path in paths for part in Path(path).relative_to(Path(os.__file__).parent).parts}
    assert not {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"} & parts
    assert len(documents) > 300
    assert sum(map(len, documents)) > 1_000_000
    assert corpus.fingerprint == open_corpus("stdlib").fingerprint
    [queue] = [
        document for document in documents if document.startswith("A multi-producer, multi-consumer queue.")
    ]
    inside = ["Create a queue object with a given", "Indicate that a formerly", "Variant of Queue that"]
    places = [queue.index(text) for text in inside]
    assert places == sorted(places)
