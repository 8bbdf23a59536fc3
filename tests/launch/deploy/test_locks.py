"""Locks are sent only to hosts that make an environment from them and have not got them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import RequestError
from launch.deploy import python_environment
from launch.hosts import Agent, HostError
from tests.launch.slices import make_target

MakeAgent = Callable[..., Agent]


def test_only_an_environment_that_is_ours_is_made(make_agent: MakeAgent, tmp_path: Path) -> None:
    target = make_target([make_agent(lambda verb, request: {})])
    assert python_environment.needed(dataclasses.replace(target, python="/opt/python"), tmp_path) is None
    with pytest.raises(RequestError, match=r"requirements/tpu\.txt is not there"):
        python_environment.needed(target, tmp_path)
    (tmp_path / "requirements").mkdir()
    for name in ("tpu", "uv"):
        (tmp_path / "requirements" / f"{name}.txt").write_text(name)
    first = python_environment.needed(target, tmp_path)
    (tmp_path / "requirements" / "uv.txt").write_text("newer")
    second = python_environment.needed(target, tmp_path)
    assert first is not None and second is not None
    assert first.lock.sha256 != second.lock.sha256


def test_locks_are_sent_only_where_they_are_missing_and_an_error_hides_no_other_host(
    make_agent: MakeAgent,
) -> None:
    def disk(there: dict[str, str]) -> Agent:
        def answer(verb: str, request: dict[str, Any]) -> dict[str, Any]:
            if verb == "write":
                there[request["path"].rpartition("/")[2]] = request["text"]
                return {}
            return {"names": list(there)}

        return make_agent(answer)

    empty: dict[str, str] = {}
    half = {"uv.txt": "b"}
    refuse = {"ok": False, "error": {"message": "Python 3.6 is too old", "remedy": "r"}}
    known = HostError(host="w-3", reason="lost")
    agents = [disk(empty), disk(half), make_agent(lambda verb, request: refuse), disk({})]
    both = python_environment.Locks({"jobs.txt": "a", "uv.txt": "b"}, "jobs", "/root")
    for writes in (["list", "write", "write"], ["list", "write", "write", "list"]):
        found = python_environment.install(agents, both, [None, None, None, known])
        assert found[:2] == [None, None] and found[3] is known
        assert found[2] is not None and found[2].reason == "Python 3.6 is too old"
        assert empty == half == {"jobs.txt": "a", "uv.txt": "b"}
        assert verbs(agents[0]) == writes
    assert verbs(agents[1]) == ["list", "write", "list"]
    assert verbs(agents[3]) == []


def test_a_host_that_needs_no_lock_gets_its_agent_all_the_same(make_agent: MakeAgent) -> None:
    agent = make_agent(lambda verb, request: {"names": []})
    assert python_environment.install([agent], None, [None]) == [None]
    assert verbs(agent) == ["list"]


def verbs(agent: Agent) -> list[str]:
    return [verb for verb, _ in agent.link.asked]  # type: ignore[attr-defined]
