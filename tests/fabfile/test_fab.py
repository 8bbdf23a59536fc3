"""`fab` as a person types it: the commands in the order they are met, answers at once, mistakes as messages."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest

from fabfile.hints import Line
from fabfile.program import after_dashes, commands, main
from fabfile.program import fab as run_fab
from launch.jobs import CHECKOUT

HEAVY = (
    "jax",
    "flax",
    "optax",
    "orbax",
    "numpy",
    "tyro",
    "tokenizers",
    "tensorboard",
    "torch",
)
RUNNER = f"""
import atexit, sys
from fabfile.program import main
atexit.register(lambda: print("loaded:", *(name for name in {HEAVY!r} if name in sys.modules)))
main()
"""
TASKS = [
    *("train", "status", "logs", "stop", "recover", "runs", "fill-mask", "jobs"),
    *("deploy", "verify", "doctor", "trust", "run", "put", "get", "ssh", "ssh-config", "jupyter"),
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
        (
            ["train", "--job", "jax_hello", "--args", "--steps 20", "--", "--steps", "20"],
            (
                "error: --args '--steps 20' and -- --steps 20: the job's options are given twice; write them all in "
                "one of the two places"
            ),
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


STEPS = "`fab train` has no option {}; --steps is an option of {}, and a job's options come after --:\n  "
QUOTES = "--args takes the job's options as one word, in quotes; without quotes they come after --:\n  "
NO_ARGUMENT = '"{}" is not a command, nor an argument of `fab {}`; '


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("trian", '"trian" is not a command; did you mean `fab train`?'),
        ("help trian", '"trian" is not a command; did you mean `fab train`?'),
        ("zzz", '"zzz" is not a command; `fab --list` lists them'),
        ("--dry train", "`fab` has no option --dry; `fab help` lists those it has"),
        ("--job x train", "--job: the command comes first, its options after it: fab train --job …"),
        (
            "train --steps 200",
            STEPS.format("--steps", "flax_mlm and jax_hello") + "fab train --job flax_mlm -- --steps 200",
        ),
        (
            "train --job jax_hello --setps 200 --hosts 3",
            STEPS.format("--setps", "jax_hello") + "fab train --job jax_hello --hosts 3 -- --steps 200",
        ),
        (
            "train --resume latest -steps=200 -- --log-every 5",
            STEPS.format("-steps", "flax_mlm and jax_hello")
            + "fab train --resume latest -- --steps=200 --log-every 5",
        ),
        ("train --args --steps 9 --job x", QUOTES + "fab train --job x -- --steps 9"),
        ("train --args --detach", "--args needs a value: the job's own options in one word"),
        ("train --job x --detatch", "`fab train` has no option --detatch; did you mean --detach?"),
        ("train --job jax_hello -- --hosts 3", "--hosts is an option of `fab train`, not of the job"),
        ("train flax_mlm", NO_ARGUMENT.format("flax_mlm", "train") + "did you mean --job flax_mlm?"),
        ("train -job flax_mlm", "`fab train` has no option -job; did you mean --job?"),
        ("train --job", "--job needs a value: the job to train"),
        ("logs my-run", NO_ARGUMENT.format("my-run", "logs") + "did you mean --run my-run?"),
        ("logs -fx", "`fab logs` has no option -fx; `fab help logs` lists those it has"),
        ("deploy verfy", NO_ARGUMENT.format("verfy", "deploy") + "did you mean `verify`?"),
        (
            "run --group ls -l",
            NO_ARGUMENT.format("ls", "run")
            + "a command for the hosts comes after --:\n  fab run --group -- ls -l",
        ),
        ("status -- ls", "-- ls: only `fab train` and `fab run` take words after --"),
        ("recover", "`fab recover` needs RUN (a run of `fab runs`: its id, "),
        ("recover --detatch", "`fab recover` has no option --detatch; did you mean --detach?"),
        ("put --force here", "`fab put` needs TARGET (the path on the hosts"),
    ],
)
def test_a_slip_ends_with_2_and_says_what_was_meant(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run_fab(typed.split())
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {meant}")


@pytest.mark.parametrize(
    "typed",
    [
        *("help recover", "recover --help", "recover -h", "--help recover", "-h recover"),
        *("recover latest --stack dev -h", "recover --run latest --help", "runs recover --help"),
    ],
)
def test_help_of_a_command_is_shown_however_it_is_asked_for(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run_fab(typed.split())
    assert not end.value.code
    assert capsys.readouterr().out.startswith("Usage: fab recover RUN [--options]\n\nRestore the slice")


def test_what_is_right_is_not_taken_for_a_slip() -> None:
    for typed in (
        'train --args "--steps 2" --job x',
        "train --args --steps=2 --hosts 0-3,5 -da x",
        "train --job x -- --anything 3 -h",
        "train --job=x --max-restarts=3 --detach",
        "logs --lines -5 -f",
        "logs -f --run latest",
        "run -- ls -- -l",
        "recover --run latest",
        "put a b --force",
        "fill-mask - --run x",
        "deploy verify",
    ):
        words = shlex.split(typed)
        before = words[: words.index("--")] if "--" in words else words
        line = Line(
            words=before,
            after=after_dashes(words),
            commands=commands(),
            job_options=lambda: {"x": ["--anything"]},
        )
        assert line.check() is None, typed


def test_fab_works_wherever_it_is_called_but_not_on_another_checkouts_code(tmp_path: Path) -> None:
    environ = {**os.environ, "TPU_STACK_RUNS": str(tmp_path / "runs")}

    def runs(cwd: Path) -> subprocess.CompletedProcess[str]:
        argv = [str(Path(sys.executable).with_name("fab")), "runs"]
        return subprocess.run(
            argv, cwd=cwd, env=environ, capture_output=True, text=True, timeout=60, check=False
        )

    done = runs(tmp_path)
    assert (done.stdout.partition(";")[0], done.returncode) == ("no runs yet", 0)
    for file in ("other/fabfile/tasks.py", "other/launch/jobs.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    done = runs(tmp_path / "other" / "launch")
    assert (done.returncode, done.stderr.partition(";")[0]) == (
        2,
        f"error: this `fab` starts the code of {CHECKOUT}, and you are in another checkout, {tmp_path}/other",
    )


def test_the_installed_fab_is_this_one_and_fabrics_own_hands_over_to_it() -> None:
    (script,) = (each for each in distribution("tpu-stack").entry_points if each.name == "fab")
    assert script.load() is main
    for fabs in ([str(Path(sys.executable).with_name("fab"))], [sys.executable, "-m", "fabric"]):
        done = subprocess.run(
            [*fabs, "status", "--", "ls"],
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.stderr, done.returncode) == (
            "error: -- ls: only `fab train` and `fab run` take words after --\n",
            2,
        )


def test_a_jobs_options_are_shown_with_their_defaults(fab: Fab) -> None:
    text = fab("train", "--job", "flax_mlm", "--", "--help").stdout
    assert "flax_mlm  (framework jax)" in text
    assert "--sequence-length INT" in text
    assert text.partition("\nloaded")[0] == fab("jobs", "--job", "flax_mlm").stdout.partition("\nloaded")[0]
