"""A request that cannot be carried out is answered with value, rule and remedy, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from contracts.errors import RequestError
from jobs.flax_mlm.config import Config
from launch import follow, jobs, targets
from launch import launch as launching
from launch.hosts import HostsError
from launch.runs import Run
from launch.target import Target

WriteRun = Callable[..., Run]
DEVICES = {"gpu": Path("/dev/nvidia0"), "tpu": Path("/dev/accel0")}
TINY = "--vocab-size 300 --sequence-length 16 --batch-size 4 --eval-fraction 0.3"


def train(*, hosts: str | None = None, platform: str | None = None, **changed: Any) -> int:
    def open_target(like: Run | None) -> Target:
        return targets.resolve(targets.Wanted(hosts=hosts, platform=platform), like)

    wanted: dict[str, Any] = {"job": "flax_mlm", "detach": True, "hang_floor_s": 120.0, "restarts": 0}
    absent = dict.fromkeys(("resume", "name"))
    arguments = follow.words(changed.pop("arguments", ""), ())
    return follow.train(open_target, **{**wanted, **absent, **changed, "arguments": arguments})


def refused(runs_dir: Path, **changed: Any) -> str:
    before = sorted(path.name for path in runs_dir.rglob("*")) if runs_dir.exists() else []
    with pytest.raises(RequestError) as error:
        train(**changed)
    assert (sorted(path.name for path in runs_dir.rglob("*")) if runs_dir.exists() else []) == before
    return str(error.value)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    random, path = Random(0), tmp_path / "text.jsonl"
    texts = (
        " ".join(random.choices(["the", "cat", "sat", "on", "a", "mat"], k=30)) + f" {n}" for n in range(20)
    )
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_without_a_job_the_answer_is_the_jobs_there_are(runs_dir: Path) -> None:
    assert refused(runs_dir, job=None) == "--job: say what to train; choose one of flax_mlm, jax_hello"


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"job": "flax_mln"}, ['--job: "flax_mln" is not a job', 'did you mean "flax_mlm"?']),
        ({"platform": "cuda"}, ['--platform: "cuda" is not a platform; choose one of cpu, gpu, tpu']),
        ({"hosts": "0"}, ["--hosts 0: must be a whole number from 1 to 64"]),
        ({"hosts": "-1"}, ["--hosts -1: must be a whole number from 1 to 64"]),
        ({"hosts": "1000"}, ["--hosts 1000: must be a whole number from 1 to 64"]),
        ({"arguments": '--data "my text'}, ["--args: '--data \"my text' has a quote that is not closed"]),
        ({"arguments": "--stepz 3"}, ["flax_mlm does not take --stepz 3", "--steps"]),
        ({"arguments": "--steps many"}, ["--steps", "many"]),
        ({"arguments": "--steps 0"}, ["--steps 0: must be at least 1"]),
        ({"arguments": "--sequence-length 600"}, ["--sequence-length 600: the model takes at most", "512"]),
        ({"arguments": "--batch-size 5"}, ["--batch-size 5: is shared out over 2 devices", "choose 4 or 6"]),
        ({"arguments": "--batch-size 5", "hosts": "3"}, ["over 3 devices", "choose 3 or 6"]),
        ({"arguments": "--steps 0 --dropout 2 --seed -1"}, ["--steps 0: ", "--dropout 2.0: ", "--seed -1: "]),
        ({"arguments": "--data /no/such/text"}, ["--data /no/such/text"]),
        (
            {"arguments": "--tokenizer /no/such.json"},
            ["--tokenizer /no/such.json: No such file or directory"],
        ),
        ({"resume": "latest"}, ['"latest": there is no run in', "start one with `fab train --job flax_mlm`"]),
    ],
)
def test_a_wrong_request_is_told_and_leaves_no_run(
    runs_dir: Path, changed: dict[str, Any], parts: list[str]
) -> None:
    text = refused(runs_dir, **changed)
    assert [part for part in parts if part not in text] == []


def test_every_bucket_that_is_out_of_reach_is_named_before_a_run_begins(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    text = refused(runs_dir, arguments="--data gs://a/t --init-from gs://b/x --remote-cache gs://c")
    why = "127.0.0.1:9 cannot be reached from this machine (Connection refused)"
    assert sorted(line.partition(" →")[0] for line in text.splitlines()) == [
        f"--data gs://a/t: {why}",
        f"--init-from gs://b/x: {why}",
        f"--remote-cache gs://c: {why}",
    ]
    monkeypatch.setenv("TPU_STACK_RUNS", "gs://mine/runs")
    assert refused(runs_dir).startswith(f"gs://mine/runs: {why}")


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_data_without_text_leaves_no_run(runs_dir: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "empty.txt").write_text(text)
    assert "empty.txt" in refused(runs_dir, arguments=f"--data {tmp_path}/empty.txt")


def test_a_corpus_too_small_for_a_batch_says_what_to_lower(runs_dir: Path, corpus: Path) -> None:
    text = refused(runs_dir, arguments=f"--data {corpus} {TINY} --batch-size 400")
    assert "too few for one batch of 400; lower --batch-size or --sequence-length, or bring more text" in text


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_device_that_this_machine_does_not_have_fails_the_preflight_and_leaves_no_run(
    runs_dir: Path, corpus: Path, platform: str
) -> None:
    if DEVICES[platform].exists():
        pytest.skip(f"this machine has {DEVICES[platform]}")
    with pytest.raises(HostsError, match=r"^preflight failed, nothing was started:\n  \S+: .* → ") as error:
        train(platform=platform, arguments=f"--data {corpus} {TINY}")
    assert platform.upper() in str(error.value)
    assert list(runs_dir.rglob("*")) == []


@pytest.fixture
def earlier(write_run: WriteRun, corpus: Path) -> Callable[..., Run]:
    """A run that was lost, with the corpus as its data."""

    def make(**changed: Any) -> Run:
        config = Config(
            data=str(corpus), vocab_size=300, sequence_length=16, batch_size=4, eval_fraction=0.3, steps=7
        )
        arguments = ["--data", str(corpus), *TINY.split(), "--steps", "7"]
        options: dict[str, Any] = {"config": dataclasses.asdict(config), "args": arguments}
        return write_run(**{**options, **changed})

    return make


def test_resuming_a_run_that_is_not_there_names_those_there_are(
    runs_dir: Path, earlier: Callable[..., Run]
) -> None:
    earlier()
    text = refused(runs_dir, job=None, resume="zzzz")
    assert text.startswith('"zzzz" is not a run in ')
    assert text.endswith("the newest are flax_mlm-20261120-214500-abcd")


def test_resuming_with_other_options_says_which_and_what_the_run_has(
    runs_dir: Path, earlier: Callable[..., Run], corpus: Path
) -> None:
    earlier()
    text = refused(
        runs_dir,
        job=None,
        resume="abcd",
        arguments=f"--data {corpus} {TINY} --steps 8 --seed 1 --log-every 3",
    )
    assert text.splitlines() == [
        "--resume flax_mlm-20261120-214500-abcd: a resumed run goes on as it began, but these options differ:",
        "  --steps: the run has 7, asked for is 8",
        "  --seed: the run has 0, asked for is 1",
        "  leave them out, or start a new run",
    ]


def test_resuming_a_run_that_is_done_is_refused(runs_dir: Path, earlier: Callable[..., Run]) -> None:
    earlier(result={"outcome": "done"})
    assert "the run is done, there is nothing left to resume" in refused(runs_dir, job=None, resume="abcd")


def test_resuming_on_a_number_of_hosts_that_the_batch_is_not_divisible_by_is_refused(
    runs_dir: Path, earlier: Callable[..., Run]
) -> None:
    earlier()
    text = refused(runs_dir, job=None, resume="abcd", hosts="3")
    assert "--batch-size 4: is shared out over 3 devices" in text


def test_resuming_a_run_as_another_job_is_refused(runs_dir: Path, earlier: Callable[..., Run]) -> None:
    earlier(job="torch_mlm")
    text = refused(runs_dir, job="flax_mlm", resume="abcd")
    assert text == "--job flax_mlm: flax_mlm-20261120-214500-abcd is a run of torch_mlm; leave --job out"


def test_a_resumed_run_finds_its_data_where_it_began_wherever_one_stands_now(
    runs_dir: Path, earlier: Callable[..., Run], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(
        data="text.jsonl", vocab_size=300, sequence_length=16, batch_size=4, eval_fraction=0.3, steps=7
    )
    run = earlier(
        cwd=str(corpus.parent),
        config=dataclasses.asdict(config),
        args=["--data", "text.jsonl", *TINY.split(), "--steps", "7"],
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    request = launching.Request(job="flax_mlm", arguments=tuple(run.described["args"]), name=None, resume=run)
    job = jobs.find("flax_mlm")
    target = targets.on_this_machine(hosts="2", platform="cpu")
    launching._check(request, job, job.parse(request.arguments), target)
    assert Path.cwd() == tmp_path / "elsewhere"


def test_a_run_whose_directory_of_old_is_gone_says_so(runs_dir: Path, earlier: Callable[..., Run]) -> None:
    earlier(cwd="/no/such/folder")
    text = refused(runs_dir, job=None, resume="abcd")
    assert (
        text == "/no/such/folder: the directory that the run was started in cannot be entered; make it again"
    )


def test_two_that_resume_one_run_at_once_do_not_both_start_it(
    runs_dir: Path, earlier: Callable[..., Run]
) -> None:
    run = earlier()
    with launching._only_resume_of(run.run_id):
        text = refused(runs_dir, job=None, resume="abcd")
    assert "is being launched by another process; `fab status` shows it" in text
