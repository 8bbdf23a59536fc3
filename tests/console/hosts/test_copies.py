"""Copies reach every host at once and come from every host apart; what was there before is never half there."""

import dataclasses
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import get_args

import pytest

from backends.local.local_backend import local
from backends.local.processes import LocalTransport
from console.hosts import copies
from console.hosts.copies import Copy, Kind, Place, decide
from contracts.errors import RequestError
from launch.hosts import Completed, HostError, HostsError, Transport
from launch.targets import Target
from tests.launch.slices import ssh_backend

Captured = pytest.CaptureFixture[str]
HARD_NAMES = ["plain", "a b", "'q\"", "$HOME;`id`", "é\u202e", "-rf", "new\nline", "*", "~"]


class Disk(LocalTransport):
    """A host whose whole disk is a folder here; its paths begin with /disk, and its home is /disk/home."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        object.__setattr__(self, "folder", folder)
        (folder / "home").mkdir(parents=True)

    def here(self, path: str) -> str:
        home = path.replace("~", "/disk/home", 1) if path.startswith("~/") else path
        return home.replace("/disk", str(vars(self)["folder"]), 1)

    def begin(self, argv: Sequence[str], stdin: str, *, timeout_s: float) -> Future[Completed]:
        words = [*argv[:4], *(self.here(word) for word in argv[4:])]
        done = super().begin(words, stdin, timeout_s=timeout_s).result()
        said = done.stdout.replace(str(vars(self)["folder"]), "/disk")
        future: Future[Completed] = Future()
        future.set_result(dataclasses.replace(done, stdout=said))
        return future

    def put(self, source: Path, target: str, progress: object = None) -> None:
        super().put(source, self.here(target))

    def get(self, source: str, target: Path, progress: object = None) -> None:
        super().get(self.here(source), target)


class Full(Disk):
    def put(self, source: Path, target: str, progress: object = None) -> None:
        raise HostError(host="", reason="no space left on device\x07", remedy="make room")


def target_of(*transports: Transport) -> Target:
    hosts = local(len(transports), "cpu", [0])
    return dataclasses.replace(hosts, name="dev", backend=ssh_backend(), transports=transports)


@pytest.fixture
def disks(tmp_path: Path) -> list[Disk]:
    return [Disk(tmp_path / f"disk{index}") for index in range(3)]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with files of hard names, a link and a mode."""
    tree = tmp_path / "tree"
    for index, name in enumerate(HARD_NAMES):
        (tree / name).mkdir(parents=True)
        (tree / name / name).write_bytes(bytes([index, 255]) * 100)
    (tree / "plain" / "run.sh").write_text("#!/bin/sh\n")
    (tree / "plain" / "run.sh").chmod(0o755)
    (tree / "link").symlink_to("plain/run.sh")
    return tree


def contents(folder: Path) -> dict[str, object]:
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else "folder"
        if path.is_dir()
        else (path.read_bytes(), path.stat().st_mode & 0o777)
        for path in folder.rglob("*")
    }


def test_a_folder_goes_to_all_hosts_at_once_and_comes_back_from_each_apart(
    disks: list[Disk], tree: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, copy = threading.Barrier(3, timeout=20), Disk.put

    def waiting(self: Disk, source: Path, target: str, progress: object = None) -> None:
        together.wait()
        copy(self, source, target)

    monkeypatch.setattr(Disk, "put", waiting)
    target = target_of(*disks)
    assert copies.put(target, str(tree), "/disk/new/deep", force=False) == 0
    (tmp_path / "disk1/new/deep/mine").write_text("of host 1")
    assert copies.get(target, "/disk/new/deep", str(tmp_path / "back"), force=False) == 0
    assert contents(tmp_path / "back/0/deep") == contents(tmp_path / "back/2/deep") == contents(tree)
    assert (tmp_path / "back/1/deep/mine").read_text() == "of host 1"
    assert sorted(os.listdir(tmp_path / "back")) == ["0", "1", "2"]
    assert "/disk/new/deep from 3 hosts: " in capsys.readouterr().out


def test_a_folder_that_is_there_is_replaced_as_a_whole_and_only_by_force(
    disks: list[Disk], tree: Path, tmp_path: Path
) -> None:
    target = target_of(*disks)
    for index in range(3):
        (tmp_path / f"disk{index}/d/tree").mkdir(parents=True)
        (tmp_path / f"disk{index}/d/tree/old").write_text("old")
    with pytest.raises(HostsError, match="/disk/d/tree is there already; --force replaces") as refused:
        copies.put(target, str(tree), "/disk/d", force=False)
    assert len(refused.value.errors) == 3
    assert copies.put(target, str(tree), "/disk/d", force=True) == 0
    for index in range(3):
        assert contents(tmp_path / f"disk{index}/d") == contents_under("tree", tree)
    back = tmp_path / "back"
    (back / "0/tree").mkdir(parents=True)
    (back / "0/tree/old").write_text("old")
    assert copies.get(target, "/disk/d/tree", str(back), force=False) == 1
    assert contents(back / "0/tree") == {"old": (b"old", 0o644)}
    assert copies.get(target, "/disk/d/tree", str(back), force=True) == 0
    assert contents(back / "0") == contents_under("tree", tree)


def contents_under(name: str, folder: Path) -> dict[str, object]:
    return {name: "folder", **{f"{name}/{path}": what for path, what in contents(folder).items()}}


def test_where_the_new_folder_cannot_take_its_place_the_old_one_stays(
    disks: list[Disk], tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk0/tree").mkdir()
    (tmp_path / "disk0/tree/old").write_text("old")
    monkeypatch.setattr(copies, "SWAP", copies.SWAP.replace('mv -- "$2" "$1"', "false", 1))
    with pytest.raises(HostsError):
        copies.put(target_of(disks[0]), str(tree), "/disk", force=True)
    assert sorted(os.listdir(tmp_path / "disk0")) == ["home", "tree"]
    assert os.listdir(tmp_path / "disk0/tree") == ["old"]


def test_a_host_that_fails_is_named_with_its_remedy_and_the_others_have_it(
    disks: list[Disk], tree: Path, tmp_path: Path, capsys: Captured
) -> None:
    target = target_of(disks[0], Full(tmp_path / "full"), disks[1])
    assert copies.put(target, str(tree), "/disk/new", force=False) == 1
    name = target.hosts[1].name
    out, err = capsys.readouterr()
    assert out.startswith(f"{tree} to 2 of 3 hosts: ")
    assert err == f"not copied: {name}: no space left on device\\x07 → make room\n"
    assert contents(tmp_path / "disk0/new") == contents(tmp_path / "disk1/new") == contents(tree)


@pytest.mark.parametrize(
    ("way", "source", "wanted", "said"),
    [
        (copies.put, "HERE/no", "/disk/x", "no such file on this machine"),
        (copies.get, "/disk/no", "HERE/x", "no such file on the host"),
        (copies.get, "/disk/home", "HERE/tree/plain/plain", "is a file, and the copies of 3 hosts need"),
        *((copies.get, source, "here", "name the folder itself") for source in ("..", "/", "~", "a/..")),
    ],
)
def test_what_cannot_be_copied_is_refused_before_anything_is_changed(
    disks: list[Disk],
    tree: Path,
    tmp_path: Path,
    way: Callable[..., int],
    source: str,
    wanted: str,
    said: str,
) -> None:
    before = contents(tmp_path)
    paths = [each.replace("HERE", str(tmp_path)) for each in (source, wanted)]
    with pytest.raises((RequestError, HostsError), match=said):
        way(target_of(*disks), *paths, force=False)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("kind", "path", "there", "inside", "goes_to"),
    [
        ("any", "/a/new", "nothing", "nothing", "/a/new"),
        ("any", "/a/new/", "nothing", "nothing", "/a/new/s"),
        ("any", "/a", "folder", "nothing", "/a/s"),
        ("any", "/", "folder", "nothing", "/s"),
        ("any", "rel", "nothing", "nothing", "rel"),
        ("file", "/f", "file", "nothing", "/f"),
        ("file", "/d", "folder", "file", "/d/s"),
        # A file and a folder never take each other's place, not even by force.
        ("folder", "/f", "file", "nothing", "/f is a file and the source is a folder"),
        ("file", "/d", "folder", "folder", "/d/s is a folder and the source is a file"),
        ("file", "/f/", "file", "nothing", "/f/ is a file, not a folder"),
    ],
)
def test_a_copy_goes_into_a_folder_that_is_there_and_else_under_the_name_given(
    kind: str, path: str, there: Kind, inside: Kind, goes_to: str
) -> None:
    place, kinds = (
        Place(path=path, kind=there, inside=inside),
        get_args(Kind)[:2] if kind == "any" else (kind,),
    )
    for source in kinds:
        for force in (False, True):
            if " " in goes_to:
                with pytest.raises(RequestError, match=goes_to):
                    decide("s", source, place, force=force)
            else:
                assert decide("s", source, place, force=force) == Copy(path=goes_to, replaces=False)
