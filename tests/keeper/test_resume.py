"""A kept run goes on with the code that it ran with, whatever this checkout and the command's folder hold by then."""

import json
import time
from pathlib import Path

import pytest

from fabfile.command_line import fab as run_fab
from launch import jobs
from tests.waiting import until

LIMIT_S = 60.0
SCRIPT = """
import os, pathlib
before = pathlib.Path(os.environ["RUN_DIR"], "before")
if not before.exists():
    before.touch()
    raise SystemExit("the first attempt fails")
"""


def fab(*words: str) -> None:
    with pytest.raises(SystemExit) as end:
        run_fab([*words])
    assert not end.value.code


def test_a_failed_run_that_is_kept_again_after_a_stop_is_resumed_with_its_own_code_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TPU_STACK", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TPU_STACK_RUNS", str(tmp_path / "runs"))
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    mine = ("--hosts", "1", "--workdir", str(folder), "--keep", "--detach", "--", "python", "train.py")
    fab("train", *mine)
    (directory,) = (path for path in (tmp_path / "runs").iterdir() if path.name.startswith("command-"))
    until((directory / "result.json").exists, LIMIT_S)
    for command in ("unkeep", "stop", "keep"):
        fab(command, "latest")
    (folder / "train.py").write_text("raise SystemExit('this was edited meanwhile')")
    monkeypatch.setattr(jobs, "bundle", lambda _: pytest.fail("the checkout's code was read"))
    deadline, acts = time.monotonic() + LIMIT_S, list[str]()
    while acts[-1:] != ["ends"]:
        assert time.monotonic() < deadline, acts
        fab("keeper", "run")
        acts = [json.loads(line)["act"] for line in _lines(directory / "keeper.jsonl")]
    assert acts == ["resumes", "runs", "ends"]
    described = json.loads((directory / "run.json").read_text())
    first, second = (attempt["bundle"] for attempt in described["attempts"])
    assert first == second == described["code"]["bundle"]
    assert json.loads((directory / "result.json").read_text())["outcome"] == "done"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
