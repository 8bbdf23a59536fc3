"""Commands of the user's own, launched on two hosts: one that is preempted and resumed, and programs that know nothing
of this repository."""

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from backends.local import environments
from backends.local.local_backend import on_this_machine
from console import notify
from contracts.errors import RequestError
from contracts.host_interface import HANG_FLOOR_S
from jobs.runtime.ranks.secret_values import _forms
from launch import launching
from launch.request.run_request import Request, command_from_options
from launch.runs import Run
from launch.targets import Secret
from tests.launch.code.package_index import add_wheel
from tests.runs.lab import Lab, losses, result

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EXAMPLE = EXAMPLES / "jax"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def launch(
    lab: Lab,
    words: Sequence[str] = (),
    resume: Run | None = None,
    env: Mapping[str, str] | None = None,
    secrets: Mapping[str, Secret] | None = None,
    hang_floor_s: float = HANG_FLOOR_S,
    **named: str,
) -> Run:
    options: dict[str, Any] = {
        "framework": "",
        "processes_per_host": "",
        "progress": "log",
        "python": "",
        "workdir": str(EXAMPLE),
    }
    command = None if resume else command_from_options(words, **{**options, **named})
    request = Request(
        job="command",
        command=command,
        arguments=(),
        name=None,
        resume=resume,
        env=env or {},
        secrets=secrets or {},
        hang_floor_s=hang_floor_s,
    )
    with mock.patch.dict(os.environ, lab.environ):
        return launching.launch(request, on_this_machine(hosts="2", platform="cpu"), lab.said.append)


def test_a_script_that_looks_into_its_run_directory_resumes_after_a_preemption_without_its_folder(
    lab: Lab,
) -> None:
    folder = lab.runs_dir.parent / "my prøject"
    shutil.copytree(EXAMPLE, folder)
    with (folder / "train.py").open("a") as script:
        script.write('import os; print("A is", os.environ["A"], "and B", os.environ["B"])\n')
    env = {"A": "one", "B": "two"}
    run = launch(lab, ["python", "train.py"], processes_per_host="2", workdir=str(folder), env=env)
    lab.reach(run, 20)
    lab.signal(run, signal.SIGTERM, 1)
    preempted = lab.finish(run)
    assert lab.state(run) == "preempted"
    assert 20 <= result(preempted)["steps"] < 200

    shutil.rmtree(folder)
    lab.said.clear()
    resumed = lab.finish(launch(lab, resume=lab.read(run), env={"B": "three"}))
    assert f"{folder} is not there: the command goes on with the folder as it was last sent" in lab.said
    assert result(resumed)["outcome"] == "done"
    assert sorted(losses(resumed)) == list(range(20, 201, 20))
    assert result(resumed)["loss"] == losses(resumed)[200] < 0.01
    assert resumed.described["args"] == ["python", "train.py"]
    log = resumed.directory.read_text("logs/1/host-1.log") or ""
    assert "process 3 of 4: weight 2.9" in log
    assert "A is one and B three" in log
    assert resumed.described["env"] == {"A": "one", "B": "three"}


NEEDY = """
import greet, jax, os, sys
print("greet", greet.version, "beside jax", jax.__version__)
sys.exit(0 if os.environ["RUN_ATTEMPT"] == "1" else 75)
"""


def test_what_a_project_needs_is_there_beside_the_framework_and_the_same_when_it_is_resumed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, index = lab.runs_dir.parent / "needy", lab.runs_dir.parent / "index"
    folder.mkdir()
    (folder / "train.py").write_text(NEEDY)
    (folder / "requirements.txt").write_text("greet\njax\n")
    add_wheel(index, "greet", "1.0")
    add_wheel(index, "jax", importlib.metadata.version("jax"))
    monkeypatch.setenv("PIP_INDEX_URL", index.as_uri())
    run = lab.finish(launch(lab, ["python", "train.py"], workdir=str(folder)))
    assert lab.state(run) == "preempted"
    packages = run.described["config"]["packages"]
    assert packages["requirements"] == ["greet==1.0"]

    shutil.rmtree(lab.cache_home / "tpu-stack" / "packages")
    shutil.rmtree(lab.agent_root / "bundles" / packages["sha256"])
    (folder / "requirements.txt").write_text("greet==2.0\n")
    resumed = lab.finish(launch(lab, resume=lab.read(run)))
    assert result(resumed)["outcome"] == "done"
    assert resumed.described["config"]["packages"] == packages
    log = resumed.directory.read_text("logs/1/host-1.log") or ""
    assert f"greet 1.0 beside jax {importlib.metadata.version('jax')}" in log


FOR_DRY_RUN = ("--dry-run", "--hosts", "2", "--secret", "TOKEN", "--secret", "KEY")
LOUD = """
import json, os, pathlib, sys, time
secret = os.environ["TOKEN"]
for letter in secret:
    sys.stdout.write(letter)
    sys.stdout.flush()
    time.sleep(0.01)
print(json.dumps(secret), os.environ["KEY"])
pathlib.Path("went-on").write_text("yes")
def hangs(token):
    time.sleep(600)
if "HANGS" in os.environ:
    hangs(secret)
raise SystemExit(f"https://me:{secret}@host refuses")
"""


OTHERS = """
import os, signal, time
rank, told = int(os.environ["RANK"]), os.environ["RUN_DIR"] + "/failed"
if rank == 0:
    raise SystemExit
if rank == 2:
    time.sleep(2)
    open(told, "w").write(str(time.time()))
    raise SystemExit(9)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
"""


def test_a_rank_that_is_done_waits_for_nobody_and_one_that_fails_ends_those_that_would_not_stop(
    lab: Lab, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(OTHERS)
    run = launch(lab, ["python", "train.py"], processes_per_host="2", workdir=str(tmp_path))
    lab.until((Path(run.directory.url) / "failed").exists, "rank 2 fails")
    ended = lab.finish(run)
    failed_s = float((Path(run.directory.url) / "failed").read_text())
    assert result(ended)["error"].startswith("host 1: rank 2 ended with exit code 9")
    assert result(ended)["time"] - failed_s < 20
    assert [exit["code"] for exit in lab.exits(run)][1] == 9


@pytest.mark.parametrize("per_host", [pytest.param("1", marks=pytest.mark.nightly), "2"])
def test_a_secret_reaches_the_ranks_and_nothing_else_that_a_run_leaves(lab: Lab, per_host: str) -> None:
    folder = lab.runs_dir.parent / "loud"
    folder.mkdir()
    (folder / "loud.py").write_text(LOUD)
    values = {"TOKEN": 'zq4hunter"&é', "KEY": "mb7-first\nmb7-second"}
    secrets = {name: Secret(source="shell", value=value) for name, value in values.items()}
    run = lab.finish(
        launch(lab, ["python", "loud.py"], processes_per_host=per_host, workdir=str(folder), secrets=secrets)
    )
    assert result(run)["error"].count("***") >= 2
    assert "https://me:***@host refuses" in (run.directory.read_text("logs/0/host-0.log") or "")
    assert run.described["secrets"] == {"TOKEN": "shell", "KEY": "shell"}
    with pytest.raises(RequestError, match="TOKEN is not set in this shell"):
        launch(lab, resume=lab.read(run))
    with mock.patch.dict(os.environ, values):
        resumed = lab.finish(launch(lab, resume=lab.read(run)))
    assert result(resumed)["attempt"] == 1
    assert [*lab.cache_home.rglob("went-on")], "the ranks did not get them"
    with mock.patch.dict(os.environ, values):
        dry = lab.fab("train", *FOR_DRY_RUN, "--workdir", str(folder), "--", "python", "loud.py").ended()
    assert dry.code == 0, dry.said
    hanging = launch(
        lab,
        ["python", "loud.py"],
        processes_per_host=per_host,
        workdir=str(folder),
        secrets=secrets,
        env={"HANGS": "yes"},
        hang_floor_s=3.0,
    )
    lab.until(
        lambda: "***" in (hanging.directory.read_text("logs/0/host-0.log") or ""), "it prints the secret"
    )
    places = {**_processes(), "--dry-run": dry.said.encode(), "what was said": "\n".join(lab.said).encode()}
    hung = lab.finish(hanging)
    assert lab.state(hanging) == "hung"
    for ended in (run, resumed, hung):
        event = notify.run_event(lab.read(ended), "failed")
        places[f"notice of {ended.run_id}"] = json.dumps(notify.message(event)).encode()
        places[f"mail about {ended.run_id}"] = notify.plain(event).encode()
    memory = [path for path in Path("/dev/shm").rglob("*") if "tpu-stack" in str(path)]
    files = [*lab.runs_dir.rglob("*"), *lab.cache_home.rglob("*"), *memory]
    places |= {str(path): path.read_bytes() for path in files if path.is_file()}
    parts = ["zq4hunter", "mb7-first", "mb7-second"]
    traces = {form for text in (*parts, *values.values()) for form in _forms(text)}
    assert len(places) * len(traces) >= 200
    assert [(place, trace) for place, text in places.items() for trace in traces if trace in text] == []


def _processes() -> dict[str, bytes]:
    """What any user sees of all processes, and the environments of ours that are no ranks."""
    places = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            places[f"{folder}/cmdline"] = (folder / "cmdline").read_bytes()
            environment = (folder / "environ").read_bytes()
            if b"\0RANK=" not in environment and b"\0RUN_SECRETS=" not in environment:
                places[f"{folder}/environ"] = environment
    return places


JAX = """
import jax
from jax.experimental.multihost_utils import process_allgather
jax.distributed.initialize()
print("sum", process_allgather(jax.numpy.asarray(float(jax.process_index() + 1))).sum(), "of", jax.process_count())
"""

LATE = """
import os, time
import jax
if os.environ["RANK"] == "1":
    time.sleep(60)
jax.distributed.initialize(initialization_timeout=3)
"""


def test_a_rank_that_comes_after_the_limit_of_jax_is_named_with_it_and_is_not_said_to_have_joined(
    lab: Lab,
) -> None:
    run = lab.finish(launch(lab, ["python", "-c", LATE]))
    assert not any("joined" in line for line in lab.said)
    assert re.fullmatch(
        "host 0: the command was killed by SIGABRT: rank 1 had not joined when jax.distributed.initialize gave up, "
        r"after \d+ s \(initialization_timeout=…, 300 s by default\); let every rank call it sooner, or raise .*",
        result(run)["error"],
    ), result(run)


FAILS = """
import jax
from jax.experimental.multihost_utils import process_allgather
jax.distributed.initialize()
for step in range(100):
    process_allgather(jax.numpy.asarray(float(step)))
    if step == 3 and jax.process_index() == 1:
        END
"""


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ('raise ValueError("a bad batch")', 1, "ValueError: a bad batch"),
        ("import sys; sys.exit(3)", 3, "sys.exit has ended this rank"),
    ],
)
def test_a_rank_of_jax_that_has_failed_is_not_waited_for_as_jax_itself_would(
    lab: Lab, end: str, code: int, says: str
) -> None:
    """Its exit handler waits for the others, and they for it in the middle of a sum."""
    began_s = time.monotonic()
    run = lab.finish(launch(lab, ["python", "-c", FAILS.replace("END", end)]))
    ended = result(run)
    assert ended["error"].startswith(f"host 1: the command ended with exit code {code}"), ended
    assert says in (run.directory.read_text("logs/0/host-1.log") or "")
    assert time.monotonic() - began_s < 120  # JAX's own limit is 300 s


TORCH = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group()
model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
model(torch.full((4, 1), float(dist.get_rank() + 1))).sum().backward()
print("sum", 0.5 * next(model.parameters()).grad.item(), "of", dist.get_world_size())  # 4 * 1.5 is the mean over ranks
dist.destroy_process_group()
os._exit(sys.stdout.flush() or 0)  # torch's own threads may abort the interpreter's exit
"""

TENSORFLOW = """
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    rank = strategy.cluster_resolver.task_id
    each = strategy.run(lambda: tf.constant(float(rank + 1)))
    print("sum", strategy.reduce("SUM", each, axis=None).numpy(), "of", strategy.num_replicas_in_sync)
"""


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_the_example_of_a_framework_goes_on_after_a_kill_from_what_it_saved(
    lab: Lab, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KERAS_BACKEND", raising=False)  # which other tests set in this process
    require_environment(framework)
    folder = lab.runs_dir.parent / framework
    folder.mkdir()
    text = (EXAMPLES / framework / "train.py").read_text()
    save = "    if rank == 0 and step % 20 == 0:\n"
    assert save in text
    (folder / "train.py").write_text(text.replace(save, f"    time.sleep(0.05)\n{save}"))
    run = launch(lab, ["python", "train.py"], workdir=str(folder), framework=framework)
    lab.reach(run, 40)
    lab.signal(run, signal.SIGKILL, 1)
    killed = lab.finish(run)
    assert lab.state(run) == "failed" and max(losses(killed)) < 200
    resumed = lab.finish(launch(lab, resume=lab.read(run)))
    assert result(resumed)["outcome"] == "done", result(resumed)
    assert sorted(losses(resumed)) == list(range(20, 201, 20)) and losses(resumed)[200] < 0.01
    assert "rank 1 of 2: weight 2.9" in (resumed.directory.read_text("logs/1/host-1.log") or "")


def require_environment(framework: str) -> Path:
    """Return its interpreter."""
    python = environments.environment_python(framework)
    if framework != environments.OWN and not (python.parent.parent / environments.COMPLETE).exists():
        pytest.skip(
            f"this machine has no environment of {framework}; `fab train --framework {framework} …` makes it"
        )
    return python


# One of its checks is that a file which one process writes is there for the other: RUN_DIR is, the folder is not.
ACCELERATE = 'cd "$RUN_DIR" && exec python -m accelerate.test_utils.scripts.test_script'


@pytest.mark.parametrize(
    ("framework", "words", "says"),
    [
        pytest.param("jax", ["python", "-c", JAX], "sum 3.0 of 2", id="jax"),
        pytest.param("pytorch", ["python", "-c", TORCH], "sum 3.0 of 2", id="torch"),
        # It asks for the same peers, and then much of Accelerate itself.
        pytest.param(
            "pytorch",
            ["sh", "-c", ACCELERATE],
            "Num processes: 2",
            id="accelerate",
            marks=pytest.mark.nightly,
        ),
        pytest.param("tensorflow", ["python", "-c", TENSORFLOW], "sum 3.0 of 2", id="tensorflow"),
    ],
)
def test_a_program_that_knows_nothing_of_this_repository_finds_its_peers(
    lab: Lab, framework: str, words: list[str], says: str
) -> None:
    python = require_environment(framework)
    run = lab.finish(launch(lab, words, framework=framework, python=str(python)))
    logs = [lab.log(run, host) for host in (0, 1)]
    assert result(run)["outcome"] == "done", logs
    assert all(says in log for log in logs), logs
