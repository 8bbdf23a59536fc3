"""A supervisor whose attempt is superseded ends its process and writes nothing into the run directory."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from contracts import fencing
from contracts.run_directory import RunDirectory
from host.agent import start
from host.agent.attempt_process import Process
from host.agent.protocol import Refused
from host.agent.storage.run_files import RunFiles
from tests.waiting import until

SAID = "attempt 1 of this run has begun since; attempt 0 ends"


def committed(run_dir: Path) -> dict[str, str]:
    """All files that are nobody's log or token, and have their name."""
    aside = {"logs", "attempts", ".unfinished"}
    paths = {path.relative_to(run_dir): path for path in run_dir.rglob("*") if path.is_file()}
    return {str(name): path.read_text() for name, path in paths.items() if name.parts[0] not in aside}


def begin_another(agent: Any) -> dict[str, str]:
    """Begin another attempt, of which host 0 has said something; return what lies there then."""
    newer = fencing.take(RunDirectory(str(agent.run_dir)), 1, launch=1)
    newer.write_text("heartbeats/host-0.json", "newer")
    return committed(agent.run_dir)


def test_a_process_whose_attempt_is_superseded_is_ended_within_a_second_and_nothing_is_put_on_record(
    agent: Any,
) -> None:
    agent.start_and_hear('beat("stepping", 3); say("up"); time.sleep(60)')
    before = begin_another(agent)
    ended = agent.ended()
    assert (ended["signal"], ended["reason"]) == (signal.SIGKILL, f"stopped because {SAID}")
    assert committed(agent.run_dir) == before
    assert SAID in (agent.state_dir() / "supervisor.log").read_text()


def test_one_that_fails_just_then_does_not_say_so_of_the_newer_attempt(agent: Any) -> None:
    wait = 'say("up"); import os\nwhile not os.path.exists(os.environ["RUN_DIR"] + "/heartbeats/host-0.json"): pass\n'
    agent.start_and_hear(f"{wait}sys.exit(1)")
    before = begin_another(agent)
    assert agent.ended()["state"] == "exited"
    assert committed(agent.run_dir) == before


def test_an_agent_starts_no_older_attempt_than_it_has_seen(agent: Any) -> None:
    agent.start('say("up")', attempt=2)
    refused = agent.refusal("start", **agent.start_request('say("up")', attempt=1))
    assert refused == "start: attempt 2 of run-1 has begun on this host; attempt 1 is older"
    assert agent.start('say("up")', attempt=2)["already"]
    assert not agent.start('say("up")', 1, attempt=2, num_processes=2)["already"]
    until(lambda: (agent.run_dir / "logs/2/host-0.log").exists())


def test_a_start_reads_of_all_earlier_attempts_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attempt in range(12):
        (tmp_path / "runs" / "run-1" / f"{attempt}-0").mkdir(parents=True)
    read: list[str] = []

    def read_json(path: str) -> dict[str, Any]:
        read.append(path)
        return {}

    monkeypatch.setattr(start, "read_json", read_json)
    start.refuse_older(Process(str(tmp_path), "run-1", 11, 0), "/run")
    assert read == []
    with pytest.raises(Refused, match="attempt 11 of run-1 has begun on this host; attempt 9 is older"):
        start.refuse_older(Process(str(tmp_path), "run-1", 9, 0), "/run")
    assert len(read) == 1


def test_a_copy_of_a_run_in_another_folder_is_another_run_once_the_first_has_ended(
    agent: Any, tmp_path: Path
) -> None:
    def of_copy(script: str) -> dict[str, Any]:
        request: dict[str, Any] = agent.start_request(script, attempt=1)
        return {**request, "env": {**request["env"], "RUN_DIR": str(tmp_path / "copy")}}

    agent.start_and_hear('say("up"); time.sleep(60)', attempt=1)
    refused = agent.refusal("start", **of_copy('say("up")'))
    assert refused == f"start: attempt 1 of run-1 runs on this host for its copy {agent.run_dir}"
    os.kill(agent.status(attempt=1)["pid"], signal.SIGKILL)
    agent.ended(attempt=1)
    agent.start('say("up")', attempt=2)
    assert not agent("start", **of_copy('say("up")'))["already"]
    assert agent("start", **of_copy('say("up")'))["already"]


@pytest.mark.parametrize("put", ["texts", "once"])
def test_a_supervisor_that_is_frozen_between_its_check_and_its_writing_changes_nothing(
    tmp_path: Path, put: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(str(tmp_path))
    fencing.take(directory, 0, launch=0)
    files = RunFiles({"run_dir": str(tmp_path), "env": {}, "attempt": 0})
    names = ("replace", "link") if put == "once" else ("replace",)
    originals = {name: getattr(os, name) for name in names}

    def frozen(beside: str, path: str) -> None:
        for name, original in originals.items():
            monkeypatch.setattr(os, name, original)
        fencing.take(directory, 1, launch=1).write_text("other.json", "newer")
        originals[names[-1]](beside, path)

    monkeypatch.setattr(os, names[-1], frozen)
    texts = {"result.json": json.dumps({"outcome": "failed"})}
    assert files.publish(*(({}, texts) if put == "once" else (texts,)))
    assert committed(tmp_path) == {"other.json": "newer"}
    assert files.superseded == SAID
