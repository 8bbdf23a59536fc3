"""What a host writes down when it is tried: real JAX, one process, started by hand."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch.jobs import CHECKOUT
from launch.verdict import Expected, problems


def free_port() -> int:
    """A port that was free a moment ago: the coordinator has to be told one."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def start(tmp_path: Path, **changed: str) -> subprocess.CompletedProcess[str]:
    environ = {
        "RUN_ID": "verify_jax-20261120-214500-abcd",
        "RUN_DIR": str(tmp_path / "run"),
        "RUN_JOB": "runtime.verify_jax",
        "RUN_STACK": "jax",
        "RUN_ATTEMPT": "0",
        "RUN_NUM_PROCESSES": "1",
        "RUN_PROCESS_ID": "0",
        "RUN_COORDINATOR": f"127.0.0.1:{free_port()}",
        "RUN_PLATFORM": "cpu",
        "RUN_CACHE_DIR": str(tmp_path / "cache"),
        "RUN_LOCAL_DEVICES": "2",
        "PYTHONPATH": str(CHECKOUT),
        **changed,
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RUN_")}
    return subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "jobs.runtime.verify_jax",
            "--matmul-size",
            "64",
            "--matmul-repeats",
            "2",
        ],
        env={**kept, **environ},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_a_process_writes_what_it_found_and_that_is_judged_as_well(tmp_path: Path) -> None:
    done = start(tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run/verify/host-0.json").read_text())
    assert (found["platform"], found["local_devices"], found["devices"]) == ("cpu", 2, 2)
    assert len(found["matmuls"]) == 2 and found["all_reduce"]["is_right"]
    assert {"python", "jax", "jaxlib"} <= found["versions"].keys()
    wanted = Expected(platform="cpu", hosts=1, devices_per_host=2, peak_flops_per_s=None)
    assert problems(wanted, ["h"], [found]) == []


@pytest.mark.skipif(any(Path("/dev").glob("accel*")), reason="this machine has a TPU")
def test_a_host_without_the_device_that_was_asked_for_fails_and_writes_no_report(tmp_path: Path) -> None:
    done = start(tmp_path, RUN_PLATFORM="tpu")
    assert done.returncode == 2
    assert "RUN_PLATFORM is tpu, but this host has none" in done.stderr
    assert not (tmp_path / "run/verify").exists()
