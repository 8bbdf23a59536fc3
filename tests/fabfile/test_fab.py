"""`fab` as a person types it: the commands in the order they are met, answers at once, mistakes as messages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.jobs import CHECKOUT

HEAVY = ("jax", "flax", "optax", "orbax", "numpy", "tyro", "tokenizers", "tensorboard", "torch", "tensorflow")
RUNNER = f"""
import atexit, sys
from fabric.main import program
atexit.register(lambda: print("loaded:", *(name for name in {HEAVY!r} if name in sys.modules)))
program.run(["fab", *sys.argv[1:]])
"""
TASKS = [
    *("train", "status", "logs", "stop", "recover", "runs", "fill-mask", "jobs"),
    *("deploy", "verify", "doctor", "run", "put", "get", "ssh", "ssh-config", "jupyter"),
    *("build", "push", "images"),
    *("rehearsal", "accelerators"),
]

Fab = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def fab(tmp_path: Path) -> Fab:
    """Runs `fab` from the checkout with runs and cache in a folder of the test's own."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        places = {"TPU_STACK_RUNS": str(tmp_path / "runs"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        return subprocess.run(
            [sys.executable, "-c", RUNNER, *words],
            cwd=CHECKOUT,
            env={**os.environ, **places},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def test_the_tasks_are_listed_in_the_order_a_user_meets_them_each_in_one_line(fab: Fab) -> None:
    listed = [line.split(maxsplit=1) for line in fab("--list").stdout.splitlines() if line.startswith("  ")]
    assert [words[0] for words in listed] == TASKS
    assert all(len(words) == 2 and words[1].endswith(".") for words in listed)


@pytest.mark.parametrize("words", [["--list"], ["status"], ["runs"], ["accelerators"]])
def test_what_only_looks_loads_nothing_heavy_and_changes_nothing(
    fab: Fab, tmp_path: Path, words: list[str]
) -> None:
    done = fab(*words)
    assert done.returncode == 0
    assert done.stdout.endswith("loaded:\n")
    assert list(tmp_path.iterdir()) == []


def test_status_of_nothing_says_how_to_start_something(fab: Fab) -> None:
    assert fab("status").stdout.startswith(
        "no runs yet; `make train` or `fab train --job flax_mlm` starts one\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--job", "nope"], 'error: --job: "nope" is not a job; choose one of flax_mlm, jax_hello'),
        (["train"], "error: --job: say what to train; choose one of flax_mlm, jax_hello"),
        (
            ["train", "--job", "flax_mlm", "--hosts", "0"],
            "error: --hosts 0: must be a whole number from 1 to 64 on this machine",
        ),
        (
            ["train", "--job", "flax_mlm", "--hosts", "two"],
            "error: --hosts two: must be a whole number from 1 to 64 on this machine",
        ),
        (["logs", "--lines", "-5"], "error: --lines -5: must be a whole number of at least 0"),
        (
            ["accelerators", "--generation", "tpu7x"],
            "error: --generation: tpu7x is not offered by the Cloud TPU API, only by Compute Engine and GKE",
        ),
        (["accelerators", "--max-chips", "0"], "error: --max-chips 0: must be a whole number of at least 1"),
        (
            ["fill-mask", "no gap"],
            'error: "no gap" has no <mask>; write <mask> where a word is to be guessed',
        ),
        (["stop"], "error: --run: no run is active; `fab runs` lists them all"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(fab: Fab, words: list[str], said: str) -> None:
    done = fab(*words)
    assert (done.stderr, done.returncode) == (f"{said}\n", 2)


def test_a_jobs_options_are_shown_with_their_defaults(fab: Fab) -> None:
    text = fab("jobs").stdout
    assert "flax_mlm  (stack jax)" in text
    assert "--sequence-length INT" in text
