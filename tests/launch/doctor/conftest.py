"""A machine on which every command answers as a test says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from launch.doctor.workstation import Answer, Machine

MakeMachine = Callable[..., Machine]


@pytest.fixture
def make_machine(tmp_path: Path) -> MakeMachine:
    """answers: the beginning of a command → what it answers; any other is not installed."""

    def make(answers: Mapping[str, Answer | str] | None = None, **environ: str) -> Machine:
        def ask(argv: Sequence[str]) -> Answer:
            command = " ".join(argv)
            for beginning, answer in (answers or {}).items():
                if command.startswith(beginning):
                    return Answer(exit_code=0, stdout=answer) if isinstance(answer, str) else answer
            return Answer(exit_code=None)

        return Machine(environ=environ, home=tmp_path, checkout=tmp_path, cache_dir=tmp_path, ask=ask)

    return make
