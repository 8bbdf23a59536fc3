"""One process of a job: what it is told, how it ends, and what is written when it does."""

import dataclasses
import errno
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import ClientPayloadError
from google.auth.exceptions import TransportError

from contracts import process_environment as environment
from contracts.errors import FAILED, PEER_LOST, UNAVAILABLE, RequestError
from contracts.process_environment import ProcessEnvironment
from contracts.run_directory import RunDirectory
from jobs.runtime import process
from jobs.runtime.jax import distributed  # noqa: F401 - what JAX says of a lost peer
from jobs.runtime.monitoring.heartbeat import Heartbeat
from jobs.runtime.process import Run, explain
from jobs.runtime.storage.bucket_files import files_of
from tests.processes import run_program


class JaxRuntimeError(RuntimeError):
    """As JAX's own, which is not loaded for this."""


LOST = "another host of the run was lost"


def barrier_failed(cause: Exception) -> Exception:
    """As Orbax puts it, whatever the cause."""
    error = TimeoutError("Timed out while waiting for async_write_complete barrier.")
    error.__cause__ = cause
    return error


FAILURES = [
    (OSError(errno.ENOSPC, "full"), FAILED, "the disk is full: "),
    (ValueError("write failed: No space left on device [state/0]"), FAILED, "the disk is full: "),
    (OSError(errno.EACCES, "Permission denied", "/x"), FAILED, "PermissionError: [Errno 13] Permission den"),
    (JaxRuntimeError("Gloo: Connection closed by peer\nmore"), PEER_LOST, LOST),
    (JaxRuntimeError("Barrier timed out. Id: step"), PEER_LOST, f"{LOST}: Barrier"),
    (
        barrier_failed(JaxRuntimeError("UNAVAILABLE: the coordination service\nmore")),
        PEER_LOST,
        f"{LOST}: UNAV",
    ),
    (barrier_failed(OSError(errno.ENOSPC, "full")), FAILED, "the disk is full: "),
    (barrier_failed(ValueError("odd")), FAILED, "TimeoutError: Timed out while"),
    (JaxRuntimeError("RESOURCE_EXHAUSTED: memory\nmore"), FAILED, "JaxRuntimeError: RESOURCE_EXHAUSTED"),
    (ValueError("UNKNOWN: Gloo: Connection reset by peer"), PEER_LOST, LOST),
    # The sign counts in an error of the runtime's kinds only: a bucket's connection may be reset too.
    (ConnectionResetError(104, "Connection reset by peer"), FAILED, "ConnectionResetError: [Errno 104] "),
    (ClientPayloadError("half an answer"), UNAVAILABLE, "something outside the run did not answer"),
    (barrier_failed(TransportError("no token")), UNAVAILABLE, "something outside the run did not answer"),  # type: ignore[no-untyped-call]
    (
        JaxRuntimeError("UNKNOWN: Failed to start RPC server"),
        UNAVAILABLE,
        "port 4000, at which the ranks meet (127.0.0.1:4000), was taken",
    ),
    (ValueError(), FAILED, "ValueError: "),
    (ValueError("\n\nsecond"), FAILED, "ValueError: "),
]


@pytest.mark.parametrize(("error", "code", "said"), FAILURES)
def test_a_failure_has_a_code_and_a_sentence(
    environment: ProcessEnvironment, error: Exception, code: int, said: str
) -> None:
    found, message = explain(error, environment)
    assert found == code
    assert message.startswith(said)
    assert "\n" not in message


@pytest.fixture
def first(environment: ProcessEnvironment) -> Run:
    """Of rank 0."""
    directory = RunDirectory(environment.run_dir)
    rank_0 = dataclasses.replace(environment, process_id=0)
    return Run(environment=rank_0, directory=directory, heartbeat=Heartbeat(directory, rank_0))


@pytest.mark.parametrize("outcome", ["done", "stopped", "preempted"])
def test_the_result_says_the_outcome_and_holds_nothing_but_json(first: Run, outcome: str) -> None:
    directory = first.directory
    first.time.enter("compute")
    first.warn("it is cold")
    first.decide({"learning_rate": 0.003})
    for rank in (0, 1):
        directory.write_json(
            f"heartbeats/host-{rank}.json", {"rank": rank, "state": "saving", "step": 6, "time": 1.8e9}
        )
    process.finish(first, outcome, {"steps": 7, "eval_loss": math.nan, "eval_accuracy": 0.5})
    text = directory.read_text("result.json")
    assert text is not None
    result = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert (result["outcome"], result["steps"], result["attempt"], result["error"]) == (outcome, 7, 3, None)
    assert (result["eval_loss"], result["eval_accuracy"], result["warnings"]) == (None, 0.5, ["it is cold"])
    assert result["wall_s"] == pytest.approx(sum(result["time_s"].values()), abs=0.01)
    assert (directory.read_json("heartbeats/host-0.json") or {})["state"] == outcome
    page = directory.read_text("report.html") or ""
    assert (
        page.count(f'"{outcome}","7"') == 2
        and '"saving"' not in page.partition('id="content"')[2].partition("<script>")[0]
    )
    assert "it is cold" in page and "0.003" in page


def test_only_rank_0_writes_the_result_and_a_job_without_parts_of_its_time_is_not_said_to_have_only_started(
    first: Run, environment: ProcessEnvironment
) -> None:
    second = dataclasses.replace(
        first, environment=environment, heartbeat=Heartbeat(first.directory, environment)
    )
    process.finish(second, "done", {"steps": 7})
    assert first.directory.list(".") == ["heartbeats"]
    process.finish(first, "done", {"steps": 7})
    result = first.directory.read_json("result.json") or {}
    assert "time_s" not in result
    assert result["wall_s"] >= 0


@pytest.mark.parametrize(("url", "tries"), [("{}", 1), ("file://{}", 3)])
def test_a_result_that_a_bucket_refuses_is_tried_again_and_one_that_a_disk_refuses_is_not(
    environment: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch, url: str, tries: int
) -> None:
    tried: list[str] = []

    def refuse(_: RunDirectory, name: str, _text: str) -> None:
        tried.append(name)
        raise OSError(errno.EIO, "refused")

    monkeypatch.setattr("jobs.runtime.storage.bucket_files.time.sleep", lambda _: None)
    monkeypatch.setattr(RunDirectory, "write_text", refuse)
    with pytest.raises(OSError, match="refused"):
        place = url.format(environment.run_dir)
        process._write_text(RunDirectory(place, files_of(place)), "result.json", "{}")
    assert tried == ["result.json"] * tries


def started(environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The job's own command, in a process that tells on its way out whether it has loaded JAX."""
    program = (
        "import atexit, runpy, sys\n"
        "atexit.register(lambda: print('loaded:', sorted({'jax', 'flax', 'numpy'} & set(sys.modules))))\n"
        f"sys.argv[1:] = {list(arguments)!r}\n"
        "runpy.run_module('jobs.flax_mlm', run_name='__main__', alter_sys=False)\n"
    )
    usual = {"PATH": os.environ["PATH"], "PYTHONPATH": os.getcwd()}
    return run_program([sys.executable, "-c", program], {**usual, **environ})


WHOLE = {
    "RUN_ID": "flax_mlm-20261120-214500-abcd",
    "RUN_DIR": "/runs/one",
    "RUN_JOB": "flax_mlm",
    "RUN_FRAMEWORK": "jax",
    "RUN_ATTEMPT": "2",
    "RUN_NUM_PROCESSES": "4",
    "RUN_PROCESS_ID": "3",
    "RUN_COORDINATOR": "127.0.0.1:4000",
    "RUN_PLATFORM": "cpu",
    "RUN_CACHE_DIR": "/cache",
    "RUN_LOCAL_DEVICES": "2",
    "RUN_PEAK_FLOPS_PER_S": "394000000000000",
    "RUN_CONTROL_DIR": "/control",
    "RUN_SHARED_CACHE": "gs://bucket/cache",
}
OPTIONAL = ("RUN_LOCAL_DEVICES", "RUN_PEAK_FLOPS_PER_S", "RUN_CONTROL_DIR", "RUN_SHARED_CACHE")
NEEDED = [name for name in WHOLE if name not in OPTIONAL]


def whole_environment(tmp_path: Path) -> dict[str, str]:
    """Of a run of one process."""
    alone = {"RUN_NUM_PROCESSES": "1", "RUN_PROCESS_ID": "0", "RUN_ATTEMPT": "0"}
    places = {"RUN_DIR": str(tmp_path / "run"), "RUN_CACHE_DIR": str(tmp_path / "cache")}
    return {**{name: WHOLE[name] for name in NEEDED}, **alone, **places}


def test_a_missing_environment_or_a_wrong_option_is_said_with_exit_code_2_before_jax_is_loaded_or_anything_written(
    tmp_path: Path,
) -> None:
    done = started({})
    assert (done.returncode, done.stdout) == (2, "loaded: []\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "error: the process environment is not complete (`fab train` sets it): RUN_PLATFORM is"
    )
    done = started(whole_environment(tmp_path), "--stepz", "3")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (2, "loaded: []")
    said = done.stderr + done.stdout
    assert "--stepz" in said and "--steps" in said and "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_this_host_does_not_have_is_a_wrong_request_and_trains_nothing(tmp_path: Path) -> None:
    done = started({**whole_environment(tmp_path), "RUN_PLATFORM": "tpu"})
    assert done.returncode == 2
    assert "RUN_PLATFORM is tpu, but this host has none" in done.stderr
    assert "Traceback" not in done.stderr
    beat = RunDirectory(str(tmp_path / "run")).read_json("heartbeats/host-0.json")
    assert beat is not None
    assert beat["state"] == "failed"
    # What samples the host may have begun by then.
    assert {*RunDirectory(str(tmp_path / "run")).list(".")} <= {
        ".unfinished",
        "heartbeats",
        "hosts",
        "tensorboard",
    }


def mistakes(environ: dict[str, str]) -> str:
    with pytest.raises(RequestError) as error:
        environment.read(environ)
    return str(error.value)


def test_every_variable_reaches_its_field_and_what_is_optional_may_be_absent_or_empty() -> None:
    whole = environment.read({**WHOLE, "HOME": "/elsewhere"})
    assert dataclasses.astuple(whole) == (
        *("flax_mlm-20261120-214500-abcd", "/runs/one", "flax_mlm", "jax", 2, 4, 3),
        *("127.0.0.1:4000", "cpu", "/cache", 2, 394 * 10**12, "/control", 0, 1, "gs://bucket/cache"),
    )
    for rest in ({}, dict.fromkeys(OPTIONAL, "")):
        read = environment.read({name: WHOLE[name] for name in NEEDED} | rest)
        found = (read.local_devices, read.peak_flops_per_s, read.control_dir, read.shared_cache)
        assert found == (None,) * 4
    older = {name: value for name, value in WHOLE.items() if name != "RUN_FRAMEWORK"} | {"RUN_STACK": "jax"}
    assert environment.read(older) == whole
    for place in ("127.0.0.1:1", "[::1]:4000", "worker-0.local:65535"):
        assert environment.read({**WHOLE, "RUN_COORDINATOR": place}).coordinator == place
    assert [environment.read({**WHOLE, "RUN_PROCESS_ID": rank}).is_first for rank in "01"] == [True, False]
    assert "RUN_PROCESS_ID: 4 must be below RUN_NUM_PROCESSES (4)" in mistakes(
        {**WHOLE, "RUN_PROCESS_ID": "4"}
    )


@pytest.mark.parametrize("missing", [NEEDED, NEEDED[:1], NEEDED[3:5]], ids=len)
def test_every_variable_that_is_missing_or_empty_is_listed(missing: list[str]) -> None:
    for left in (
        {name: WHOLE[name] for name in WHOLE if name not in missing},
        {**WHOLE, **dict.fromkeys(missing, "")},
    ):
        said = mistakes(left)
        assert [name for name in WHOLE if f"{name} is not set" in said] == missing
        assert "`fab train` sets it" in said


NUMBERS = {
    "RUN_ATTEMPT": 0,
    "RUN_PROCESS_ID": 0,
    "RUN_NUM_PROCESSES": 1,
    "RUN_LOCAL_DEVICES": 1,
    "RUN_PEAK_FLOPS_PER_S": 1,
}
"""The least of each."""
NO_NUMBERS = ["-1", "one", "1.5", "1e12", "²", "１", " 1", "0x1", "+1", "1_000", "-0"]
NO_PLACES = ["nowhere", "4000", ":4000", "host:", "host:²", "host:0", "host:65536", "host:-1"]


def test_every_wrong_value_is_listed_with_its_rule() -> None:
    for number, place in itertools.zip_longest(NO_NUMBERS, NO_PLACES, fillvalue="-1"):
        wrong = {**dict.fromkeys(NUMBERS, number), "RUN_COORDINATOR": place, "RUN_PLATFORM": "TPU"}
        said = mistakes({**WHOLE, **wrong})
        for name, least in NUMBERS.items():
            assert f'{name}: "{number}" is not a whole number of at least {least}' in said
        assert f'RUN_COORDINATOR: "{place}" is not host:port' in said
        assert 'RUN_PLATFORM: "TPU" is not a platform; choose one of cpu, gpu, tpu' in said
