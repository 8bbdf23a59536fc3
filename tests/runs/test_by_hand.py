"""A job that is started without an agent, hosts that a slice numbers otherwise, data that one host prepares for all,
and the smallest job."""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launch import jobs
from launch.code import precompiled
from tests.processes import run_program
from tests.runs.lab import CHECKOUT, Lab
from tests.servers import free_port
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def environment(run_id: str, run_dir: Path, cache_dir: Path, *, job: str, processes: int) -> dict[str, str]:
    """What the processes of a run are told."""
    return {
        **os.environ,
        "RUN_ID": run_id,
        "RUN_DIR": str(run_dir),
        "RUN_JOB": job,
        "RUN_FRAMEWORK": "jax",
        "RUN_ATTEMPT": "0",
        "RUN_NUM_PROCESSES": str(processes),
        "RUN_COORDINATOR": f"127.0.0.1:{free_port()}",
        "RUN_PLATFORM": "cpu",
        "RUN_CACHE_DIR": str(cache_dir),
    }


def test_a_job_started_by_hand_without_an_agent_trains_and_writes_its_result(
    lab: Lab, tmp_path: Path
) -> None:
    run_dir = tmp_path / "by-hand"
    told = environment("by-hand", run_dir, lab.cache_home / "tpu-stack", job="flax_mlm", processes=1)
    argv = [sys.executable, "-m", "jobs.flax_mlm", *lab.options(), "--steps", "6"]
    done = run_program(argv, {**told, "RUN_PROCESS_ID": "0"}, cwd=CHECKOUT)
    assert done.returncode == 0, done.stderr
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["outcome"], result["steps"]) == ("done", 6)
    assert json.loads((run_dir / "heartbeats" / "host-0.json").read_text())["state"] == "done"
    assert (run_dir / "export" / "model.safetensors").exists()


def test_a_job_whose_reader_is_gone_when_it_is_told_to_stop_ends_as_preempted_and_quietly(
    tmp_path: Path,
) -> None:
    """As where SIGTERM goes to both ends of a pipe."""
    told = environment("read", tmp_path / "run", tmp_path / "cache", job="jax_hello", processes=1)
    argv = [sys.executable, "-m", "jobs.jax_hello", "--steps", "10000000"]
    with subprocess.Popen(
        argv,
        cwd=CHECKOUT,
        env={**told, "RUN_PROCESS_ID": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        until(lambda: (tmp_path / "run" / "metrics.jsonl").exists(), 120)
        process.terminate()
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (75, "")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["outcome"] == "preempted"


COMPILER = """
import json, sys, jax
jax.config.update("jax_num_cpu_devices", 2)
from jobs.runtime.jax import aot, executables

job, cache, *words = sys.argv[1:]
step = aot.lower_step(job, words, jax.devices())
lowered = step.traced.lower()
kept = executables.Executables(cache, aot.mesh_devices(jax.devices(), step.arguments))
print(json.dumps(kept.precompile(lowered, lowered.compile)))
"""


def compiled_for_shapes(job: str, cache: Path, options: Sequence[str]) -> Any:
    """The note of a job's step, compiled by a process that has no data of a run."""
    argv = [sys.executable, "-c", COMPILER, job, str(cache), *options]
    done = run_program(argv, {**os.environ, "JAX_PLATFORMS": "cpu"}, cwd=CHECKOUT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("job", [pytest.param("jax_hello", marks=pytest.mark.nightly), "flax_mlm"])
def test_the_program_that_a_job_hands_over_for_shapes_is_the_one_that_its_training_loads(
    job: str, lab: Lab, tmp_path: Path
) -> None:
    """Compiled by one process, which has no data of a run, and trained with by another; the note goes with the code."""
    options = [*(lab.options() if job == "flax_mlm" else ()), "--steps", "2"]
    compiler, bucket = tmp_path / "compiler", f"file://{tmp_path}/bucket"
    note = precompiled.with_url(compiled_for_shapes(job, compiler, options), bucket)
    Path(f"{tmp_path}/bucket/cache").mkdir(parents=True)
    (compiler / "executables").rename(tmp_path / "bucket" / "cache" / "executables")
    code = tmp_path / "code"
    with tarfile.open(
        fileobj=io.BytesIO(precompiled.add_to_code(jobs.bundle(CHECKOUT), note).archive)
    ) as packed:
        packed.extractall(code, filter="data")
    told = environment("ahead", tmp_path / "run", tmp_path / "cache", job=job, processes=1)
    told |= {"RUN_PROCESS_ID": "0", "RUN_LOCAL_DEVICES": "2", "PYTHONPATH": str(code)}
    done = run_program([sys.executable, "-P", "-m", f"jobs.{job}", *options], told, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"was compiled beforehand: it is loaded from {note['url']}" in done.stdout
    assert "compiled anew" not in done.stdout and "for another" not in done.stdout
    assert (tmp_path / "cache" / "executables" / note["key"]).exists()


@pytest.mark.nightly
def test_several_processes_trace_the_program_that_is_handed_over_for_shapes_on_the_devices_of_all(
    lab: Lab, tmp_path: Path
) -> None:
    """Loading it is refused, as CPU devices of several processes have other numbers; TPUs have the same."""
    lab.finish(lab.launch("--steps", "2"))
    note = compiled_for_shapes("flax_mlm", tmp_path, [*lab.options(), "--steps", "2"])
    folder = lab.cache_home / "tpu-stack" / "executables"
    kept = [path.read_bytes()[32:] for path in folder.iterdir() if path.suffix != ".lock"]
    facts = [json.loads(content.partition(b"\n")[0]) for content in kept]
    traced = [each["program"] for each in facts if each["name"] == "jit_step" and len(each["devices"]) == 2]
    assert note["facts"]["program"] in traced


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
    distributed.first_then_others(mark, what="marking", report=run.prepare)
    everywhere = distributed.Devices()
    state = checkpoints.Tree({"x": everywhere.jit(lambda: jnp.arange(6.0))()})
    assert float(everywhere.jit(lambda x_B: x_B.sum())(everywhere.rows(jnp.arange(6.0)))) == 15
    kept = checkpoints.Checkpoints(run, state, keep_last=1)
    kept.save(1, {})
    state.tree = {"x": state.tree["x"] + 1}
    kept.save(2, {"saved": "second"})
    kept.wait()
    assert kept.restore_latest() == (2, {"saved": "second"})
    assert run.directory.checkpoint_steps() == [2] and float(state.tree["x"][5]) == 6
    assert distributed.all_processes(True) and not distributed.all_processes(me != 1)
    distributed.agree("what is the same", "ab" * 32)
    distributed.agree("the data", ("cd" if me == 2 else "ab") * 32)

process.main(Config, train)
"""


def test_where_the_slice_numbers_its_hosts_otherwise_everything_is_named_by_the_number_that_the_launcher_gave(
    tmp_path: Path,
) -> None:
    """As on a TPU, where `jax.process_index()` is not what `jax.distributed.initialize` was told."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    told = environment("permuted", run_dir, tmp_path / "cache", job="none", processes=3)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PERMUTED],
            cwd=CHECKOUT,
            env={**told, "RUN_LOCAL_DEVICES": "1", "RUN_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(3)
    ]
    logs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2, 2], "\n".join(logs)
    assert all("the data is not the same on every host: ranks [2] differ from rank 0" in log for log in logs)
    assert ["said once" in log for log in logs] == [True, False, False]
    assert (run_dir / "first").read_text()[0] == "0"
    beats = [json.loads((run_dir / "heartbeats" / f"host-{index}.json").read_text()) for index in range(3)]
    assert [beat["rank"] for beat in beats] == [0, 1, 2]
