"""The directories that a run needs can be written, have room, answer, and are where they seem to be."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from host.agent import preflight
from host.agent.preflight import in_time, parse_mounts

GIB = 1 << 30


def test_a_directory_that_cannot_be_made_is_named(host: Any) -> None:
    ok, message = host.finding("cache_dir", cache_dir="/proc/no/cache")
    assert not ok
    assert "/proc/no/cache cannot be written" in message


def test_a_full_disk_is_found_by_writing(host: Any, small_disk: Path) -> None:
    (small_disk / "rest").write_bytes(bytes(512 << 10))
    ok, message = host.finding("run_dir", run_dir=str(small_disk))
    assert not ok
    assert "No space left" in message
    assert [path.name for path in small_disk.iterdir()] == ["rest"]


def test_too_little_free_space_is_told_with_path_and_gib_once_a_filesystem(host: Any) -> None:
    ok, message = host.finding("disk", min_free_bytes=1 << 60)
    assert not ok
    assert f"{host.agent.root} has " in message and "GiB free and needs 1073741824.0 GiB" in message


def test_each_filesystem_is_looked_at(host: Any, small_disk: Path) -> None:
    response = host.response(cache_dir=str(small_disk / "cache"), min_free_bytes=GIB // 16)
    disks = [check for check in response["checks"] if check["name"] == "disk"]
    assert [check["ok"] for check in disks] == [True, False]
    assert str(small_disk / "cache") in disks[1]["message"]


def test_a_share_that_is_not_mounted_is_named_and_nothing_is_made_in_its_place(
    host: Any, tmp_path: Path
) -> None:
    share = tmp_path / "share"
    response = host.response(mount=str(share), run_dir=f"{share}/runs/1")
    (mount, *_) = [check for check in response["checks"] if not check["ok"]]
    assert mount["message"] == f"{share} is not mounted"
    assert "fab deploy" in mount["remedy"] and "journalctl --unit tpu-stack-share" in mount["remedy"]
    assert not share.exists()


def test_a_share_that_is_mounted_is_in_order(host: Any, small_disk: Path) -> None:
    ok, message = host.finding("mount", mount=f"{small_disk}/", run_dir=f"{small_disk}/runs")
    assert (ok, message) == (True, f"{small_disk}/ is mounted from tmpfs")
    assert (small_disk / "runs").is_dir()


def test_a_mount_point_with_a_blank_in_its_name_is_found() -> None:
    text = "10.0.0.2:/export /mnt/my\\040share nfs4 rw 0 0\nproc /proc proc rw 0 0\n"
    assert parse_mounts(text) == {"/mnt/my share": "10.0.0.2:/export", "/proc": "proc"}


def test_a_file_system_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(preflight, "seen", lambda name, path: time.sleep(600))
    before = time.monotonic()
    found = preflight.look_at("run_dir", str(tmp_path), timeout_s=0.2)
    assert time.monotonic() - before < 5
    assert (found["check"]["ok"], "does not answer within 0.2 s" in found["check"]["message"]) == (
        False,
        True,
    )
    assert preflight.check_room([found], 1) == []


def test_a_look_that_breaks_is_a_bug_and_not_a_silence() -> None:
    def broken() -> dict[str, object]:
        raise KeyError("oh")

    with pytest.raises(RuntimeError, match="KeyError"):
        in_time(broken, 10)
