"""What a rehearsal tells is for its user only, whole, and only believed while its daemon lives."""

import json
from pathlib import Path

import filelock
import pytest

from rehearsal import state
from rehearsal.state import RehearsalError, State

READY = State(
    phase="ready", pid=1, socket="/nook/door", hosts=2, inventory='{"version": 1}', user="sa_rehearsal",
    environment={"STORAGE_EMULATOR_HOST": "http://172.18.255.254:4443"}, python="/opt/python", devices=("/dev/x*",),
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "rehearsal"


@pytest.fixture
def environ(folder: Path) -> dict[str, str]:
    folder.mkdir()
    return {state.FOLDER_VARIABLE: str(folder), "PATH": "/usr/bin:/bin", "no_proxy": "corp"}


def test_a_rehearsal_that_is_not_up_not_ready_or_of_another_version_is_not_believed(
    folder: Path, environ: dict[str, str]
) -> None:
    with pytest.raises(RehearsalError, match="`fab rehearsal up` starts one"):
        state.require(folder)
    state.write(folder, READY)
    with pytest.raises(RehearsalError, match="fab rehearsal down"):  # its daemon was killed
        state.open_rehearsal(environ)
    state.write(folder, State(phase="starting", pid=1, socket="", hosts=2))
    with filelock.FileLock(folder / state.LOCK), pytest.raises(RehearsalError, match="starting, not ready"):
        state.require(folder)
    for text in ("{", "[]", '{"version": 1}', json.dumps({"version": 99})):
        (folder / state.FILE).write_text(text)
        with pytest.raises(RehearsalError, match="fab rehearsal down"):
            state.read(folder)
