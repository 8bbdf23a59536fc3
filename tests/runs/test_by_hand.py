"""Mistakes that only the job itself can find, and a job that is started without an agent."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs.lab import CHECKOUT, Lab

Start = Callable[..., tuple[Path, subprocess.CompletedProcess[str]]]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def by_hand(lab: Lab, tmp_path: Path) -> Start:
    """`python -m jobs.flax_mlm` as one process with the RUN_* variables set: (run directory, how it ended)."""

    def start(*more: str, **variables: str) -> tuple[Path, subprocess.CompletedProcess[str]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        run_dir = tmp_path / "by-hand"
        environment = {
            "RUN_ID": "by-hand",
            "RUN_DIR": str(run_dir),
            "RUN_JOB": "flax_mlm",
            "RUN_FRAMEWORK": "jax",
            "RUN_ATTEMPT": "0",
            "RUN_NUM_PROCESSES": "1",
            "RUN_PROCESS_ID": "0",
            "RUN_COORDINATOR": f"127.0.0.1:{port}",
            "RUN_PLATFORM": "cpu",
            "RUN_CACHE_DIR": str(lab.cache_home / "tpu-stack"),
        }
        done = subprocess.run(
            [sys.executable, "-m", "jobs.flax_mlm", *lab.options(), *more],
            cwd=CHECKOUT,
            env={**os.environ, **environment, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        return run_dir, done

    return start


def test_a_job_started_by_hand_without_an_agent_trains_and_writes_its_result(by_hand: Start) -> None:
    run_dir, done = by_hand("--steps", "6")
    assert done.returncode == 0, done.stderr
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["outcome"], result["steps"]) == ("done", 6)
    assert json.loads((run_dir / "heartbeats" / "host-0.json").read_text())["state"] == "done"
    assert (run_dir / "export" / "model.safetensors").exists()


@pytest.mark.skipif(bool(list(Path("/dev").glob("accel*"))), reason="this host has a TPU")
def test_a_tpu_job_on_a_host_without_one_trains_nothing_and_says_so(by_hand: Start) -> None:
    run_dir, done = by_hand(RUN_PLATFORM="tpu")
    assert done.returncode == 2
    assert "error: RUN_PLATFORM is tpu, but this host has none" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (run_dir / "metrics.jsonl").exists()
    assert not (run_dir / "checkpoints").exists()


@pytest.mark.nightly
def test_data_that_turns_out_too_small_when_it_is_tokenised_is_a_wrong_request(
    lab: Lab, tmp_path: Path
) -> None:
    lab.data = tmp_path / "repetitive.jsonl"
    lines = [json.dumps({"text": "a" * 1000 + " " + "b" * number}) for number in range(20)]
    lab.data.write_text("\n".join(lines))
    ended = lab.fab_train().ended()
    assert ended.code == 2, ended.said
    assert "training sequences of 16 tokens, too few for one batch of 12; lower --batch-size" in ended.said
    assert "Traceback" not in ended.said


@pytest.mark.nightly
def test_with_a_remote_cache_the_first_host_prepares_the_data_and_the_others_come_after_it(
    lab: Lab, tmp_path: Path
) -> None:
    lab.data = tmp_path / "new.jsonl"
    lines = [json.dumps({"text": f"document {number} " * 9}) for number in range(200)]
    lab.data.write_text("\n".join(lines))
    run = lab.finish(lab.launch("--remote-cache", str(tmp_path / "shared"), "--steps", "2"))
    result = run.current_result()
    assert result is not None
    assert result["outcome"] == "done"
    logs = [(Path(run.directory.url) / "logs" / "0" / f"host-{index}.log").read_text() for index in (0, 1)]
    assert ["tokenised " in log for log in logs] == [True, False]
    assert sorted(path.parent.parent.name for path in (tmp_path / "shared").rglob("manifest.json")) == [
        "tokenizer",
        "tokens",
    ]


PERMUTED = """
import jax, jax.numpy as jnp, dataclasses
from jax._src.lib import xla_client

client = xla_client.make_cpu_client
xla_client.make_cpu_client = lambda **given: client(**{**given, "node_id": (given["node_id"] + 1) % 3})

from jobs.runtime import process
from jobs.runtime.jax import checkpoints, distributed

@dataclasses.dataclass(frozen=True)
class Config:
    pass

def train(run, config):
    me = run.environment.process_id
    assert (distributed.rank(), jax.process_index()) == (me, (me + 1) % 3)
    run.say("said once")
    done = run.directory.path("first")
    mark = lambda: open(done, "a").write(str(me))
    distributed.first_then_others(mark, what="marking", say=run.prepare)
    everywhere = distributed.Devices()
    state = {"x": everywhere.jit(lambda: jnp.arange(6.0))()}
    assert float(everywhere.jit(lambda x_B: x_B.sum())(everywhere.rows(jnp.arange(6.0)))) == 15
    kept = checkpoints.Checkpoints(run.directory, keep_last=1)
    kept.save(1, state)
    kept.save(2, {"x": state["x"] + 1})
    kept.wait()
    step, restored = kept.restore_latest(state)
    assert step == 2 and kept.steps() == [2] and float(restored["x"][5]) == 6
    distributed.agree("what is the same", "ab" * 32)
    distributed.agree("the data", ("cd" if me == 2 else "ab") * 32)

process.main(Config, train)
"""


def test_where_the_slice_numbers_its_hosts_otherwise_everything_is_named_by_the_number_that_the_launcher_gave(
    tmp_path: Path,
) -> None:
    """As on a TPU, where `jax.process_index()` is not what `jax.distributed.initialize` was told."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    environment = {
        "RUN_ID": "permuted",
        "RUN_DIR": str(run_dir),
        "RUN_JOB": "none",
        "RUN_FRAMEWORK": "jax",
        "RUN_ATTEMPT": "0",
        "RUN_NUM_PROCESSES": "3",
        "RUN_COORDINATOR": f"127.0.0.1:{port}",
        "RUN_PLATFORM": "cpu",
        "RUN_CACHE_DIR": str(tmp_path / "cache"),
        "RUN_LOCAL_DEVICES": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PERMUTED],
            cwd=CHECKOUT,
            env={**os.environ, **environment, "RUN_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(3)
    ]
    logs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2, 2], "\n".join(logs)
    assert all("the data is not the same on every host: hosts [2] differ from host 0" in log for log in logs)
    assert ["said once" in log for log in logs] == [True, False, False]
    assert (run_dir / "first").read_text()[0] == "0"
    beats = [json.loads((run_dir / "heartbeats" / f"host-{index}.json").read_text()) for index in range(3)]
    assert [beat["rank"] for beat in beats] == [0, 1, 2]
