"""A job is found by its name and its options are read by its own config; what does not fit is told."""

import dataclasses
import hashlib
import io
import os
import shutil
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import RequestError
from jobs.flax_mlm.config import GROUPS, Config
from launch import jobs
from launch.jobs import CHECKOUT


def said(*arguments: str) -> str:
    with pytest.raises(RequestError) as error:
        jobs.find("flax_mlm").parse(arguments)
    return str(error.value)


@pytest.mark.parametrize(
    "name", ["flax_mln", "FLAX_MLM", "runtime", "", "../jobs/flax_mlm", "flax_mlm.config"]
)
def test_a_job_is_a_package_that_can_be_started_and_another_name_is_answered_with_those_there_are(
    name: str,
) -> None:
    assert {"flax_mlm", "jax_hello"} <= {*jobs.names()}
    assert not {"runtime", "glue", "serve"} & {*jobs.names()}
    assert (jobs.find("flax_mlm").name, jobs.find("flax_mlm").framework) == ("flax_mlm", "jax")
    with pytest.raises(RequestError) as error:
        jobs.find(name)
    assert str(error.value).startswith(f'--job: "{name}" is not a job; choose one of flax_mlm')


@pytest.mark.parametrize(
    ("typed", "lines"),
    [
        ("--steps x --model huge --lr", ["--steps x: must be a whole number",
         "--model huge: choose one of tiny, small, base, large", "--lr: there is no such option"]),
        ("--model smal --sequence_length= --stepz 3", [
         "--model smal: choose one of tiny, small, base, large; did you mean small?",
         "--sequence_length '': must be a whole number", "--stepz 3: there is no such option; did you mean --steps?"]),
        ("--steps --seed 1.5 --seed 1e3 --seed 1_0", ["--steps: needs a value", "--seed 1.5: must be a whole number",
         "--seed 1e3: must be a whole number", "--seed 1_0: must be a whole number"]),
        ("--learning-rate fast --learning-rate -", ["--learning-rate fast: must be a number",
         "--learning-rate -: must be a number"]),
        ("--remat true --no-remat=no", ["--remat true: takes no value; write --remat or --no-remat",
         "--no-remat no: takes no value; write --remat or --no-remat"]),
        ("text.txt --data a steps=3 b", ["text.txt: is no option", "steps 3: is no option; did you mean --steps?",
         "b: is no option"]),
        ("-steps 3 --data -x", ["-steps 3: there is no such option; did you mean --steps?", "--data: needs a value",
         "-x: there is no such option"]),
        ("–steps 3 --data “my", ["–steps: begins with – (en dash), as copied from a page; type two hyphens: --steps",
         "“my: begins with “ (left double quotation mark), which a shell does not read as a quote; type \""]),
        # What is out of its range too.
        ("--dtype fp16 --steps 0 --seed -5", ["--dtype fp16: choose one of auto, float32, bfloat16",
         "--steps 0: must be at least 1", "--seed -5: must be between 0 and 4294967295"]),
    ],
)  # fmt: skip
def test_every_mistake_in_a_jobs_options_is_a_line_of_its_own(typed: str, lines: list[str]) -> None:
    assert said(*typed.split(" ")).splitlines() == [*lines, "all options: fab jobs --job flax_mlm"]


def test_options_are_read_as_they_may_be_typed() -> None:
    typed = [
        "--learning_rate=-1e-3",
        "--seed",
        "-5",
        "--tokenizer",
        "None",
        "--no_remat",
        "--data",
        "a=b",
        "--data=-x",
    ]
    assert jobs.find("flax_mlm").parse(typed, base=Config(tokenizer="t.json", remat=True, steps=7)) == Config(
        learning_rate=-1e-3, seed=-5, tokenizer=None, remat=False, data="-x", steps=7
    )


def test_an_option_without_a_default_is_told_to_whoever_writes_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclasses.dataclass(frozen=True)
    class Needy:
        data: str
        steps: int = 3

    module = ModuleType("jobs.needy.config")
    monkeypatch.setattr(module, "Config", Needy, raising=False)
    monkeypatch.setitem(sys.modules, "jobs.needy", ModuleType("jobs.needy"))
    monkeypatch.setitem(sys.modules, "jobs.needy.config", module)
    job = jobs.Job(name="needy", summary="", framework="jax", frameworks=("jax",))
    with pytest.raises(RequestError, match=r"jobs/needy/config\.py: the option data has no default"):
        job.parse(["--data", "x"])


def test_a_jobs_help_names_every_option_and_each_heading_stands_before_its_first_one() -> None:
    text = jobs.find("flax_mlm").help()
    assert all(f"--{field.name.replace('_', '-')}" in text for field in dataclasses.fields(Config))
    assert {"--steps", "--remat", "--no-remat"} <= {*(options := jobs.find("flax_mlm").options())}
    assert "--no-steps" not in options
    lines = [line.strip() for line in text.splitlines()]
    for field, heading in GROUPS.items():
        assert lines[lines.index(heading) + 1].startswith(f"--{field.replace('_', '-')} ")


def test_a_run_that_is_resumed_has_its_own_options_whatever_the_defaults_are_today() -> None:
    job = jobs.find("flax_mlm")
    stored = {
        **dataclasses.asdict(Config()),
        "mask_share": 0.15,
        "learning_rate": 1e-3,
        "tokenizer": "my.json",
    }
    resumed = job.parse([], base=job.stored_config("r", stored))
    assert dataclasses.asdict(resumed) == stored
    assert job.parse(job.arguments(resumed)) == resumed
    assert job.arguments(resumed) == [
        *("--tokenizer", "my.json"),
        *("--learning-rate", "0.001"),
        *("--mask-share", "0.15"),
    ]


@given(
    st.fixed_dictionaries(
        {
            "learning_rate": st.none() | st.floats(1e-9, 1e9),
            "data": st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(
                lambda text: text != "None"
            ),
            "seed": st.integers(0, 2**32 - 1),
            "vocab_size": st.none() | st.integers(300, 10**6),
            "model": st.sampled_from(["tiny", "small", "base", "large"]),
            "remat": st.booleans(),
        }
    )
)
def test_every_config_survives_the_way_through_words(options: dict[str, Any]) -> None:
    job = jobs.find("flax_mlm")
    config = Config(**options)
    assert job.parse(job.arguments(config)) == config


def test_a_run_of_an_older_checkout_is_resumed_where_its_options_are_still_known() -> None:
    job, stored = jobs.find("flax_mlm"), dataclasses.asdict(Config())
    with pytest.raises(RequestError, match="no longer knows: momentum"):
        job.stored_config("r", {**stored, "momentum": 0.9})
    del stored["clip_norm"]  # an option that has come since has its default
    assert job.changes_on_resume(stored, job.stored_config("r", stored)) == []


FILES = {
    "jobs/__init__.py": b"",
    "jobs/one/__main__.py": b"print(1)\n",
    "jobs/one/data/words.txt": b"\xff\x00",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    # Under a name that is left out inside a bundle: what lies around a checkout is no matter.
    root = tmp_path / "__pycache__" / "checkout"
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def unpacked(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def test_a_bundle_is_named_by_its_files_alone_whatever_their_times_modes_and_place(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        (checkout / f"jobs/one/{number * 37 % 31:02}.py").touch()
    first = jobs.bundle(checkout)
    assert first.sha256 == hashlib.sha256(first.archive).hexdigest()
    files = unpacked(first.archive)
    assert {name: files[name] for name in FILES} == FILES
    assert len(files) == 33 and list(files) == sorted(files, key=lambda name: name.split("/"))
    for folder in ("__pycache__", ".mypy_cache"):  # what tools leave behind is not sent
        (checkout / "jobs/one" / folder).mkdir()
        (checkout / "jobs/one" / folder / "x").write_text("x")
    (checkout / "jobs/one/dangling").symlink_to("nowhere")
    for number, path in enumerate(sorted(checkout.rglob("*.py"), reverse=True)):
        os.utime(path, (number, number))
        path.chmod(0o700)
    assert jobs.bundle(checkout) == first
    shutil.copytree(checkout, tmp_path / "elsewhere", symlinks=True)
    monkeypatch.setattr("time.time", lambda: 1e9)
    assert jobs.bundle(tmp_path / "elsewhere") == first
    main = checkout / "jobs/one/__main__.py"
    main.write_bytes(b"print(2)\n")
    renamed = tmp_path / "elsewhere/jobs/one/main.py"
    (tmp_path / "elsewhere/jobs/one/__main__.py").rename(renamed)
    assert len({first, jobs.bundle(checkout), jobs.bundle(tmp_path / "elsewhere")}) == 3


def test_data_among_the_code_is_refused_with_its_name(checkout: Path) -> None:
    with (checkout / "jobs/one/model.bin").open("wb") as file:
        file.truncate(17 * 2**20)
    with pytest.raises(
        RequestError, match=r"jobs hold 17 MiB, more than the 16 MiB .* jobs/one/model.bin: keep"
    ):
        jobs.bundle(checkout)


def test_this_checkouts_bundle_holds_every_job_and_of_the_launching_side_the_policy() -> None:
    names = unpacked(jobs.bundle(CHECKOUT).archive)
    assert {"jobs/flax_mlm/__main__.py", "jobs/runtime/process.py", "contracts/errors.py"} <= names.keys()
    others = {name for name in names if name.partition("/")[0] not in ("contracts", "host", "jobs")}
    assert others == set(jobs.POLICY)
