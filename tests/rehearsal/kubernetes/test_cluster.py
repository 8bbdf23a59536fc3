"""Real nodes: pods get their addresses, names and chips, nodes come back, and nothing of it all is left."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import kubernetes.client
import kubernetes.config
import kubernetes.stream
import pytest

from infra import catalogue
from rehearsal.daemon.cluster_rehearsal import ClusterRehearsal
from rehearsal.daemon.fault_commands import FaultRequest
from rehearsal.kubernetes.cluster import NAMESPACE
from rehearsal.kubernetes.control_plane import Name, find_or_build
from rehearsal.machines import docker_engine, guardian
from rehearsal.machines.machines import Machines
from tools import stand_in_base

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]
NAME = f"test-{secrets.token_hex(4)}"
LIMIT_S = 240.0
CGROUPS = Path("/sys/fs/cgroup")
MEET = """
import os, socket, time
mine = int(os.environ["JOB_COMPLETION_INDEX"])
with socket.create_server(("", 8000)):
    until = time.monotonic() + 60
    for other in ("pair-0.pair", "pair-1.pair"):
        while True:
            try:
                socket.create_connection((other, 8000), 2).close()
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)
    print("met", flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterRehearsal]:
    base = stand_in_base.chosen(os.environ, print)
    environ = os.environ | ({stand_in_base.VARIABLE: base} if base else {})
    fab = [str(Path(sys.executable).with_name("fab")), "build", "--framework", "jax", "--platform", "cpu"]
    subprocess.run(fab, env=environ, check=True, timeout=1800)
    programs = find_or_build(environ, print, get_args(Name))
    with (
        Machines(name=NAME, say=print, environ=environ, kind="kubernetes") as machines,
        ClusterRehearsal(
            folder=tmp_path_factory.mktemp("cluster") / "kubernetes",
            machines=machines,
            programs=programs,
            accelerator=catalogue.ACCELERATORS["v4-16"],
            say=print,
        ) as found,
    ):
        mine = {"label": f"{docker_engine.LABEL}={NAME}"}
        ids = [each.id for each in found.cluster.client.containers.list(filters=mine)]
        yield found
    assert guardian.left(docker_engine.connect(), NAME) == []
    assert not [each for each in CGROUPS.glob("*/docker/*") if each.name in ids]
    assert not [line for line in Path("/proc/mounts").read_text().splitlines() if "kubelet" in line]


def job(image: str) -> dict[str, Any]:
    container = {
        "name": "run", "image": image, "command": ["python", "-c", MEET],
        "resources": {"limits": {"google.com/tpu": "4"}, "requests": {"google.com/tpu": "4"}},
    }  # fmt: skip
    template = {
        "metadata": {"labels": {"tpu-stack/run": "pair"}},
        "spec": {
            "restartPolicy": "Never", "subdomain": "pair", "containers": [container],
            "tolerations": [{"key": "google.com/tpu", "operator": "Exists"}], "terminationGracePeriodSeconds": 1,
        },
    }  # fmt: skip
    spec = {
        "completions": 2, "parallelism": 2, "completionMode": "Indexed", "template": template, "backoffLimit": 20,
    }  # fmt: skip
    return {"metadata": {"name": "pair"}, "spec": spec}


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.5)


def test_pods_meet_by_name_with_the_rights_of_a_user_and_again_after_each_accident(
    rehearsed: ClusterRehearsal,
) -> None:
    cluster, faults = rehearsed.cluster, rehearsed.faults
    core = kubernetes.client.CoreV1Api(cluster.api)

    def has_met(pod: Any) -> bool:
        try:
            return "met" in core.read_namespaced_pod_log(pod.metadata.name, NAMESPACE)
        except kubernetes.client.ApiException:  # its node is gone, and it is not taken off the list yet
            return False

    def met() -> set[str]:
        """Pods that run and have met the other."""
        running = core.list_namespaced_pod(NAMESPACE, field_selector="status.phase=Running").items
        return {
            each.metadata.name for each in running if not each.metadata.deletion_timestamp and has_met(each)
        }

    def are_others_than(before: set[str]) -> bool:
        now = met()
        return len(now) == 2 and now != before

    service = {
        "metadata": {"name": "pair"},
        "spec": {
            "clusterIP": "None",
            "selector": {"tpu-stack/run": "pair"},
            "publishNotReadyAddresses": True,
        },
    }
    with kubernetes.config.new_client_from_config(str(cluster.kubeconfig)) as user:
        kubernetes.client.CoreV1Api(user).create_namespaced_service(NAMESPACE, service)
        kubernetes.client.BatchV1Api(user).create_namespaced_job(NAMESPACE, job(cluster.images["jax"]))
        with pytest.raises(kubernetes.client.ApiException):
            kubernetes.client.CoreV1Api(user).list_namespaced_secret(NAMESPACE)
    until(lambda: len(met()) == 2)  # each node has chips for one
    with kubernetes.config.new_client_from_config(str(cluster.kubeconfig)) as user:
        entered = kubernetes.stream.stream(
            kubernetes.client.CoreV1Api(user).connect_get_namespaced_pod_exec,
            min(met()), NAMESPACE, container="run", command=["id", "-u"], stdout=True, _preload_content=False,
        )  # fmt: skip
        with contextlib.ExitStack() as exits:
            exits.callback(entered.sock.shutdown)  # its own `close` leaves the socket of what has ended open
            entered.run_forever(timeout=30)
            assert entered.read_stdout().strip() == "10001"

    for name in ("kill-pod", "drain", "node-gone"):
        before = met()
        faults.carry_out(name, FaultRequest(host="1"))
        until(functools.partial(are_others_than, before))

    faults.carry_out("api-away", FaultRequest())
    assert "does not answer" in rehearsed.status()["problem"]
    faults.carry_out("api-back", FaultRequest())
    until(lambda: len(met()) == 2)
