"""The same code is the same bytes, whenever and wherever it was bundled; other code is another hash."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from contracts.errors import RequestError
from launch import jobs
from launch.jobs import CHECKOUT

FILES = {
    "jobs/__init__.py": b"",
    "jobs/one/__main__.py": b"print(1)\n",
    "jobs/one/data/words.txt": b"\xff\x00",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    # Under a name that is left out inside a bundle: what lies around a checkout is no matter.
    root = tmp_path / "__pycache__" / "checkout"
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def unpacked(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def test_what_is_unpacked_is_what_was_there(checkout: Path) -> None:
    assert unpacked(jobs.bundle(checkout).archive) == FILES


def test_the_same_files_give_the_same_bytes_whatever_their_times_modes_and_place(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = jobs.bundle(checkout)
    for number, path in enumerate(sorted(checkout.rglob("*"), reverse=True)):
        os.utime(path, (number, number))
        if path.is_file():
            path.chmod(0o700)
    assert jobs.bundle(checkout) == first
    shutil.copytree(checkout, tmp_path / "elsewhere")
    monkeypatch.setattr("time.time", lambda: 1e9)
    assert jobs.bundle(tmp_path / "elsewhere") == first


def test_files_stand_in_the_order_of_their_names_whatever_order_the_disk_has(checkout: Path) -> None:
    for number in range(30):
        (checkout / f"jobs/one/{number * 37 % 31:02}.py").touch()
    names = list(unpacked(jobs.bundle(checkout).archive))
    assert len(names) == 33
    assert names == sorted(names, key=lambda name: name.split("/"))


@pytest.mark.parametrize("change", ["byte", "name", "new", "gone"])
def test_a_changed_file_changes_the_hash(checkout: Path, change: str) -> None:
    before, main = jobs.bundle(checkout).sha256, checkout / "jobs/one/__main__.py"
    if change == "byte":
        main.write_bytes(b"print(2)\n")
    elif change == "name":
        main.rename(main.with_name("main.py"))
    elif change == "new":
        (checkout / "jobs/empty.py").touch()
    else:
        main.unlink()
    assert jobs.bundle(checkout).sha256 != before


def test_the_name_is_the_hash_of_the_bytes(checkout: Path) -> None:
    made = jobs.bundle(checkout)
    assert made.sha256 == hashlib.sha256(made.archive).hexdigest()


def test_what_tools_leave_behind_is_not_sent(checkout: Path) -> None:
    before = jobs.bundle(checkout)
    for folder in ("__pycache__", ".mypy_cache"):
        (checkout / "jobs/one" / folder).mkdir()
        (checkout / "jobs/one" / folder / "x").write_text("x")
    (checkout / "jobs/one/dangling").symlink_to("nowhere")
    assert jobs.bundle(checkout) == before


def test_data_among_the_code_is_refused_with_its_name(checkout: Path) -> None:
    with (checkout / "jobs/one/model.bin").open("wb") as file:
        file.truncate(17 * 2**20)
    with pytest.raises(
        RequestError, match=r"jobs hold 17 MiB, more than the 16 MiB .* jobs/one/model.bin: keep"
    ):
        jobs.bundle(checkout)


def test_this_checkouts_bundle_holds_every_job_and_nothing_of_the_launching_side() -> None:
    names = unpacked(jobs.bundle(CHECKOUT).archive)
    assert {"jobs/flax_mlm/__main__.py", "jobs/runtime/process.py", "contracts/errors.py"} <= names.keys()
    assert {name.partition("/")[0] for name in names} == {"contracts", "jobs"}


def test_the_commit_says_whether_files_differ_from_it(tmp_path: Path) -> None:
    assert jobs.commit_of(tmp_path) is None

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout

    git("init", "-q")
    assert jobs.commit_of(tmp_path) is None
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-q", "-m", "a")
    head = git("rev-parse", "HEAD").strip()
    assert jobs.commit_of(tmp_path) == jobs.Commit(hash=head, is_dirty=False)
    (tmp_path / "a").write_text("2")
    assert jobs.commit_of(tmp_path) == jobs.Commit(hash=head, is_dirty=True)
