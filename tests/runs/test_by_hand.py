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

from tests.runs.command import CHECKOUT
from tests.runs.lab import Lab

Start = Callable[..., tuple[Path, subprocess.CompletedProcess[str]]]
pytestmark = pytest.mark.timeout(300)


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
            "RUN_STACK": "jax",
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
