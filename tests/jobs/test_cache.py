"""A directory is built once, whole or not at all, and what one host has made others fetch."""

import contextlib
import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

import jobs
from contracts.errors import RequestError, Unreachable
from jobs.flax_mlm.config import Config
from jobs.flax_mlm.data import Tokens, prepare, prepare_tokens
from jobs.runtime.storage import cache
from jobs.runtime.storage.cache import (
    MANIFEST,
    CacheRefused,
    RemoteCache,
    build_once,
    copy_once,
)
from tests.servers import free_port

# A process that builds argv[1]: counts itself in argv[2], says "building", and goes on at a line on stdin.
BUILDER = """
import os, sys
from pathlib import Path
from jobs.runtime.storage.cache import build_once

def build(directory):
    with open(sys.argv[2], "a") as counter:
        counter.write("built\\n")
    (directory / "first").write_text(str(os.getpid()))
    print("building", flush=True)
    sys.stdin.readline()
    (directory / "second").write_text(str(os.getpid()))

print("ready", flush=True)
sys.stdin.readline()
print(build_once(Path(sys.argv[1]), build, wait_limit_s=60), flush=True)
"""


def builder(directory: Path, counter: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(directory), str(counter)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(jobs.__file__).parents[1])},
    )


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def write_one_file(directory: Path) -> None:
    (directory / "file").write_text("content")


def test_of_several_processes_at_once_one_builds_and_all_find_it_whole(tmp_path: Path) -> None:
    directory, counter = tmp_path / "entry", tmp_path / "counter"
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(builder(directory, counter)) for _ in range(3)]
        for process in processes:
            assert hear(process) == "ready"
        for process in processes:
            tell(process)
            tell(process)
        said = [[line.strip() for line in process.stdout or ()] for process in processes]
    assert counter.read_text() == "built\n"
    assert sorted(lines[-1] for lines in said) == ["False", "False", "True"]
    assert {path.name for path in directory.iterdir()} == {"first", "second"}


def test_who_waits_for_another_builder_says_so_until_the_limit_and_a_killed_builder_leaves_nothing_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "WAIT_SAY_S", 0.06)
    directory, said = tmp_path / "entry", list[str]()
    with builder(directory, tmp_path / "counter") as process:
        hear(process)
        tell(process)
        assert hear(process) == "building"
        with pytest.raises(RequestError, match=r"entry\.lock: another process has held this lock .* end it"):
            build_once(directory, write_one_file, wait_limit_s=0.2, say=said.append)
        assert not directory.exists()
        process.send_signal(signal.SIGKILL)
    assert said[0] == f"another process is making {tmp_path.name}/entry, waiting for it"
    assert len([line for line in said if "another process is still making entry" in line]) == 3
    assert build_once(directory, write_one_file)
    assert [path.name for path in directory.iterdir()] == ["file"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["entry"]


ENDS = [
    KeyboardInterrupt(),
    Unreachable("the bucket does not answer"),
    CacheRefused("no permission in the bucket"),
    RequestError("wrong"),
    OSError(errno.ENOSPC, "No space left on device"),
]


@pytest.mark.parametrize("error", ENDS, ids=repr)
@pytest.mark.parametrize("goes_on", [False, True])
def test_what_a_failed_builder_has_made_is_kept_only_where_the_next_one_can_go_on_with_it(
    tmp_path: Path, error: BaseException, goes_on: bool
) -> None:
    """It cannot where the request was wrong, or where the half is what fills the disk."""

    def half(directory: Path) -> None:
        (directory / "first half").touch()
        raise error

    def rest(directory: Path) -> None:
        assert [path.name for path in directory.iterdir()] == (["first half"] if is_kept else [])
        (directory / "second half").touch()

    is_kept = goes_on and isinstance(error, KeyboardInterrupt | Unreachable | CacheRefused)
    with pytest.raises(type(error)):
        build_once(tmp_path / "entry", half, goes_on=goes_on)
    assert not (tmp_path / "entry").exists()
    assert (tmp_path / "entry.building").exists() == is_kept
    assert build_once(tmp_path / "entry", rest, goes_on=goes_on)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["entry"]


def test_a_remote_folder_is_copied_once_for_each_version_and_a_server_that_is_away_is_not_an_empty_one(
    tmp_path: Path,
) -> None:
    files, url = fsspec.filesystem("memory"), f"memory://{uuid.uuid4().hex}/export"
    said: list[str] = []

    def copy(*, is_recursive: bool = True) -> dict[str, bytes]:
        folder = copy_once(
            url,
            tmp_path,
            lambda names: {*names} - {"log"},
            option="--export",
            say=said.append,
            is_recursive=is_recursive,
        )
        return {
            str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }

    with pytest.raises(RequestError, match=f"--export {url}: No such file or directory; check the address"):
        copy()
    for name in ("config.json", "log", "deep/down/weights"):
        files.pipe(f"{url}/{name}", name.encode())
    for _ in range(2):
        assert copy() == {"config.json": b"config.json", "deep/down/weights": b"deep/down/weights"}
    assert len(said) == 1 and copy(is_recursive=False) == {"config.json": b"config.json"}
    files.pipe(f"{url}/config.json", b"changed")
    assert copy()["config.json"] == b"changed"
    away = f"http://127.0.0.1:{free_port()}/export"
    with pytest.raises(Unreachable, match=f"--export {away}: does not answer now"):
        copy_once(away, tmp_path, list, option="--export", is_recursive=True)


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


@pytest.mark.parametrize("content", [b"torn", bytes(256 * 40), None], ids=["cut", "changed", "gone"])
def test_what_is_torn_there_is_not_there_and_is_mended(
    url: str, folder: Path, into: Path, content: bytes | None
) -> None:
    remote, said = RemoteCache(url), list[str]()
    remote.put(folder, "tokens/abc", say=said.append)
    write(url, "tokens/abc/train.bin", content)
    assert not remote.fetch("tokens/abc", into, say=said.append)
    assert "tokens/abc is not what was put there: made again" in said[-1]
    assert names(into) == {}
    remote.put(folder, "tokens/abc", say=said.append)
    assert remote.fetch("tokens/abc", into, say=said.append)


@pytest.mark.parametrize(
    "manifest",
    [
        None,
        b'{"train.b',
        b'["train.bin"]',
        b'{"../../outside": {"size_bytes": 1, "sha256": ""}}',
        b'{"train.bin": {}}',
    ],
)
def test_a_folder_whose_manifest_is_not_whole_or_names_anything_but_plain_files_is_not_there(
    url: str, folder: Path, into: Path, manifest: bytes | None
) -> None:
    remote = RemoteCache(url)
    remote.put(folder, "tokens/abc", say=print)
    write(url, f"tokens/abc/{MANIFEST}", manifest)
    assert not remote.fetch("tokens/abc", into, say=print)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError("no such bucket"), "cannot be written .no such bucket.; make the bucket"),
        (OSError("quota"), "OSError: quota; check the address"),
        (ConnectionResetError("gone"), "ConnectionResetError: gone; check the address"),
    ],
)
def test_a_place_that_refuses_is_named_and_has_no_manifest(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, said: str
) -> None:
    files: Any = fsspec.filesystem("memory")
    monkeypatch.setattr("time.sleep", lambda _: None)

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(type(files), "put_file", refuse)
    root = uuid.uuid4().hex
    kind = Unreachable if isinstance(error, ConnectionError) else CacheRefused
    with pytest.raises(kind, match=f"--remote-cache memory://.*: {said}"):
        RemoteCache(f"memory://{root}").put(folder, "tokens/abc", say=lambda _: None)
    assert not files.exists(f"{root}/tokens/abc/{MANIFEST}")


def test_a_cache_that_nobody_asked_for_need_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    source = str(tmp_path / "a.jsonl")
    Path(source).write_text("\n".join(json.dumps({"text": f"document {n} and its words"}) for n in range(90)))
    (tmp_path / "file").touch()
    config = Config(
        data=source, vocab_size=300, eval_fraction=0.25, batch_size=2, sequence_length=8, max_positions=8
    )
    said, away = list[str](), f"file://{tmp_path}/file/cache"  # whatever is put there is refused
    assert prepare(config, tmp_path / "host", said.append, away).train.size
    assert [line for line in said if "the run goes on without it" in line]
    with pytest.raises(CacheRefused):
        prepare(dataclasses.replace(config, remote_cache=away), tmp_path / "other", said.append)


def test_the_second_host_fetches_what_the_first_has_made_and_a_torn_copy_is_made_again_by_whoever_meets_it(
    url: str, tmp_path: Path
) -> None:
    lines = [json.dumps({"text": f"document {n}, and what is said in it"}) for n in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))

    def host(name: str) -> tuple[Tokens, set[str]]:
        """The corpus prepared on a host with a cache of its own, and the first words of what was said."""
        said = list[str]()
        source = str(tmp_path / "a.jsonl")
        config = Config(data=source, vocab_size=300, eval_fraction=0.25, remote_cache=url)
        tokens = prepare_tokens(config, tmp_path / name, said.append)
        return tokens, {line.split()[0] for line in said}

    first, did = host("one")
    place = f"tokens/{first.directory.name}"
    assert {"training", "tokenising", "copying"} <= did
    write(url, f"{place}/{MANIFEST}", None)
    assert host("one")[1] & {"training", "tokenising", "copying"} == {"copying"}
    second, did = host("two")
    assert not {"training", "tokenising"} & did
    assert first.fingerprint == second.fingerprint
    assert first.tokenizer.sha256 == second.tokenizer.sha256
    assert names(first.directory) == names(second.directory)
    write(url, f"{place}/train.bin", b"torn")
    third, did = host("three")
    assert "tokenising" in did and third.fingerprint == first.fingerprint
    assert "tokenising" not in host("four")[1]
