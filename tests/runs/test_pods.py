"""Pods of a run without a cluster: each in a process namespace of its own, started again as a Job would do it."""

import dataclasses
import datetime
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from backends.local.local_backend import on_this_machine
from backends.pods import manifests
from backends.pods.pods import AGENT, ROOT
from contracts.errors import FAILED, FAILED_HERE, PEER_LOST, WRONG_REQUEST
from contracts.inventory import Cluster, NodePool
from contracts.run_directory import RunDirectory
from launch import runs
from launch.launching import run_record
from launch.request.run_request import Request, work_out
from launch.runs import Run
from tests.runs.lab import CHECKOUT, Lab, Losses, losses

pytestmark = pytest.mark.timeout(600)

NAMESPACE = [
    "unshare",
    "--user",
    "--map-root-user",
    "--pid",
    "--fork",
    "--kill-child=SIGKILL",
    "--mount-proc",
]
CLUSTER = Cluster(name="c", context=None, namespace="n", service_account="s")
LIMIT_S = 200.0


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class Pods:
    """The pods of one run, each with a folder of its own as its /tpu-stack."""

    def __init__(self, lab: Lab, folder: Path, *more: str, count: int = 2, **changed: Any) -> None:
        self.lab, self.folder, self.count = lab, folder, count
        pool = NodePool(machine_type="ct5lp-hightpu-4t", accelerator="tpu-v5-lite-podslice", nodes=count)
        with mock.patch.dict(os.environ, lab.environ):
            target = on_this_machine(hosts=str(count), platform="cpu")
            request = Request(job=lab.job, arguments=(*lab.options(), *more), name=None, resume=None)
            planned = work_out(request, target)
        directory = RunDirectory(planned.directory.url)
        one = dataclasses.replace(target.slice, pool=pool, topology=f"2x{2 * count}")
        inventory = dataclasses.replace(target.inventory, cluster=CLUSTER)
        plan = dataclasses.replace(
            planned.plan,
            target=dataclasses.replace(planned.plan.target, slice=one, inventory=inventory),
            run_dir=directory.url,
            cwd=str(CHECKOUT),
            **changed,
        )
        plan = manifests.placed(plan)
        now = datetime.datetime.now(datetime.UTC)
        directory.write_json("run.json", run_record(plan, planned.config, name=None, now=now, before=None))
        self.directory = directory
        text = json.dumps(manifests.pod_request(plan, manifests.Options())).replace(
            plan.target.coordinator_host, "127.0.0.1"
        )
        wanted = (
            manifests.COORDINATOR_PORT,
            manifests.LIVENESS_PORT,
            manifests.GATHER_PORT,
        )
        for fixed, free in zip(wanted, free_ports(len(wanted)), strict=True):
            text = text.replace(str(fixed), str(free))
        self.told = text
        self.bundle = plan.bundle_sha256
        folder.mkdir()
        self.alive: dict[int, subprocess.Popen[bytes]] = {}
        self.started = 0
        self.last: dict[int, int] = {}

    def start(self, *indices: int) -> None:
        for index in indices:
            root = self.folder / f"pod-{index}-{self.started}"
            self.last[index] = self.started
            self.started += 1
            bundles = root / "agent" / "bundles"
            bundles.mkdir(parents=True)
            (bundles / self.bundle).symlink_to(CHECKOUT)
            environment = {
                # A checkout may be in a folder of that name too.
                "TPU_STACK_POD": re.sub(rf"(?<![\w./-]){ROOT}\b", str(root), self.told),
                "TPU_STACK_POD_NAME": root.name,
                "JOB_COMPLETION_INDEX": str(index),
            }
            with open(self.folder / f"{root.name}.log", "wb") as log:
                self.alive[index] = subprocess.Popen(
                    [*NAMESPACE, sys.executable, "-S", "-E", CHECKOUT / AGENT, "_pod"],
                    env={**os.environ, **environment},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def said(self) -> str:
        """What `kubectl logs` would show of all."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("pod-*.log")))

    def end(self, index: int, limit_s: float = LIMIT_S) -> int:
        """The exit code of a pod."""
        try:
            return self.alive.pop(index).wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"pod {index} is still there:\n{self.said()}") from None

    def ends(self) -> list[int]:
        return [self.end(index) for index in sorted(self.alive)]

    def kill(self, index: int) -> None:
        """All of it at once, as when its node is gone."""
        self.alive[index].kill()
        self.end(index)

    def run(self) -> Run:
        found = runs.read(self.directory)
        assert found is not None
        return found

    def reach(self, step: int) -> int:
        """Wait until a step has been taken, or a later one; the last one that has."""
        self.lab.until(lambda: self.step() >= step or not self.alive, f"step {step}", LIMIT_S)
        assert self.step() >= step, self.said()
        return self.step()

    def step(self) -> int:
        return max(losses(self.run()), default=0)

    def attempts(self) -> list[dict[str, Any]]:
        return list(self.run().described["attempts"])


Make = Callable[..., Pods]


@pytest.fixture
def make(lab: Lab, tmp_path: Path) -> Iterator[Make]:
    """Pods of a run; none of them outlives the test."""
    made: list[Pods] = []

    def make_one(*more: str, **changed: Any) -> Pods:
        made.append(Pods(lab, tmp_path / f"pods-{len(made)}", *more, **changed))
        return made[-1]

    yield make_one
    for pods in made:
        for index in list(pods.alive):
            pods.kill(index)


@pytest.mark.nightly  # `make rehearse KUBERNETES=1` and rehearsal/kubernetes tell the rest, of real pods
def test_the_first_pod_is_lost_and_the_others_wait_for_the_next_one(make: Make, right_losses: Losses) -> None:
    pods = make()
    pods.start(0, 1)
    pods.reach(12)
    pods.kill(0)
    pods.start(0)
    assert pods.end(1) == PEER_LOST
    pods.start(1)
    assert pods.ends() == [0, 0]
    assert losses(pods.run()) == right_losses


@pytest.mark.slow
def test_a_wrong_request_ends_the_run_for_good(make: Make, lab: Lab, tmp_path: Path) -> None:
    data = tmp_path / "mislaid.jsonl"
    data.write_bytes(lab.data.read_bytes())
    pods = make("--data", str(data))
    data.unlink()
    pods.start(0, 1)
    first, other = pods.ends()
    assert first == WRONG_REQUEST  # by which the Job fails
    assert f"the pod ends with {first}: " in pods.said()
    assert other in (WRONG_REQUEST, PEER_LOST)  # it may have lost the first before it found out by itself
    result = pods.run().current_result()
    assert result is not None and result["request"] is True


FAILS_AFTER_TWO_CHECKPOINTS = """
import os
attempt = int(os.environ["RUN_ATTEMPT"])
if attempt < 2:
    os.makedirs(f"{os.environ['RUN_DIR']}/checkpoints/{attempt + 5}")
raise SystemExit("KeyError: 'x'")
"""


@pytest.mark.slow
def test_a_program_error_is_repeated_after_a_new_checkpoint_and_else_ends_the_run_by_the_policy(
    make: Make,
) -> None:
    pods = make(count=1)
    told = json.loads(pods.told)
    told["start"]["argv"] = [sys.executable, "-c", FAILS_AFTER_TWO_CHECKPOINTS]
    pods.told = json.dumps(told)
    for code in (FAILED_HERE, FAILED_HERE, FAILED_HERE, FAILED):  # by the last of which the Job fails
        pods.start(0)
        assert pods.ends() == [code], pods.said()
    assert [each["checkpoint"] for each in pods.attempts()] == [None, 5, 6]
    result = pods.run().current_result()
    assert result is not None and result["outcome"] == "failed"
    assert result["error"].startswith("it failed twice from the checkpoint of step 6, with no new checkpoint")
