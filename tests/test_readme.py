"""The README's commands, as they stand there: run in a clone as a newcomer would, or listed here with the reason.

`make test-all` runs them. What they print is shown where one fails; `pytest -s tests/test_readme.py` shows it at once.
"""

import fnmatch
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tools import stand_in_base

ROOT = Path(__file__).resolve().parent.parent
CLONE = "git clone <this repository> tpu-stack && cd tpu-stack"
ENTER = "source .venv/bin/activate"

AFTER_A_RUN = (
    *("make", "make install", "fab --list", "fab help train", "fab jobs", "fab accelerators", "fab images"),
    "fab train --workdir examples/jax -- python train.py",
    "fab train examples/jax/train.py",
    *(
        "fab status",
        "fab runs",
        "fab logs --follow",
        'fab predict latest "The <mask> of the list."',
        "fab doctor",
    ),
)
"""Run after `make train`, for what it has left behind."""
IN_A_REHEARSAL = (
    *("fab rehearsal up", "fab rehearsal acts", "fab deploy", "fab verify", "fab doctor", "fab ssh-config"),
)
"""Run one after the other with $TPU_STACK, as the README says, but on a rehearsal. `make rehearse` trains there."""
ON_A_CLUSTER = "make rehearse KUBERNETES=1"
ON_COMPUTE_ENGINE = "make rehearse PROVISIONING=compute"
SERVE = "fab serve latest"
CURL = (
    "curl http://127.0.0.1:8000/v1/predict -H 'content-type: application/json' "
    """-d '{"inputs": ["Return the <mask> of the list."]}'"""
)
RUN = {
    CLONE,
    ENTER,
    SERVE,
    CURL,
    "make train",
    "make preview",
    "make rehearse",
    *AFTER_A_RUN,
    *IN_A_REHEARSAL,
    ON_A_CLUSTER,
    ON_COMPUTE_ENGINE,
}

ACCOUNT = "needs a Google Cloud project and a person who has logged in"
OWN_STACK = "means a stack on Google Cloud; IN_A_REHEARSAL does the same with a rehearsal's"
BY_CI = ".ci/run runs it, this test included"
BY_REHEARSE = "`make rehearse` types it"
FORM = "the form of a command that wants more words; run with them by "
NOT_RUN = {
    "make check": BY_CI,
    "make test": BY_CI,
    "gcloud *": ACCOUNT,
    "pulumi *": ACCOUNT + "; tests/engine and tests/rehearsal run the real engine without",
    "cp Pulumi.example.yaml Pulumi.dev.yaml": "for a project of one's own; `make preview` runs the example",
    "export TPU_STACK=dev": OWN_STACK,
    "fab train --job flax_mlm --max-restarts 5 -- --model base --steps 100000": "takes days on two cores",
    "fab train --job flax_mlm": "`make train` runs it",
    "fab train --job flax_mlm -- --data my_texts/ --model small --steps 10000": "takes an hour on two cores",
    "fab train --resume latest": "wants a run that was stopped; tests/runs/test_stopped.py",
    "fab stop": "wants a run that is active; tests/runs/test_stopped.py",
    "fab train": FORM + "`make train`",
    "fab zombies": FORM + "tests/keeper/test_zombies.py",
    "fab costs": FORM + "tests/launch/test_pricing.py",
    "fab fit --job flax_mlm --accelerator v5litepod-4 -- --model base --batch-size 256 --sequence-length 128 "
    "--dropout 0.1": "compiles for minutes; tests/bench/test_tpu.py, nightly",
    "fab capacity": "of a stack on Google Cloud; tests/keeper/test_capacity_history.py",
    "fab train … --runtime docker": FORM + "tests/runs/test_docker.py",
    "fab keep RUN": FORM + "a stack with a keeper; tests/keeper/test_world.py",
    "fab recover RUN": FORM + "`make rehearse`",
    "fab recover latest": BY_REHEARSE,
    "fab build": FORM + "tests/images/test_build.py",
    "fab push": FORM + "tests/rehearsal/daemon/test_rehearsal_up.py",
    "fab submit --job flax_mlm": "`make train` is the same run; tests/keeper/test_queue.py",
    "fab queue work": "wants a queue; tests/keeper/test_queue.py",
    "fab sweep --job flax_mlm --grid learning-rate=1e-4,3e-4 --seeds 3": "takes ten minutes on two cores; "
    "tests/keeper/test_queue.py",
    "fab compare RUN RUN": FORM + "tests/launch/test_pricing.py",
    "fab stacks": "wants a run that is active; tests/runs/test_live.py",
    "fab profile": "wants a run that is active; tests/runs/test_live.py",
    "fab dashboard": "runs until a person ends it; tests/console/dashboard/test_dashboard_server.py",
    "fab export RUN --to FOLDER": FORM + "tests/console/models/test_hub_export.py",
    "fab rm RUN": FORM + "tests/console/test_removal.py",
    "fab prune --keep 20": "removes runs; tests/console/test_removal.py",
    "fab run -- COMMAND": FORM + "tests/console/hosts/test_execute.py",
    "fab put": FORM + "tests/console/hosts/test_copies.py",
    "fab get": FORM + "`make rehearse`",
    "fab ssh": "a shell for a person; tests/backends/vm/test_transport.py",
    "fab jupyter": "runs until a person ends it; tests/console/hosts/test_notebook.py",
}
"""Why a command is not run here, and where the same is; a pattern for those of other programs."""

PROGRAMS = "make|fab|pulumi|gcloud|git|cp|export|source|python|docker|curl|pip|ssh"
SHOWN = ("fetching uv", "memory    fits:", "Cost at list prices:", "config ──►", "runs/flax_mlm-")
"""How the README's blocks begin that are no commands: what a command prints, and pictures."""


def commands(readme: str) -> list[str]:
    """All that the README tells one to type: lines of its blocks, and what stands between backticks in its text."""
    found, in_text = [], []
    for block in re.split(r"\n\s*\n", readme):
        lines = block.splitlines()
        is_block = all(line.startswith("    ") for line in lines)
        if is_block and not block.strip().startswith(SHOWN):
            found += [line.partition(" #")[0].strip() for line in lines]
        elif not is_block:
            in_text.append(block)
    inline = re.findall(rf"`((?:{PROGRAMS})\b[^`]*)`", "\n".join(in_text))
    programs = {"fab", "pulumi", "gcloud"}
    return sorted({*found, *(re.sub(r"\s+", " ", each) for each in inline if each not in programs)})


def test_every_command_of_the_readme_is_run_here_or_listed_with_its_reason() -> None:
    told = commands((ROOT / "README.md").read_text())
    assert {"make train", "make preview", "make rehearse", "fab rehearsal up", CLONE} <= set(told)

    def matches(command: str) -> list[str]:
        listed = (*RUN, *NOT_RUN)
        return [each for each in listed if command == each or fnmatch.fnmatchcase(command, each)]

    assert [each for each in told if not matches(each)] == [], (
        "run these in this file, or list them with the reason"
    )
    stale = {*NOT_RUN} - {listed for command in told for listed in matches(command)}
    assert stale == set(), "the README does not say these any more"
    named = re.findall(r"tests/[\w/]+\.py", " ".join(NOT_RUN.values()))
    assert [path for path in named if not (ROOT / path).exists()] == []


class Newcomer:
    """Somebody who has cloned the checkout and types into a shell there, with `environ` set besides."""

    def __init__(self, checkout: Path, **environ: str) -> None:
        self.checkout = checkout
        without = {"VIRTUAL_ENV", "PYTHONPATH", "TPU_STACK", "TPU_STACK_RUNS"}
        self.environ = {
            **{name: value for name, value in os.environ.items() if name not in without},
            "NO_COLOR": "1",
            "COLUMNS": "160",
            **environ,
        }

    def types(self, command: str, says: str = "", limit_s: float = 600) -> str:
        """What it prints, which has `says` in it, once it has ended well."""
        print(f"$ {command}", flush=True)
        began_s = time.monotonic()
        entered = "" if command.startswith(("git ", "make")) else f"{ENTER} && "
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(
                ["bash", "-c", entered + command],
                cwd=self.checkout,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.returncode is None:
                    self._end(process)
            output.seek(0)
            said = output.read()
        print(f"{said}\n({time.monotonic() - began_s:.1f} s)", flush=True)
        assert code is not None, f"`{command}` has not ended after {limit_s:.0f} s"
        assert code == 0, f"`{command}` ended with exit code {code}"
        assert says in said, f"`{command}` has not said {says!r}"
        return said

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """With Ctrl-C first, so that what it has begun is taken away."""
        os.killpg(process.pid, 2)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


@pytest.fixture(scope="module")
def clone() -> Iterator[Path]:
    """A fresh clone, with what is not committed yet copied over it."""
    with tempfile.TemporaryDirectory(prefix="tpu-stack-readme-") as folder:
        Newcomer(Path(folder)).types(CLONE.replace("<this repository>", str(ROOT)))
        made = Path(folder) / "tpu-stack"
        changed = ["git", "-C", str(ROOT), "ls-files", "-z", "--modified", "--others", "--exclude-standard"]
        for name in subprocess.run(changed, check=True, capture_output=True, text=True).stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, made / name)
            elif name:
                (made / name).unlink(missing_ok=True)
        yield made


@pytest.fixture(scope="module")
def base_image() -> Mapping[str, str]:
    """What the docs say to set where no image registry can be reached."""
    base = stand_in_base.chosen(os.environ, print)
    return {stand_in_base.VARIABLE: base} if base else {}


@pytest.fixture(scope="module")
def trained(clone: Path) -> Newcomer:
    person = Newcomer(clone)
    said = person.types("make train", "below the unigram baseline", limit_s=1500)
    for words in ("installing", "preflight passed on 2 hosts", "all joined after", " is done", "export "):
        assert words in said, words
    return person


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_make_train_trains_a_model_better_than_the_unigram_baseline(trained: Newcomer) -> None:
    assert len(list((trained.checkout / "runs").glob("*/export/model.safetensors"))) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_can_be_asked_after_a_run_is_answered(trained: Newcomer) -> None:
    for command in AFTER_A_RUN:
        trained.types(command, limit_s=300)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_that_is_served_answers_and_ctrl_c_ends_the_server(trained: Newcomer) -> None:
    with subprocess.Popen(
        ["bash", "-c", f"{ENTER} && exec {SERVE}"],
        cwd=trained.checkout,
        env=trained.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            said = ""
            while "Ctrl-C" not in said:
                line = server.stdout.readline()
                assert line, said
                said += line
            assert "curl http://127.0.0.1:8000/v1/predict" in said
            trained.types(CURL, '"best":[{"text":', limit_s=60)
        finally:
            server.send_signal(2)
            rest = server.communicate(timeout=120)[0]
        assert (server.returncode, " is done" in rest) == (0, True), rest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_make_preview_shows_what_would_be_made_and_what_it_costs(clone: Path) -> None:
    Newcomer(clone).types("make preview", "Cost at list prices", limit_s=540)


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_a_rehearsal_takes_the_commands_that_are_for_a_stack(
    clone: Path, base_image: Mapping[str, str]
) -> None:
    with tempfile.TemporaryDirectory(prefix="tpu-stack-readme-") as folder:
        own = {"TPU_STACK": "rehearsal", "TPU_STACK_REHEARSAL": f"{folder}/rehearsal"}
        person = Newcomer(clone, **base_image, **own)
        person.types("make install")
        try:
            for command in IN_A_REHEARSAL:
                person.types(command, limit_s=1200)  # the first one may have to make the image of the hosts
        finally:
            person.types("fab rehearsal down")


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_make_rehearse_comes_true(clone: Path, base_image: Mapping[str, str]) -> None:
    Newcomer(clone, **base_image).types("make rehearse", "All of it came true", limit_s=1600)


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_make_rehearse_comes_true_on_a_cluster_too(clone: Path, base_image: Mapping[str, str]) -> None:
    Newcomer(clone, **base_image).types(ON_A_CLUSTER, "All of it came true", limit_s=1600)


@pytest.mark.nightly
@pytest.mark.timeout(1700)
def test_make_rehearse_comes_true_on_compute_engine_too(clone: Path, base_image: Mapping[str, str]) -> None:
    Newcomer(clone, **base_image).types(ON_COMPUTE_ENGINE, "All of it came true", limit_s=1600)
