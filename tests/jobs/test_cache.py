"""A cached directory is whole or not there, whoever else builds it and however a builder ends."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import jobs
from contracts.errors import RequestError, Unreachable
from jobs.runtime import cache
from jobs.runtime.cache import build_once, user_cache_dir

# A process that builds argv[1]: counts itself in argv[2], says "building", and goes on at a line on stdin.
BUILDER = """
import os, sys
from pathlib import Path
from jobs.runtime.cache import build_once

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


def test_the_default_directory_follows_xdg_and_else_lies_in_the_home() -> None:
    assert user_cache_dir({"XDG_CACHE_HOME": "/big/cache", "HOME": "/home/a"}) == Path("/big/cache/tpu-stack")
    assert user_cache_dir({"HOME": "/home/a"}) == Path("/home/a/.cache/tpu-stack")
    assert user_cache_dir({"XDG_CACHE_HOME": "cache", "HOME": "/home/a"}) == Path("/home/a/.cache/tpu-stack")


def test_a_directory_is_built_the_first_time_and_found_the_second(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "entry"
    assert build_once(directory, write_one_file)
    assert not build_once(directory, lambda _: pytest.fail("built again"))
    assert (directory / "file").read_text() == "content"
    assert [path.name for path in directory.parent.iterdir() if path.suffix != ".lock"] == ["entry"]


def test_of_several_processes_at_once_one_builds_and_all_find_it_whole(tmp_path: Path) -> None:
    directory, counter = tmp_path / "entry", tmp_path / "counter"
    with (
        builder(directory, counter) as one,
        builder(directory, counter) as two,
        builder(directory, counter) as three,
    ):
        processes = [one, two, three]
        for process in processes:
            assert hear(process) == "ready"
        for process in processes:
            tell(process)
            tell(process)
        said = [[line.strip() for line in process.stdout or ()] for process in processes]
    assert counter.read_text() == "built\n"
    assert sorted(lines[-1] for lines in said) == ["False", "False", "True"]
    assert {path.name for path in directory.iterdir()} == {"first", "second"}


def test_a_killed_builder_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    directory = tmp_path / "entry"
    with builder(directory, tmp_path / "counter") as process:
        hear(process)
        tell(process)
        assert hear(process) == "building"
        assert not directory.exists()
        process.send_signal(signal.SIGKILL)
    assert not directory.exists()
    assert build_once(directory, write_one_file)
    assert [path.name for path in directory.iterdir()] == ["file"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["entry"]


def test_a_wait_for_another_builder_ends_with_what_to_do(tmp_path: Path) -> None:
    directory, said = tmp_path / "entry", list[str]()
    with builder(directory, tmp_path / "counter") as process:
        hear(process)
        tell(process)
        assert hear(process) == "building"
        with pytest.raises(RequestError, match=r"entry\.lock: another process has held this lock .* end it"):
            build_once(directory, write_one_file, wait_limit_s=0.1, say=said.append)
        tell(process)
        assert hear(process) == "True"
    assert len(said) == 1
    assert (
        said[0] == f"another process is making {directory.parent.name}/{directory.name[:8]}, waiting for it"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, the disk that is always full")
def test_a_full_disk_is_the_builders_error_and_leaves_nothing(tmp_path: Path) -> None:
    def build(directory: Path) -> None:
        (directory / "file").write_text("half")
        Path("/dev/full").write_text("the other half")

    with pytest.raises(OSError, match="No space left") as caught:
        build_once(tmp_path / "entry", build)
    assert caught.value.errno == errno.ENOSPC
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert build_once(tmp_path / "entry", write_one_file)


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def build(directory: Path) -> None:
        (directory / "file").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "entry", build)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_directory_that_is_found_torn_is_built_again_and_that_is_said(tmp_path: Path) -> None:
    directory, said = tmp_path / "entry", list[str]()
    directory.mkdir()
    (directory / "stray").touch()

    def whole(found: Path) -> bool:
        return (found / "file").exists()

    assert build_once(directory, write_one_file, whole=whole, say=said.append)
    assert not build_once(directory, write_one_file, whole=whole, say=said.append)
    assert [path.name for path in directory.iterdir()] == ["file"]
    assert said == [f"{directory} is torn: removed, to be built again"]


def leave_half(directory: Path) -> None:
    (directory / "first half").touch()
    raise KeyboardInterrupt


def test_work_that_can_be_gone_on_with_is_kept_when_its_builder_ends(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "entry", leave_half, goes_on=True)
    assert not (tmp_path / "entry").exists()

    def rest(directory: Path) -> None:
        assert [path.name for path in directory.iterdir()] == ["first half"]
        (directory / "second half").touch()

    assert build_once(tmp_path / "entry", rest, goes_on=True)
    assert {path.name for path in (tmp_path / "entry").iterdir()} == {"first half", "second half"}
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["entry"]


def test_work_is_kept_where_only_a_place_did_not_answer(tmp_path: Path) -> None:
    def build(directory: Path) -> None:
        (directory / "half").touch()
        raise Unreachable("the bucket does not answer")

    with pytest.raises(Unreachable):
        build_once(tmp_path / "entry", build, goes_on=True)
    assert (tmp_path / "entry.building" / "half").exists()


@pytest.mark.parametrize("error", [RequestError("wrong"), OSError(errno.ENOSPC, "No space left on device")])
def test_work_that_would_fail_again_or_fills_the_disk_is_not_kept(tmp_path: Path, error: Exception) -> None:
    def build(directory: Path) -> None:
        (directory / "half").touch()
        raise error

    with pytest.raises(type(error)):
        build_once(tmp_path / "entry", build, goes_on=True)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_who_waits_long_says_so_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "WAIT_SAY_S", 0.06)
    directory, said = tmp_path / "entry", list[str]()
    with builder(directory, tmp_path / "counter") as process:
        hear(process)
        tell(process)
        assert hear(process) == "building"
        with pytest.raises(RequestError, match="has held this lock for more than 0 s"):
            build_once(directory, write_one_file, wait_limit_s=0.2, say=said.append)
        tell(process)
    assert len([line for line in said if "another process is still making entry" in line]) == 3
