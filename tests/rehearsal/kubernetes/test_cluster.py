"""Runs on pods of a real Kubernetes, as a person has them: whatever happens, a run ends with the losses of an
undisturbed one or with a reason, nothing of it is left, and nothing of anybody else is touched."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes.client
import kubernetes.config
import pytest

from launch.cluster.pod_launcher import DEADLINE_LATER_S
from launch.cluster.pods import MANAGED_BY, RUN_LABEL
from launch.plan import JOIN_LIMIT_S
from rehearsal import state
from rehearsal.daemon import cli
from rehearsal.kubernetes.cluster import NAMESPACE
from rehearsal.machines import docker_engine
from rehearsal.rehearse import attempt_in, has_ended, is_done, step_in
from tests.rehearsal.daemon.conftest import LIMIT_S, ROOT, Person, environ
from tests.rehearsal.daemon.test_keeper import losses_in_the_bucket
from tests.rehearsal.daemon.test_rehearsal_up import LAUNCH_LIMIT_S, SIZES, run_started, status
from tests.rehearsal.waiting import until

__all__ = ["environ"]
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

STEPS = 10_000  # of some 5 ms: what strikes a run strikes it in the midst of them
OPTIONS = (
    f"--steps {STEPS} --checkpoint-every 200 --log-every 50 --eval-every {STEPS} --batch-size 12 {SIZES}"
    " --eval-fraction 0.01 --remote-cache gs://my-rehearsal-runs/tokens"
)
TRAIN = "fab train --stack rehearsal --job flax_mlm"
ENDS_LIMIT_S = 900.0
LOOK_S = 2.0
AWAY_S = 60.0
CUT_S = 100.0  # 20 until the node is not ready, 60 until its pods are given up
BUDGET_USD = 0.2  # 98 seconds of 8 chips
DEADLINE_S = DEADLINE_LATER_S + JOIN_LIMIT_S["cpu"]
CGROUPS = Path("/sys/fs/cgroup")
THEIRS = "theirs"
EATER = """
found = []
while True:
    found.append(bytearray(b"x" * (64 << 20)))
"""


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


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory, environ: Mapping[str, str]) -> Iterator[Person]:
    """Whose rehearsal is up, with two nodes. When it is down, nothing of it is left on this computer."""
    made = Person(tmp_path_factory.mktemp("pods") / "rehearsal", environ)
    fab = str(Path(sys.executable).with_name("fab"))
    build = [fab, "build", "--framework", "jax", "--platform", "cpu"]
    subprocess.run(build, env=dict(environ), cwd=ROOT, check=True, timeout=1800)
    ids: list[str] = []
    try:
        made.up(cli.Wanted(hosts=2, kind="kubernetes"))
        client = docker_engine.connect()
        mine = {"label": f"{docker_engine.LABEL}={state.name_of(made.folder)}"}
        ids = [each.id for each in client.containers.list(filters=mine)]
        client.close()
        yield made
    finally:
        cli.down(made.folder, made.said.append)
    assert ids and made.left() == []
    assert not [each for each in CGROUPS.glob("*/docker/*") if each.name in ids]
    assert not [line for line in Path("/proc/mounts").read_text().splitlines() if "kubelet" in line]


@pytest.fixture(scope="module")
def cluster(person: Person) -> Iterator[Cluster]:
    made = Cluster(person)
    made.let_others_in(json.loads(state.open_rehearsal(person.environ).inventory_json)["images"]["jax"])
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(person: Person) -> str:
    """The run that nothing has happened to."""
    return run_started(person.succeed(f"{TRAIN} --args '{OPTIONS}'", LAUNCH_LIMIT_S))


@pytest.fixture(scope="module")
def right(person: Person, undisturbed: str) -> dict[int, float]:
    return losses_in_the_bucket(person, undisturbed)


@pytest.fixture(autouse=True)
def others(cluster: Cluster) -> Iterator[None]:
    """Nothing of anybody else is touched, and nothing of a run goes on after its end."""
    before = cluster.theirs()
    yield
    until(lambda: cluster.left() == [], LIMIT_S, pause_s=LOOK_S)
    assert cluster.theirs() == before


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


def pods_killed_and_evicted(person: Person, _tmp: Path) -> None:
    until_step(person, 200)
    person.act("kill-pod", "1")
    until_step(person, 1, attempt=1)
    person.act("evict", "0")


def nodes_drained_and_gone(person: Person, _tmp: Path) -> None:
    until_step(person, 200)
    person.act("drain", "0")
    until_step(person, 1, attempt=1)
    person.act("node-gone", "1")


def a_process_that_hangs(person: Person, _tmp: Path) -> None:
    until_step(person, 200)
    person.act("wedge", "1")


def a_kubelet_that_is_cut_off(person: Person, _tmp: Path) -> None:
    """For so long that its pod is given up; the pod itself goes on, until the kubelet is told."""
    until_step(person, 200)
    person.act("cut", "1")
    threading.Event().wait(CUT_S)
    person.act("heal", "1")


STORIES = (pods_killed_and_evicted, nodes_drained_and_gone, a_process_that_hangs, a_kubelet_that_is_cut_off)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_a_run_is_started_again_and_ends_with_the_losses_of_an_undisturbed_one(
    person: Person, right: dict[int, float], tmp_path: Path, story: Callable[[Person, Path], None]
) -> None:
    run = run_started(person.succeed(f"{TRAIN} --detach --hang-limit 20 --args '{OPTIONS}'", LAUNCH_LIMIT_S))
    story(person, tmp_path)
    until(lambda: has_ended(status(person)), ENDS_LIMIT_S, pause_s=LOOK_S)
    assert is_done(said := status(person)) and attempt_in(said) > 0, said
    assert losses_in_the_bucket(person, run) == right


def test_a_run_needs_neither_its_launcher_nor_the_api_server_nor_for_a_minute_the_bucket(
    person: Person, right: dict[int, float], tmp_path: Path
) -> None:
    log = tmp_path / "train.log"
    with begun(person, f"{TRAIN} --args '{OPTIONS}'", log) as launcher:
        until(lambda: "step " in log.read_text(), LAUNCH_LIMIT_S, pause_s=LOOK_S)
        run = run_started(log.read_text())
        for away, back in (("bucket-away", "bucket-back"), ("api-away", "api-back")):
            person.act(away)
            threading.Event().wait(AWAY_S)
            person.act(back)
        until(
            lambda: "answers again" in log.read_text() or launcher.poll() is not None, LIMIT_S, pause_s=LOOK_S
        )
        assert launcher.poll() in (None, 0), log.read_text()
        launcher.kill()
    assert "it is asked again" in log.read_text()
    until(lambda: has_ended(status(person)), ENDS_LIMIT_S, pause_s=LOOK_S)
    assert is_done(status(person)), status(person)
    assert losses_in_the_bucket(person, run) == right


def test_a_run_is_stopped_looked_into_and_recovered(
    person: Person, right: dict[int, float], tmp_path: Path
) -> None:
    run = run_started(person.succeed(f"{TRAIN} --detach --args '{OPTIONS}'", LAUNCH_LIMIT_S))
    log = tmp_path / "logs"
    with begun(person, "fab logs --stack rehearsal --follow", log) as logs:
        until_step(person, 200)
        assert shell_in_a_pod(person, "id -u") == "10001"
        stopped = person.succeed("fab stop --stack rehearsal")
        assert logs.wait(LIMIT_S) == 0
    assert f"{run} was stopped" in stopped and "compiling" in log.read_text()
    assert described(person, run)["state"] == "stopped"
    recovered = person.succeed(f"fab recover --stack rehearsal --run {run}", LAUNCH_LIMIT_S)
    assert f"{run} is done" in recovered
    assert losses_in_the_bucket(person, run) == right


def shell_in_a_pod(person: Person, command: str) -> str:
    """What a command says in `fab ssh`, which wants a terminal."""
    ours, theirs = pty.openpty()
    environment = {**person.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = ["fab", "ssh", "--stack", "rehearsal", "--host", "1"]
    with subprocess.Popen(
        words, env=environment, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs
    ) as shell:
        os.close(theirs)
        os.write(ours, f"echo said:$({command}):; exit\n".encode())
        said = b""
        with contextlib.suppress(OSError):  # its end
            while data := os.read(ours, 1 << 16):
                said += data
        shell.wait(LIMIT_S)
    os.close(ours)
    found = re.search(rb"said:([^$:]*):", said)
    assert found, said
    return found[1].decode()


def test_a_run_that_has_spent_its_budget_saves_ends_and_is_not_started_again(person: Person) -> None:
    endless = OPTIONS.replace(str(STEPS), "1000000")
    line = f"{TRAIN} --max-usd {BUDGET_USD} --args '{endless}'"
    done = person.type(*shlex.split(line), limit_s=LAUNCH_LIMIT_S)
    run = run_started(done.stdout)
    assert done.returncode == 130 and f"{run} was stopped: out of budget" in done.stdout, (
        done.stdout + done.stderr
    )
    assert "(from step " in done.stdout
    assert "it was stopped: " in person.succeed(f"fab recover --stack rehearsal --run {run}")


def test_what_cannot_be_had_ends_the_run_with_the_reason(
    person: Person, cluster: Cluster, tmp_path: Path
) -> None:
    opened = json.loads(state.open_rehearsal(person.environ).inventory_json)
    opened["images"]["jax"] = f"{opened['images']['jax'].partition('@')[0]}@sha256:{'0' * 64}"
    (tmp_path / "inventory.json").write_text(json.dumps(opened))
    few = f"--job flax_mlm --args '--steps 100 {SIZES}'"
    line = f"fab train --stack {tmp_path}/inventory.json --platform cpu {few}"
    done = person.type(*shlex.split(line), limit_s=LAUNCH_LIMIT_S)
    assert done.returncode == 1 and re.search(r"-0: (ErrImagePull|ImagePullBackOff)", done.stdout), (
        done.stdout
    )
    assert cluster.left() == []

    person.act("quota", amount="4")
    done = person.type(
        *shlex.split(f"{TRAIN} --wait 20 --args '--steps 100 {SIZES}'"), limit_s=LAUNCH_LIMIT_S
    )
    assert done.returncode == 2 and "1 of 2 pods could not be placed within 20 s" in done.stderr, done.stderr
    assert "exceeded quota" in done.stderr and cluster.left() == []

    person.act("no-quota")

    limits = {"limits": [{"type": "Container", "default": {"memory": "1536Mi"}}]}
    cluster.core.create_namespaced_limit_range(NAMESPACE, {"metadata": {"name": "memory"}, "spec": limits})
    (tmp_path / "eat").mkdir()
    (tmp_path / "eat" / "eat.py").write_text(EATER)
    line = f"fab train --stack rehearsal --max-restarts 1 --workdir {tmp_path}/eat -- python eat.py"
    done = person.type(*line.split(), limit_s=LAUNCH_LIMIT_S)
    cluster.core.delete_namespaced_limit_range("memory", NAMESPACE)
    assert done.returncode == 1 and "for want of memory" in done.stdout, done.stdout + done.stderr


def test_the_cluster_ends_a_run_whose_launcher_was_killed_while_its_pods_waited(
    person: Person, cluster: Cluster, tmp_path: Path
) -> None:
    person.act("quota", amount="4")
    log = tmp_path / "train.log"
    with begun(person, f"{TRAIN} --wait 5 --args '--steps 100 {SIZES}'", log):
        until(lambda: "waiting for 1 of 2 pods" in log.read_text(), LIMIT_S, pause_s=LOOK_S)
    assert cluster.left() != []
    until(lambda: cluster.left() == [], DEADLINE_S + LIMIT_S, pause_s=LOOK_S)
    person.act("no-quota")
    assert re.search(r" failed .*deadline", status(person), re.DOTALL), status(person)


def test_what_a_run_has_learned_is_served_from_a_pod(
    person: Person, undisturbed: str, tmp_path: Path
) -> None:
    log = tmp_path / "serve.log"
    with begun(person, f"fab serve --stack rehearsal {undisturbed}", log) as server:
        until(
            lambda: "Ctrl-C" in log.read_text() or server.poll() is not None, LAUNCH_LIMIT_S, pause_s=LOOK_S
        )
        found = re.search(r"http://127\.0\.0\.1:\d+/v1/predict", log.read_text())
        assert found, log.read_text()
        body = json.dumps({"inputs": ["Return the <mask> of the list."]}).encode()
        request = urllib.request.Request(found[0], data=body, headers={"content-type": "application/json"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            assert '"best": [{"text": ' in answer.read().decode()
        server.send_signal(signal.SIGINT)
        assert server.wait(LAUNCH_LIMIT_S) == 0, log.read_text()


def test_a_user_may_do_what_the_documented_role_allows_and_no_more(person: Person, cluster: Cluster) -> None:
    path = state.open_rehearsal(person.environ).environment["KUBECONFIG"]
    with kubernetes.config.new_client_from_config(path) as user:
        core = kubernetes.client.CoreV1Api(user)
        core.list_namespaced_pod(NAMESPACE)
        with pytest.raises(kubernetes.client.ApiException, match="403"):
            core.list_namespaced_secret(NAMESPACE)
        with pytest.raises(kubernetes.client.ApiException, match="403"):
            core.list_namespaced_pod(THEIRS)
