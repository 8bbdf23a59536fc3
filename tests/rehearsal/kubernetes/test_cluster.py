"""Runs on pods of a real Kubernetes, as a person has them: whatever happens, a run ends with the losses of an
undisturbed one or with a reason, nothing of it is left, and nothing of anybody else is touched."""

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
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import kubernetes.client
import kubernetes.config
import pytest

from rehearsal import state
from rehearsal.daemon import cli
from rehearsal.kubernetes.rehearsal_cluster import NAMESPACE
from rehearsal.rehearse import has_ended, is_done, read_losses
from tests.launch.code.package_index import add_wheel
from tests.rehearsal.daemon.conftest import LIMIT_S, ROOT, Person, environ
from tests.rehearsal.daemon.test_keeper import losses_in_the_bucket
from tests.rehearsal.daemon.test_rehearsal_up import LAUNCH_LIMIT_S, SIZES, run_started, status
from tests.rehearsal.kubernetes.lab import (
    ENDS_LIMIT_S,
    LOOK_S,
    THEIRS,
    TRAIN,
    Cluster,
    begun,
    described,
    ends_started_again,
    options,
    until_step,
    up,
)
from tests.waiting import until

__all__ = ["environ"]
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

STEPS, MANY_STEPS = 10_000, 25_000  # of some 6 ms: what strikes a run strikes it in the midst of them
OPTIONS = options(STEPS)
AWAY_S = 60.0
NOT_HEARD = re.compile(
    "no answer within .*see whether this machine reaches the API server of cluster rehearsal"
)
CUT_S = 100.0  # 20 until the node is not ready, 60 until its pods are given up
BUDGET_USD = 0.2  # 98 seconds of 8 chips
EATER = """
found = []
while True:
    found.append(bytearray(b"x" * (64 << 20)))
"""


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory, environ: Mapping[str, str]) -> Iterator[Person]:
    """Whose rehearsal is up, with two nodes."""
    folder = tmp_path_factory.mktemp("pods") / "rehearsal"
    with up(Person(folder, environ), cli.UpRequest(hosts=2, kind="kubernetes")) as found:
        yield found


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


@pytest.fixture(scope="module")
def right_of_many(person: Person) -> dict[int, float]:
    run = run_started(person.succeed(f"{TRAIN} --args '{options(MANY_STEPS)}'", LAUNCH_LIMIT_S))
    return losses_in_the_bucket(person, run)


@pytest.fixture(autouse=True)
def others(cluster: Cluster) -> Iterator[None]:
    """Nothing of anybody else is touched, and nothing of a run goes on after its end."""
    before = cluster.theirs()
    yield
    until(lambda: cluster.left() == [], LIMIT_S, pause_s=LOOK_S)
    assert cluster.theirs() == before


def a_pod_evicted_and_a_node_gone(person: Person) -> None:
    until_step(person, 200)
    person.act("evict", "0")
    until_step(person, 1, attempt=1)
    person.act("node-gone", "1")


def a_process_that_hangs(person: Person) -> None:
    until_step(person, 200)
    person.act("wedge", "1")


STORIES = (a_pod_evicted_and_a_node_gone, a_process_that_hangs)
"""`make rehearse KUBERNETES=1` has a killed pod and a drained node."""


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_a_run_is_started_again_and_ends_with_the_losses_of_an_undisturbed_one(
    person: Person, right: dict[int, float], story: Callable[[Person], None]
) -> None:
    run = run_started(person.succeed(f"{TRAIN} --detach --hang-limit 20 --args '{OPTIONS}'", LAUNCH_LIMIT_S))
    story(person)
    ends_started_again(person)
    assert losses_in_the_bucket(person, run) == right


def test_the_pod_of_a_kubelet_that_is_cut_off_is_given_up_and_goes_on_until_the_kubelet_is_told(
    person: Person, right_of_many: dict[int, float]
) -> None:
    run = run_started(person.succeed(f"{TRAIN} --detach --args '{options(MANY_STEPS)}'", LAUNCH_LIMIT_S))
    until_step(person, 200)
    person.act("cut", "1")
    threading.Event().wait(CUT_S)
    person.act("heal", "1")
    ends_started_again(person)
    assert losses_in_the_bucket(person, run) == right_of_many


def test_a_run_needs_neither_its_launcher_nor_the_api_server_nor_for_a_minute_the_bucket(
    person: Person, right_of_many: dict[int, float], tmp_path: Path
) -> None:
    log = tmp_path / "train.log"
    with begun(person, f"{TRAIN} --args '{options(MANY_STEPS)}'", log) as launcher:
        until(lambda: "step " in log.read_text(), LAUNCH_LIMIT_S, pause_s=LOOK_S)
        run = run_started(log.read_text())
        for away, back in (("api-away", "api-back"), ("bucket-away", "bucket-back")):
            assert not has_ended(status(person)), "it was too quick to be struck"
            person.act(away)
            begun_s = time.monotonic()
            looked = person.type("fab", "status", "--stack", "rehearsal") if away == "api-away" else None
            threading.Event().wait(AWAY_S - (time.monotonic() - begun_s))
            person.act(back)
            assert looked is None or NOT_HEARD.search(looked.stdout + looked.stderr), looked
            assert launcher.poll() in (None, 0), log.read_text()
        launcher.kill()
    until(lambda: has_ended(status(person)), ENDS_LIMIT_S, pause_s=LOOK_S)
    assert is_done(status(person)), status(person)
    assert losses_in_the_bucket(person, run) == right_of_many


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
    assert f"{run} was stopped" in stopped and "parameters on 2 devices" in log.read_text()
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


@pytest.mark.parametrize("runtime", ["bare", "docker"])
def test_the_same_run_on_this_machine_has_the_same_losses(
    person: Person, right: dict[int, float], tmp_path: Path, runtime: str
) -> None:
    line = f"fab train --hosts 2 --runtime {runtime} --runs {tmp_path}/runs --job flax_mlm"
    run = run_started(person.succeed(f"{line} --args '{OPTIONS}'", LAUNCH_LIMIT_S))
    assert read_losses(tmp_path / "runs" / run / "metrics.jsonl") == right


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

    person.act("quota", amount=4)
    done = person.type(
        *shlex.split(f"{TRAIN} --wait 20 --args '--steps 100 {SIZES}'"), limit_s=LAUNCH_LIMIT_S
    )
    assert done.returncode == 2 and "1 of 2 pods could not be placed within 20 s" in done.stderr, done.stderr
    assert "exceeded quota" in done.stderr and cluster.left() == []

    person.act("no-quota")

    limits = {"limits": [{"type": "Container", "default": {"memory": "1536Mi"}}]}
    cluster.core.create_namespaced_limit_range(NAMESPACE, {"metadata": {"name": "memory"}, "spec": limits})
    (tmp_path / "eat").mkdir()
    add_wheel(tmp_path / "index", "greet", "1.0")
    needed = f"--no-index\n--find-links {tmp_path}/index/greet\ngreet\n"
    (tmp_path / "eat" / "requirements.txt").write_text(needed)
    (tmp_path / "eat" / "eat.py").write_text(f"import greet\n{EATER}")
    line = f"fab train --stack rehearsal --max-restarts 1 --workdir {tmp_path}/eat -- python eat.py"
    done = person.type(*line.split(), limit_s=LAUNCH_LIMIT_S)
    cluster.core.delete_namespaced_limit_range("memory", NAMESPACE)
    assert done.returncode == 1 and "for want of memory" in done.stdout, done.stdout + done.stderr


def test_a_run_whose_launcher_was_killed_while_its_pods_waited_begins_when_they_are_there(
    person: Person, right: dict[int, float], tmp_path: Path
) -> None:
    person.act("quota", amount=4)
    log = tmp_path / "train.log"
    with begun(person, f"{TRAIN} --wait 300 --args '{OPTIONS}'", log):
        until(lambda: "waiting for 1 of 2 pods" in log.read_text(), LIMIT_S, pause_s=LOOK_S)
    listed = json.loads(person.succeed("fab runs --stack rehearsal --json"))["runs"]
    (run,) = (each["run"] for each in listed if each["state"] == "starting")
    person.act("no-quota")
    until_step(person, 200)
    until(lambda: has_ended(status(person)), ENDS_LIMIT_S, pause_s=LOOK_S)
    assert losses_in_the_bucket(person, run) == right


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
