"""The runs and agents of tests/launch, which tests here use too."""

from tests.launch.conftest import beat, make_agent, program, runs_dir, write_run

__all__ = ["beat", "make_agent", "program", "runs_dir", "write_run"]
