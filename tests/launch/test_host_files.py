"""A run's files on other hosts, read through whichever of them answers, in as few journeys as may be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contracts.run_directory import RunDirectory
from launch import remote_files
from launch.hosts import Agent, HostError
from launch.remote_files import HostFiles

MakeAgent = Callable[..., Agent]


@pytest.fixture
def share(tmp_path: Path) -> Path:
    return tmp_path


class Reading:
    """An agent's answers to `read`, of a folder's real files; how often it was asked."""

    def __init__(self, limit_bytes: int) -> None:
        self.asked, self._limit = 0, limit_bytes

    def __call__(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        self.asked += 1
        offsets = request["offsets"] or [0] * len(request["paths"])
        pairs = zip(request["paths"], offsets, strict=True)
        return {"files": [self._read(Path(path), offset) for path, offset in pairs]}

    def _read(self, path: Path, offset: int) -> dict[str, Any]:
        if not path.exists():
            return {"text": None, "offset": 0, "next_offset": 0, "size": 0}
        data = path.read_bytes()
        begin = max(0, len(data) + offset) if offset < 0 else min(offset, len(data))
        piece = data[begin : begin + self._limit]
        return {"text": piece.decode(), "offset": begin, "next_offset": begin + len(piece), "size": len(data)}


def test_several_files_are_read_in_one_journey_and_one_that_is_not_there_is_none(
    make_agent: MakeAgent, share: Path
) -> None:
    (share / "a").write_text("one")
    (share / "c").write_text("zwölf")
    answer = Reading(100)
    files = HostFiles((make_agent(answer),))
    found = files.read([str(share / name) for name in "abc"])
    assert found == [b"one", None, "zwölf".encode()]
    assert answer.asked == 1
    assert files.read([]) == []


def test_a_file_longer_than_an_answer_is_read_whole(make_agent: MakeAgent, share: Path) -> None:
    (share / "a").write_text("0123456789" * 10)
    assert HostFiles((make_agent(Reading(7)),)).read([str(share / "a")]) == [b"0123456789" * 10]


def test_metrics_are_read_from_where_the_last_look_ended(make_agent: MakeAgent, share: Path) -> None:
    directory = RunDirectory(str(share), HostFiles((make_agent(Reading(remote_files.CHUNK_BYTES)),)))
    assert directory.read_new_metrics(0) == ([], 0)
    (share / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    lines, offset = directory.read_new_metrics(-1000)
    assert ([line["step"] for line in lines], offset) == ([1, 2], 24)
    (share / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    assert directory.read_new_metrics(offset) == ([{"step": 3}], 36)
    (share / "metrics.jsonl").write_text('{"step": 9}\n')  # a resumed attempt has written it anew
    assert directory.read_new_metrics(36) == ([{"step": 9}], 12)


def test_where_the_first_host_does_not_answer_the_next_is_asked(make_agent: MakeAgent, share: Path) -> None:
    (share / "a").write_text("here")

    def gone(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        return {"ok": False, "error": {"message": "no route"}}

    silent, well = make_agent(gone, host="w-0"), make_agent(Reading(9), host="w-1")
    assert HostFiles((silent, well)).read([str(share / "a")]) == [b"here"]
    with pytest.raises(HostError, match="w-0: no route"):
        HostFiles((silent, silent)).list(str(share))
