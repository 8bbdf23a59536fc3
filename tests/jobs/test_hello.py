"""The smallest job is what docs/writing-jobs.md shows, and learns."""

import re
from pathlib import Path

import jax
import pytest

from jobs.jax_hello.config import Config, problems
from jobs.jax_hello.data import points
from jobs.jax_hello.train import first_state, take_step

ROOT = Path(__file__).resolve().parents[2]
FILES = {path.name: path.read_text() for path in sorted((ROOT / "jobs" / "jax_hello").glob("*.py"))}


def test_the_page_on_writing_a_job_shows_every_file_of_the_job_as_it_is() -> None:
    page = (ROOT / "docs" / "writing-jobs.md").read_text()
    shown = dict(
        re.findall(r"`jobs/jax_hello/(\w+\.py)`[^\n]*\n(?:[^\n]+\n)*\n```python\n(.*?)```", page, re.DOTALL)
    )
    assert shown == FILES
    assert sum(len(text.splitlines()) for text in FILES.values()) <= 90


def test_an_option_that_cannot_work_is_named_with_its_value() -> None:
    assert problems(Config(), devices=2) == []
    assert problems(Config(batch_size=5), devices=2) == [
        "--batch-size 5: must be a multiple of the 2 devices"
    ]
    assert problems(Config(steps=0), devices=1) == ["--steps 0: must be at least 1"]


@pytest.mark.usefixtures("two_devices")
def test_it_learns_the_curve() -> None:
    state, step_on = first_state(), jax.jit(take_step)
    errors = []
    for step in range(1, 301):
        state, error = step_on(state, *points(step, 64))
        errors.append(float(error))
    assert errors[0] > 1
    assert sum(errors[-20:]) / 20 < 0.02
