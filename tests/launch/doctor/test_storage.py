"""Where runs lie: tried from here with real files, and from a host with the interpreter that jobs have."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contracts.files import DiskFiles
from launch.doctor import slice_hosts
from launch.hosts import Agent, LocalTransport
from tests.launch.slices import make_target

MakeAgent = Callable[..., Agent]


@pytest.fixture
def target(make_agent: MakeAgent) -> Any:
    return make_target(
        [make_agent(lambda verb, request: {}, host="w-0")],
        [LocalTransport()],
        files=DiskFiles(),
        python=sys.executable,
    )


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    assert slice_hosts.from_here(DiskFiles(), str(tmp_path)).state == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_failure_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = slice_hosts.from_here(DiskFiles(), str(tmp_path / "file" / "runs"))
    assert said.state == "fail" and "Not a directory" in said.message and said.remedy


def test_a_host_tries_the_bucket_with_the_interpreter_of_its_jobs(target: Any, tmp_path: Path) -> None:
    said = slice_hosts.from_host(target, f"file://{tmp_path}")
    assert (said.state, said.host) == ("ok", "w-0")
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_that_a_host_may_not_write_is_a_failure_with_the_role(target: Any) -> None:
    said = slice_hosts.from_host(target, "file:///proc/nothing/here")
    assert said.state == "fail" and "roles/storage.objectUser" in said.remedy


def test_a_host_without_that_interpreter_is_sent_to_deploy(target: Any) -> None:
    said = slice_hosts.from_host(dataclasses.replace(target, python="~/none/python"), "file:///tmp")
    assert (said.state, said.remedy) == ("fail", "`fab deploy`")


def test_a_bucket_is_looked_at_once_where_the_runs_are_in_it(target: Any) -> None:
    def names(runs_url: str) -> list[str]:
        return [check.name for check in slice_hosts.checks(dataclasses.replace(target, runs_url=runs_url))]

    bucket = target.inventory.storage.bucket_url
    assert names(f"{bucket}/runs") == ["runs", "bucket from a host"]
    assert names("/share/runs") == ["runs", "bucket", "bucket from a host"]


def test_a_folder_that_only_looks_like_a_share_is_found_out(make_agent: MakeAgent) -> None:
    disks: list[dict[str, str]] = [{}, {}]

    def agent(host: str, disk: dict[str, str]) -> Agent:
        def answer(verb: str, request: dict[str, Any]) -> dict[str, Any]:
            if verb == "write":
                disk[request["path"]] = request["text"]
            elif verb == "remove":
                del disk[request["path"]]
            else:
                return {"files": [{"text": disk.get(request["paths"][0])}]}
            return {}

        return make_agent(answer, host=host)

    agents = [agent("w-0", disks[0]), agent("w-1", disks[0]), agent("w-2", disks[1])]
    target = make_target(agents, runs_url="/share/runs")
    assert [check.name for check in slice_hosts.checks(target)][:2] == ["runs", "share"]
    (said,) = slice_hosts.shared(target)
    assert (said.state, said.host) == ("fail", "w-2") and "--runs gs://" in said.remedy
    assert disks == [{}, {}]
    assert [each.state for each in slice_hosts.shared(make_target(agents[:2]))] == ["ok"]


def test_a_bucket_that_never_answers_is_a_failure_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    class Silent(DiskFiles):
        def write(self, path: str, data: bytes) -> None:
            answered.wait(60)

    monkeypatch.setattr(slice_hosts, "HERE_LIMIT_S", 0.05)
    said = slice_hosts.from_here(Silent(), "gs://b")
    answered.set()
    assert said.state == "fail" and said.message == "gs://b: no answer within 0 s"
