"""A bundle is there whole, under its own hash, or it is not there."""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest


def archive_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for member, content in members:
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def plain(name: str, content: bytes = b"x", mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode
    return member, content


def special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member, b""


def staging(archive: bytes) -> dict[str, str]:
    return {
        "sha256": hashlib.sha256(archive).hexdigest(),
        "archive_base64": base64.b64encode(archive).decode(),
    }


def test_a_bundle_is_unpacked_once_and_then_found(agent: Any) -> None:
    request = staging(archive_of(plain("jobs/a.py", b"print(1)\n"), plain("run.sh", b"#!/bin/sh\n", 0o755)))
    asked = agent("stage", sha256=request["sha256"], archive_base64=None)
    assert (asked["present"], asked["sent"]) == (False, False)
    first = agent("stage", **request)
    assert (first["present"], first["sent"]) == (True, True)
    second = agent("stage", **request)
    assert (second["present"], second["sent"], second["path"]) == (True, False, first["path"])
    assert first["path"] == str(agent.root / "bundles" / request["sha256"])
    assert (Path(first["path"]) / "jobs/a.py").read_text() == "print(1)\n"
    assert (Path(first["path"]) / "run.sh").stat().st_mode & 0o777 == 0o755


def test_two_stages_at_once_both_succeed(agent: Any) -> None:
    request = staging(archive_of(*(plain(f"file-{n}", bytes(2000)) for n in range(300))))
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: agent("stage", **request), range(4)))
    assert all(answer["present"] for answer in answers)
    assert sum(answer["sent"] for answer in answers) == 1
    assert len(list(Path(answers[0]["path"]).iterdir())) == 300
    assert [path.name for path in (agent.root / "bundles").iterdir()] == [request["sha256"]]


@pytest.mark.parametrize(
    "member",
    [
        plain("/etc/x"),
        plain("../x"),
        plain("a/../../x"),
        special("link", tarfile.SYMTYPE, "/etc"),
        special("hard", tarfile.LNKTYPE, "good"),
        special("pipe", tarfile.FIFOTYPE),
        special("device", tarfile.CHRTYPE),
    ],
    ids=lambda member: str(member[0].name),
)
def test_an_archive_with_anything_but_plain_files_below_it_is_refused(
    agent: Any, member: tuple[tarfile.TarInfo, bytes]
) -> None:
    request = staging(archive_of(plain("good"), member))
    status, message = agent.refusal("stage", **request)
    assert status == 2
    assert repr(member[0].name) in message
    assert list((agent.root / "bundles").iterdir()) == []


@pytest.mark.parametrize("cut", [10, 100, -9], ids=str)
def test_a_torn_archive_is_refused_and_leaves_nothing(agent: Any, cut: int) -> None:
    whole = archive_of(*(plain(f"{n}", hashlib.sha512(b"%d" % n).digest() * 99) for n in range(9)))
    assert agent.refusal("stage", **staging(whole[:cut]))[0] == 2
    assert agent.refusal("stage", **{**staging(whole), "sha256": "0" * 64})[0] == 2
    assert agent.refusal("stage", **{**staging(whole), "archive_base64": "not base64!"})[0] == 2
    assert agent.refusal("stage", **staging(b"not an archive"))[0] == 2
    assert agent("stage", **staging(whole))["sent"] is True


def test_what_a_killed_unpacking_left_is_never_taken_for_whole_and_is_cleared_away(agent: Any) -> None:
    request = staging(archive_of(plain("a")))
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = agent.root / "bundles" / f".{request['sha256']}.{ended.pid}"
    left.mkdir(parents=True)
    assert agent("stage", sha256=request["sha256"], archive_base64=None)["present"] is False
    assert agent("stage", **request)["sent"] is True
    assert not left.exists()


def test_a_full_disk_leaves_no_half_bundle(agent: Any, small_disk: Path) -> None:
    agent.root = small_disk / "agent"
    request = staging(archive_of(plain("large", bytes(2 << 20))))
    status, message = agent.refusal("stage", **request)
    assert status == 1
    assert "No space left" in message
    assert list((agent.root / "bundles").iterdir()) == []
    assert agent("stage", sha256=request["sha256"], archive_base64=None)["present"] is False
