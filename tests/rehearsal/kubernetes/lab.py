"""A person whose rehearsal is a cluster, what an administrator sees of it, and runs that are watched from outside."""

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes.client
import kubernetes.config

from backends.pods.pods import MANAGED_BY, RUN_LABEL
from rehearsal import state
from rehearsal.daemon import cli
from rehearsal.kubernetes.rehearsal_cluster import NAMESPACE
from rehearsal.machines import docker_engine
from rehearsal.rehearse import attempt_in, has_ended, is_done, step_in
from tests.rehearsal.daemon.conftest import ROOT, Person
from tests.rehearsal.daemon.test_rehearsal_up import LAUNCH_LIMIT_S, SIZES, status
from tests.waiting import until

TRAIN = "fab train --stack rehearsal --job flax_mlm"
ENDS_LIMIT_S = 900.0
LOOK_S = 2.0
CGROUPS = Path("/sys/fs/cgroup")
THEIRS = "theirs"


def options(steps: int) -> str:
    return (
        f"--steps {steps} --checkpoint-every 200 --log-every 50 --eval-every {steps} --batch-size 12 {SIZES}"
        " --eval-fraction 0.01 --remote-cache gs://my-rehearsal-runs/tokens"
    )


@contextlib.contextmanager
def up(person: Person, wanted: cli.UpRequest) -> Iterator[Person]:
    """Its rehearsal is up in the block; when it is down, nothing of it is left on this computer."""
    fab = str(Path(sys.executable).with_name("fab"))
    build = [fab, "build", "--framework", "jax", "--platform", "cpu"]
    subprocess.run(build, env=dict(person.environ), cwd=ROOT, check=True, timeout=1800)
    ids: list[str] = []
    try:
        person.up(wanted)
        client = docker_engine.connect()
        mine = {"label": f"{docker_engine.LABEL}={state.rehearsal_name(person.folder)}"}
        ids = [each.id for each in client.containers.list(filters=mine)]
        client.close()
        yield person
    finally:
        cli.down(person.folder, person.said.append)
    assert ids and person.left() == []
    assert not [each for each in CGROUPS.glob("*/docker/*") if each.name in ids]
    assert not [line for line in Path("/proc/mounts").read_text().splitlines() if "kubelet" in line]


class Cluster:
    """What an administrator sees of it, and somebody else's Jobs in it."""

    def __init__(self, person: Person) -> None:
        path = person.folder / "kubernetes" / "administrator"
        self._client = kubernetes.config.new_client_from_config(str(path))
        self.core = kubernetes.client.CoreV1Api(self._client)
        self._jobs = kubernetes.client.BatchV1Api(self._client)

    def close(self) -> None:
        self._client.close()

    def left(self) -> list[str]:
        """What goes on of runs."""
        jobs = self._jobs.list_namespaced_job(NAMESPACE, label_selector=RUN_LABEL).items
        pods = self.core.list_namespaced_pod(NAMESPACE, label_selector=RUN_LABEL).items
        found = [job.metadata.name for job in jobs if not job.status.conditions]
        return found + [pod.metadata.name for pod in pods if pod.status.phase in ("Pending", "Running")]

    def chips_in_use(self) -> str:
        """Of the one ClusterQueue."""
        custom = kubernetes.client.CustomObjectsApi(self._client)
        (queue,) = custom.list_cluster_custom_object("kueue.x-k8s.io", "v1beta2", "clusterqueues")["items"]
        (flavor,) = queue["status"]["flavorsUsage"]
        return next(str(each["total"]) for each in flavor["resources"] if each["name"] == "google.com/tpu")

    def let_others_in(self, image: str) -> None:
        """Somebody has a Job of the same labels in a namespace of their own, and one that is suspended beside ours."""
        self.core.create_namespace({"metadata": {"name": THEIRS}})
        container = {
            "name": "run",
            "image": image,
            "command": ["python", "-c", "import time; time.sleep(86400)"],
        }
        spec = {"restartPolicy": "Never", "containers": [container], "nodeName": "node-0"}
        template = {"metadata": {"labels": {"app": THEIRS}}, "spec": spec}
        for namespace, labels in ((THEIRS, MANAGED_BY), (NAMESPACE, {})):
            rest = {"template": template, "suspend": namespace == NAMESPACE}
            job = {"metadata": {"name": THEIRS, "labels": labels}, "spec": rest}
            self._jobs.create_namespaced_job(namespace, job)
        until(lambda: [each[2] for each in self.theirs()][2:] == ["Running"], LAUNCH_LIMIT_S, pause_s=LOOK_S)

    def theirs(self) -> list[tuple[str, str, str]]:
        jobs = self._jobs.list_job_for_all_namespaces(field_selector=f"metadata.name={THEIRS}").items
        pods = self.core.list_pod_for_all_namespaces(label_selector=f"app={THEIRS}").items
        found = [(each.metadata.uid, str(each.metadata.generation), "Job") for each in jobs]
        return found + [(each.metadata.uid, each.spec.node_name, each.status.phase) for each in pods]


def until_step(person: Person, step: int, *, attempt: int = 0) -> None:
    def is_there() -> bool:
        said = status(person)
        assert not has_ended(said), said
        return attempt_in(said) >= attempt and (step_in(said) or 0) >= step

    until(is_there, ENDS_LIMIT_S, pause_s=LOOK_S)


def described(person: Person, run: str) -> dict[str, Any]:
    """As `fab runs --json` has it."""
    found = json.loads(person.succeed("fab runs --stack rehearsal --all --json"))["runs"]
    return dict(next(each for each in found if each["run"] == run))


@contextlib.contextmanager
def begun(person: Person, line: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command that goes on while others are typed."""
    environment = {**person.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with log.open("wb") as said:
        process = subprocess.Popen(
            shlex.split(line), env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ends_started_again(person: Person) -> None:
    until(lambda: has_ended(status(person)), ENDS_LIMIT_S, pause_s=LOOK_S)
    assert is_done(said := status(person)) and attempt_in(said) > 0, said
