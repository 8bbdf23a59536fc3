"""The interpreter of jobs: found where it is, made whole or not at all, never taken from under a run."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends.vm import python_environment
from backends.vm.python_environment import Lock
from contracts.errors import RequestError
from launch.hosts import Agent, HostError
from tests.launch.slices import MakeAgent, make_target

CarryOut = Callable[..., list[dict[str, Any]]]
UV = """#!/bin/sh
case $1 in
  --version) echo uv 0 ;;
  venv) for new; do :; done; mkdir -p "$new/bin"; ln -s {python} "$new/bin/python" ;;
  pip) echo "$@" >>{log}; {pip} ;;
esac
"""


@pytest.fixture
def base(home: Path) -> Path:
    return home / ".local/share/tpu-stack"


@pytest.fixture
def make_uv(base: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A uv that makes an environment of links, and does as told when it should install."""

    def make(pip: str = "true") -> Path:
        program = base / "uv" / "bin" / "uv"
        program.parent.mkdir(parents=True, exist_ok=True)
        log = tmp_path / "uv.log"
        program.write_text(UV.format(python=sys.executable, log=log, pip=pip))
        program.chmod(0o755)
        return log

    return make


@pytest.fixture
def lock(tmp_path: Path) -> Lock:
    (tmp_path / "locks").mkdir()
    return Lock(name="jobs", files={}, sha256="ab" * 32, folder=str(tmp_path / "locks"))


def made(modules: list[str], lock: Lock) -> list[Any]:
    return [dataclasses.replace(python_environment.managed_environment(modules, lock), needs=())]


@pytest.mark.parametrize(
    ("python", "modules", "state", "said"),
    [
        (sys.executable, ["json", "email.mime"], "ok", "with all modules"),
        (sys.executable, ["json", "no_such", "json.none.such"], "failed", "lacks no_such, json.none.such"),
        ("~/none/python", [], "failed", "there is no ~/none/python"),
        ("/bin/false", [], "failed", "it does not say why"),
    ],
)
def test_somebody_elses_interpreter_is_only_looked_at(
    carry_out: CarryOut, python: str, modules: list[str], state: str, said: str
) -> None:
    (answer,) = carry_out([python_environment.existing_python(python, modules, "`make install`")])
    assert answer["state"] == state and answer["message"].endswith(said)
    assert answer["remedy"] == ("`make install`" if state == "failed" else "")


def test_our_environment_is_made_from_the_lock_with_hashes_whole_or_not_and_never_under_a_run(
    carry_out: CarryOut, make_uv: Callable[..., Path], lock: Lock, base: Path
) -> None:
    log, newer = make_uv(), dataclasses.replace(lock, sha256="cd" * 32)
    (answer,) = carry_out(made(["json"], lock))
    assert answer["state"] == "changed"
    assert "--require-hashes" in log.read_text() and f"{lock.folder}/jobs.txt" in log.read_text()
    assert carry_out(made(["json"], lock))[0]["state"] == "ok"
    assert len(log.read_text().splitlines()) == 1
    # A run is using it.
    python = str(base / "venv/bin/python")
    with subprocess.Popen([python, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1) as user:
        assert user.stdin is not None and user.stdout is not None
        user.stdout.readline()
        (answer,) = carry_out(made(["json"], newer))
        user.stdin.write(b"\n")
        user.stdin.close()
    assert answer["state"] == "failed" and f"pid {user.pid} is using" in answer["message"]
    # The index cannot be reached.
    make_uv("echo no route to the index; exit 1")
    (answer,) = carry_out(made(["json"], newer))
    assert (answer["state"], answer["message"]) == ("failed", "no route to the index")
    assert "Cloud NAT" in answer["remedy"]
    assert (base / "venv/tpu-stack-lock").read_text().strip() == lock.sha256
    make_uv()
    answers = carry_out(made(["json"], newer), under_way=True)
    assert answers[0]["message"].endswith("but made from another lock than this checkout's")
    assert answers[-1]["state"] == "changed"
    assert (base / "venv/tpu-stack-lock").read_text().strip() == newer.sha256
    assert sorted(path.name for path in base.iterdir()) == ["uv", "venv"]


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
    assert first.sha256 != second.sha256


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
    both = Lock(name="jobs", files={"jobs.txt": "a", "uv.txt": "b"}, sha256="ab", folder="/root/locks/ab")
    for writes in (["list", "write", "write"], ["list", "write", "write", "list"]):
        found = python_environment.install(agents, both, [None, None, None, known])
        assert found[:2] == [None, None] and found[3] is known
        assert found[2] is not None and found[2].reason == "Python 3.6 is too old"
        assert empty == half == {"jobs.txt": "a", "uv.txt": "b"}
        assert verbs(agents[0]) == writes
    # One that needs no lock gets its agent all the same.
    assert python_environment.install(agents[3:], None, [None]) == [None]
    assert verbs(agents[3]) == ["list"]
    assert verbs(agents[1]) == ["list", "write", "list"]


def verbs(agent: Agent) -> list[str]:
    return [verb for verb, _ in agent.link.asked]  # type: ignore[attr-defined]
