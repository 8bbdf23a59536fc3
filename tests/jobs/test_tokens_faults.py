"""Preparing a corpus that meets a torn cache, a second process, a kill or a full disk."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import jobs
from tests.jobs.documents import texts, tokenised, write


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("name", ["train.bin", "eval.bin", "meta.json", "tokenizer.json"])
@pytest.mark.parametrize("tear", [cut_in_half, Path.unlink], ids=["cut in half", "gone"])
def test_a_torn_cache_is_said_and_made_again(tmp_path: Path, name: str, tear: Callable[[Path], None]) -> None:
    source, said = write(tmp_path / "a.jsonl", texts(50)), list[str]()
    before = tokenised(source, tmp_path / "cache").fingerprint
    [path] = (tmp_path / "cache").rglob(name)
    tear(path)
    assert tokenised(source, tmp_path / "cache", say=said.append).fingerprint == before
    assert f"{path.parent} is torn: removed, to be built again" in said


# A process that prepares argv[1] in argv[2]; given a third argument, it waits at the line that has it.
PREPARER = """
import sys
from pathlib import Path
from jobs.flax_mlm.tokens import prepare

def say(line):
    print(line, flush=True)
    if len(sys.argv) > 3 and sys.argv[3] in line:
        sys.stdin.readline()

tokens = prepare(sys.argv[1], text_field="text", vocab_size=300, tokenizer=None, eval_fraction=0.25,
                 cache_dir=Path(sys.argv[2]), say=say)
print(tokens.fingerprint)
"""


def preparer(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PREPARER, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(jobs.__file__).parents[1])},
    )


def test_of_two_processes_at_once_one_tokenises_and_both_have_the_same(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", texts(200))
    with preparer(source, tmp_path / "cache") as one, preparer(source, tmp_path / "cache") as two:
        said = [process.communicate()[0].splitlines() for process in (one, two)]
    assert said[0][-1] == said[1][-1] == tokenised(source, tmp_path / "cache").fingerprint
    assert len([line for lines in said for line in lines if line.startswith("tokenised ")]) == 1
    assert len([line for lines in said for line in lines if line.startswith("training a ")]) == 1


@pytest.mark.parametrize("moment", ["training a tokenizer", "tokenised "])
def test_a_process_killed_at_work_leaves_nothing_that_is_taken_for_whole(tmp_path: Path, moment: str) -> None:
    source = write(tmp_path / "a.jsonl", texts(50))
    source.write_bytes(source.read_bytes() + b'{"text": "caf\xe9"}\n')
    with preparer(source, tmp_path / "cache", moment) as process:
        assert process.stdout is not None
        assert any(moment in line for line in process.stdout)
        process.send_signal(signal.SIGKILL)
    assert list((tmp_path / "cache").rglob("*.building"))
    left = tokenised(source, tmp_path / "cache")
    assert left.fingerprint == tokenised(source, tmp_path / "clean").fingerprint
    assert not list((tmp_path / "cache").rglob("*.building"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 128 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may mount the small disk")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize("given", [True, False], ids=["in the tokens", "in the tokenizer"])
def test_a_full_disk_is_an_error_that_says_so_and_leaves_nothing(
    tmp_path: Path, small_disk: Path, given: bool
) -> None:
    source = write(tmp_path / "a.jsonl", texts(3_000))
    tokenizer = None
    if given:
        tokenizer = tokenised(write(tmp_path / "b.jsonl", texts(200)), tmp_path / "cache").tokenizer.path
    else:
        (small_disk / "ballast").write_bytes(bytes(120 * 1024))
    with pytest.raises(OSError, match="No space left") as caught:
        tokenised(source, small_disk, tokenizer=tokenizer)
    assert caught.value.errno == errno.ENOSPC
    left = {path.name for path in small_disk.rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert left <= {"ballast"}
