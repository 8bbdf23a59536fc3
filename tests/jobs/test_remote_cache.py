"""What one host has tokenised the next one fetches, whole and checked, or makes itself."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from contracts.errors import RequestError, Unreachable
from jobs.flax_mlm.tokens import Tokens, prepare
from jobs.runtime import remote_cache as module
from jobs.runtime.remote_cache import MANIFEST, RemoteCache


@pytest.fixture(params=["memory", "disk"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "disk":
        yield str(tmp_path / "shared" / "cache")
    else:
        root = uuid.uuid4().hex
        yield f"memory://{root}/cache/"
        files = fsspec.filesystem("memory")
        if files.exists(root):
            files.rm(root, recursive=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    made.mkdir()
    (made / "train.bin").write_bytes(bytes(range(256)) * 40)
    (made / "meta.json").write_text("{}")
    return made


def write(url: str, name: str, content: bytes | None) -> None:
    """Change what lies there, as something outside may; None: remove it."""
    files, root = fsspec.core.url_to_fs(url.rstrip("/"))
    if content is None:
        files.rm_file(f"{root}/{name}")
    else:
        files.pipe_file(f"{root}/{name}", content)


def names(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def into(tmp_path: Path) -> Path:
    (tmp_path / "into").mkdir()
    return tmp_path / "into"


def test_what_was_put_is_fetched_and_put_once(url: str, folder: Path, into: Path) -> None:
    cache, said = RemoteCache(url), list[str]()
    assert not cache.fetch("tokens/abc", into, say=said.append)
    assert said == []
    for _ in range(2):
        cache.put(folder, "tokens/abc", say=said.append)
    assert len(said) == 1
    (into / "half-made").touch()
    assert cache.fetch("tokens/abc", into, say=said.append)
    assert names(into) == names(folder)
    assert not RemoteCache(url).fetch("tokens/other", into, say=said.append)


@pytest.mark.parametrize("content", [b"torn", bytes(256 * 40), None], ids=["cut", "changed", "gone"])
def test_what_is_torn_there_is_not_there_and_is_mended(
    url: str, folder: Path, into: Path, content: bytes | None
) -> None:
    cache, said = RemoteCache(url), list[str]()
    cache.put(folder, "tokens/abc", say=said.append)
    write(url, "tokens/abc/train.bin", content)
    assert not cache.fetch("tokens/abc", into, say=said.append)
    assert "train.bin is not what was put there: made again" in said[-1]
    assert names(into) == {}
    cache.put(folder, "tokens/abc", say=said.append)
    assert cache.fetch("tokens/abc", into, say=said.append)


@pytest.mark.parametrize("content", [None, b'{"train.b'])
def test_a_folder_whose_manifest_is_not_whole_is_still_being_put(
    url: str, folder: Path, into: Path, content: bytes | None
) -> None:
    cache = RemoteCache(url)
    cache.put(folder, "tokens/abc", say=lambda _: None)
    write(url, f"tokens/abc/{MANIFEST}", content)
    assert not cache.fetch("tokens/abc", into, say=lambda _: None)


def test_hosts_that_find_the_same_folder_torn_at_the_same_moment_each_make_it_again(
    url: str, folder: Path, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = RemoteCache(url)
    cache.put(folder, "tokens/abc", say=print)
    write(url, "tokens/abc/train.bin", b"torn")
    was_read = cache._manifest

    def read_before_another_removes_it(files: Any, root: str, name: str) -> Any:
        found = was_read(files, root, name)
        write(url, f"{name}/{MANIFEST}", None)
        return found

    monkeypatch.setattr(cache, "_manifest", read_before_another_removes_it)
    assert not cache.fetch("tokens/abc", into, say=print)
    assert names(into) == {}


@pytest.mark.parametrize(
    "manifest", ['["train.bin"]', '{"../../outside": {"size_bytes": 1, "sha256": ""}}', '{"train.bin": {}}']
)
def test_a_manifest_that_speaks_of_anything_but_plain_files_is_none(
    url: str, folder: Path, into: Path, manifest: str
) -> None:
    cache = RemoteCache(url)
    cache.put(folder, "tokens/abc", say=print)
    write(url, f"tokens/abc/{MANIFEST}", manifest.encode())
    assert not cache.fetch("tokens/abc", into, say=print)


def test_a_folder_may_be_named_as_a_url(folder: Path, into: Path, tmp_path: Path) -> None:
    cache = RemoteCache(f"file://{tmp_path}/not/there/yet")
    cache.put(folder, "tokens/abc", say=print)
    assert cache.fetch("tokens/abc", into, say=print)


def test_a_place_that_cannot_be_written_says_so_and_may_later_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_bucket(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("no such bucket")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "put_file", no_bucket)
    with pytest.raises(Unreachable, match="cannot be written .no such bucket.; make the bucket"):
        RemoteCache(f"memory://{uuid.uuid4().hex}").put(folder, "tokens/abc", say=print)


def test_the_manifest_is_written_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: Any = fsspec.filesystem("memory")
    monkeypatch.setattr(module, "patiently", lambda action, **_: action())

    def refuse(*_: object, **__: object) -> None:
        raise OSError("quota")

    monkeypatch.setattr(type(files), "put_file", refuse)
    root = uuid.uuid4().hex
    with pytest.raises(RequestError, match=r"--remote-cache memory://.*: OSError: quota; check the address"):
        RemoteCache(f"memory://{root}").put(folder, "tokens/abc", say=lambda _: None)
    assert not files.exists(f"{root}/tokens/abc/{MANIFEST}")


def test_a_moments_refusal_is_waited_out(folder: Path, into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    files: Any = fsspec.filesystem("memory")
    url, said, real, refusals = (
        f"memory://{uuid.uuid4().hex}",
        list[str](),
        type(files).put_file,
        [OSError("busy")],
    )

    def put_file(*arguments: Any, **more: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return real(*arguments, **more)

    monkeypatch.setattr(type(files), "put_file", put_file)
    RemoteCache(url).put(folder, "tokens/abc", say=said.append)
    assert any("OSError: busy; trying again" in line for line in said)
    assert RemoteCache(url).fetch("tokens/abc", into, say=said.append)


def test_a_place_that_has_no_driver_is_a_wrong_request(into: Path) -> None:
    with pytest.raises(RequestError, match="--remote-cache nosuch://x: no driver for this kind of URL"):
        RemoteCache("nosuch://x").fetch("tokens/abc", into, say=lambda _: None)


# --- the tokenised corpus -------------------------------------------------------------------------------------


@pytest.fixture
def host(url: str, tmp_path: Path) -> Callable[[str], tuple[Tokens, list[str]]]:
    """Prepares the same corpus on the host that is named, each with a cache of its own."""
    lines = [json.dumps({"text": f"document {n}, and what is said in it"}) for n in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))

    def host(name: str) -> tuple[Tokens, list[str]]:
        said = list[str]()
        tokens = prepare(
            str(tmp_path / "a.jsonl"),
            text_field="text",
            vocab_size=300,
            tokenizer=None,
            eval_fraction=0.25,
            cache_dir=tmp_path / name,
            remote_cache=url,
            say=said.append,
        )
        return tokens, said

    return host


def verbs(said: list[str]) -> set[str]:
    return {line.split()[0] for line in said}


def test_the_second_host_fetches_what_the_first_has_made(
    host: Callable[[str], tuple[Tokens, list[str]]],
) -> None:
    first, said = host("one")
    assert {"training", "tokenising", "copying"} <= verbs(said)
    second, said = host("two")
    assert not {"training", "tokenising"} & verbs(said)
    assert first.fingerprint == second.fingerprint
    assert first.tokenizer.sha256 == second.tokenizer.sha256
    assert names(first.directory) == names(second.directory)


def test_a_host_that_has_it_already_puts_it_there_for_the_others(
    host: Callable[[str], tuple[Tokens, list[str]]], url: str
) -> None:
    first, _ = host("one")
    write(url, f"tokens/{first.directory.name}/{MANIFEST}", None)
    _, said = host("one")
    assert "copying" in verbs(said)
    assert not {"training", "tokenising"} & verbs(said)
    _, said = host("two")
    assert "tokenising" not in verbs(said)


def test_a_torn_copy_is_made_again_by_whoever_meets_it(
    host: Callable[[str], tuple[Tokens, list[str]]], url: str
) -> None:
    first, _ = host("one")
    write(url, f"tokens/{first.directory.name}/train.bin", b"torn")
    second, said = host("two")
    assert "tokenising" in verbs(said)
    assert second.fingerprint == first.fingerprint
    _, said = host("three")
    assert "tokenising" not in verbs(said)
