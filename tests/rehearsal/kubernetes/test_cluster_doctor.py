"""`fab doctor` of a slice in a cluster, on a real API server: an administrator, the role of the docs, no role."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config

from backends.pods.api_server import Connection
from backends.resolve import inventory_target
from console.doctor import doctor
from console.doctor.workstation import Answer, Machine
from contracts.inventory import Cluster, NodePool, Slice
from launch.targets import TargetRequest
from rehearsal.kubernetes.rehearsal_cluster import on_page
from tests.control_plane import LocalControlPlane
from tests.launch.slices import NO_STORAGE, make_inventory, make_slice

DOCS = Path(__file__).resolve().parents[3] / "docs" / "kubernetes.md"
NAMESPACE = "doctored"
CLUSTER = Cluster(name="rehearsal", context=None, namespace=NAMESPACE, service_account="tpu-stack")
POOL = NodePool(machine_type="ct4p-hightpu-4t", accelerator="tpu-v4-podslice", nodes=2)
V4 = {"accelerator_type": "v4-16", "generation": "v4", "topology": "2x2x2", "zone": "us-central2-b"}
SLICE = make_slice([], **V4, name="main", origin="node-pool main", pool=POOL)
LABELS = {
    "cloud.google.com/gke-tpu-accelerator": POOL.accelerator,
    "cloud.google.com/gke-tpu-topology": "2x2x2",
}


@pytest.fixture(scope="module")
def core(control_plane: LocalControlPlane) -> Iterator[client.CoreV1Api]:
    made = client.CoreV1Api(config.new_client_from_config(str(control_plane.kubeconfig)))
    yield made
    made.delete_namespace(NAMESPACE)
    for number in range(2):
        made.delete_node(f"tpu-{number}")


@pytest.fixture(scope="module")
def user(control_plane: LocalControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kubeconfig of somebody who may do nothing yet."""
    path = tmp_path_factory.mktemp("user") / "kubeconfig"
    server = control_plane.layout.server
    control_plane.authority.kubeconfig(path, server, "ada", context="rehearsal", namespace=NAMESPACE)
    return path


def findings(kubeconfig: Path, one_slice: Slice = SLICE) -> dict[str, tuple[str, str]]:
    """What is said of the cluster, by the last word of each check: name → state and message."""
    cluster = dataclasses.replace(CLUSTER, kubeconfig=str(kubeconfig))
    storage = dataclasses.replace(NO_STORAGE, bucket_url="gs://none")
    inventory = make_inventory(one_slice, storage=storage, images={}, cluster=cluster)
    home = kubeconfig.parent
    target = inventory_target(inventory, TargetRequest(stack="dev.json", runs=f"file://{home}/runs"))
    here = Machine(environ={}, home=home, checkout=DOCS.parents[1], cache_dir=home, ask=silent)
    told = doctor.findings(here, lambda: target, wants_stack=False)
    return {each.name: (each.state, each.message) for each in told if each.area in ("cluster", "storage")}


def silent(argv: Sequence[str]) -> Answer:
    return Answer(exit_code=None)


def add_node(core: client.CoreV1Api, number: int, chips: str = "4") -> None:
    metadata = client.V1ObjectMeta(name=f"tpu-{number}", labels=LABELS)
    core.create_node(client.V1Node(metadata=metadata))
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
    status = {
        "capacity": {"google.com/tpu": chips},
        "allocatable": {"google.com/tpu": chips},
        "conditions": [ready],
    }
    core.patch_node_status(f"tpu-{number}", {"status": status})


def test_who_may_do_nothing_is_told_what_is_missing_and_who_has_the_documented_role_may_launch(
    control_plane: LocalControlPlane, core: client.CoreV1Api, user: Path
) -> None:
    before = findings(user)
    assert before["reached"][0] == "ok" and re.search(r"Kubernetes v1\.\d+", before["reached"][1])
    state, said = before["rights"]
    assert state == "fail" and "create jobs, delete jobs" in said and "create pods/exec" in said
    assert "hosts" not in before and "preflight" not in before
    assert (before["namespace"][0], before["nodes"][0]) == ("skip", "skip")
    as_administrator = ("ok", f"{NAMESPACE} is not there yet: the first run makes it")
    assert findings(control_plane.kubeconfig)["namespace"] == as_administrator

    core.create_namespace(client.V1Namespace(metadata=client.V1ObjectMeta(name=NAMESPACE)))
    (role,) = on_page(DOCS.read_text(), "Role")
    role["metadata"]["namespace"] = NAMESPACE
    rbac = client.RbacAuthorizationV1Api(core.api_client)
    rbac.create_namespaced_role(NAMESPACE, role, field_validation="Strict")
    binding = {
        "metadata": {"name": "ada"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "Role",
            "name": role["metadata"]["name"],
        },
        "subjects": [{"kind": "User", "name": "ada", "apiGroup": "rbac.authorization.k8s.io"}],
    }
    rbac.create_namespaced_role_binding(NAMESPACE, binding)
    after = findings(user)
    assert after["rights"] == ("ok", f"you may launch in {NAMESPACE} (15 rights asked)")
    assert after["namespace"] == ("ok", f"{NAMESPACE}; the first run makes its service account tpu-stack")


def test_nodes_are_counted_by_their_labels_readiness_and_chips(
    control_plane: LocalControlPlane, core: client.CoreV1Api
) -> None:
    admin = control_plane.kubeconfig
    assert findings(admin)["nodes"] == (
        "warn",
        f"no node has the labels {','.join(f'{key}={value}' for key, value in LABELS.items())}, a run takes 2",
    )
    add_node(core, 0)
    assert findings(admin)["nodes"] == ("warn", "1 of 2 nodes of v4-16 are ready")
    add_node(core, 1)
    assert findings(admin)["nodes"] == ("ok", "2 nodes of v4-16 are ready, a run takes 2")
    core.patch_node("tpu-1", {"spec": {"unschedulable": True}})
    assert findings(admin)["nodes"] == ("warn", "1 of 2 nodes of v4-16 are ready")
    core.patch_node("tpu-1", {"spec": {"unschedulable": None}})
    core.patch_node_status("tpu-1", {"status": {"allocatable": {"google.com/tpu": "0"}}})
    said = findings(admin)["nodes"][1]
    assert said == "tpu-1 offers google.com/tpu: 0, its machine type ct4p-hightpu-4t has 4"


def test_which_controllers_are_installed_and_which_are_missed_is_said(
    control_plane: LocalControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = dataclasses.replace(SLICE, count=2)
    found = findings(control_plane.kubeconfig, several)
    assert found["jobset"] == ("ok", "JobSet is installed") and found["controllers"][0] == "skip"
    ask = Connection.ask

    def without_jobset(self: Connection, method: str, path: str, *more: Any, **query: Any) -> Any:
        answer = ask(self, method, path, *more, **query)
        kept = [each for each in answer.get("groups", ()) if each["name"] != "jobset.x-k8s.io"]
        return {**answer, "groups": kept} if "groups" in answer else answer

    monkeypatch.setattr(Connection, "ask", without_jobset)
    assert findings(control_plane.kubeconfig, several)["jobset"][0] == "fail"


def test_a_cluster_that_does_not_answer_is_said_once(
    control_plane: LocalControlPlane, tmp_path: Path
) -> None:
    path = tmp_path / "kubeconfig"
    text = control_plane.kubeconfig.read_text().replace(control_plane.layout.server, "https://127.0.0.1:9")
    path.write_text(text)
    found = findings(path)
    assert set(found) == {"reached", "runs"}
    assert found["reached"][0] == "fail" and "cannot be reached" in found["reached"][1]
