"""`fab` as a person types it, in this process, with a home, runs and a cache of the test's own."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from fabfile.command_line import fab as run_fab


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def fab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    monkeypatch.delenv("TPU_STACK", raising=False)
    for variable, folder in (("HOME", ""), ("XDG_CACHE_HOME", "cache"), ("TPU_STACK_RUNS", "runs")):
        monkeypatch.setenv(variable, str(tmp_path / folder))

    def run(*words: str) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            run_fab([*words])
        return Done(int(end.value.code or 0), *capsys.readouterr())

    return run
