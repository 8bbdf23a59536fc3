"""What is made of a run's plan is what a real API server takes, with no field that it does not know."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from launch.cluster import manifests
from rehearsal.kubernetes.control_plane import LocalControlPlane
from tests.launch.cluster.pod_plans import CLUSTER, TABLE

PATHS = {
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
    "Service": "/api/v1/namespaces/{}/services",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
}
STRICTLY = [("dryRun", "All"), ("fieldValidation", "Strict")]


@pytest.fixture(scope="module")
def api(control_plane: LocalControlPlane) -> client.ApiClient:
    made: client.ApiClient = config.new_client_from_config(str(control_plane.kubeconfig))
    namespace = client.V1Namespace(metadata=client.V1ObjectMeta(name=CLUSTER.namespace))
    client.CoreV1Api(made).create_namespace(namespace)
    return made


def ask(api: client.ApiClient, manifest: dict[str, Any]) -> dict[str, Any]:
    """The object as the API server would make it."""
    path = PATHS[manifest["kind"]].format(CLUSTER.namespace)
    found: dict[str, Any] = api.call_api(
        path,
        "POST",
        query_params=STRICTLY,
        body=manifest,
        response_type="object",
        header_params={"Content-Type": "application/json"},
        auth_settings=["BearerToken"],
        _return_http_data_only=True,
    )
    return found


def job_in(manifest: dict[str, Any]) -> dict[str, Any]:
    """The Job that the controller of a JobSet makes of it; there is no such controller here."""
    if manifest["kind"] != "JobSet":
        return manifest
    (replicated,) = manifest["spec"]["replicatedJobs"]
    name = f"{manifest['metadata']['name']}-{replicated['name']}-0"
    metadata = {**manifest["metadata"], "name": name}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, **replicated["template"]} | {
        "metadata": metadata
    }


@pytest.mark.parametrize("name", TABLE)
def test_every_manifest_is_accepted_as_it_is(api: client.ApiClient, name: str) -> None:
    for manifest in map(job_in, manifests.manifests(*TABLE[name])):
        found = ask(api, manifest)
        assert contains(found["spec"], manifest["spec"]), manifest["kind"]


def test_a_field_that_there_is_not_is_refused(api: client.ApiClient) -> None:
    wrong = copy.deepcopy(manifests.manifests(*TABLE["one host"])[0])
    wrong["spec"]["template"]["spec"]["graceSeconds"] = 1
    with pytest.raises(ApiException, match="graceSeconds"):
        ask(api, wrong)


def contains(found: Any, wanted: Any) -> bool:
    """Whether an object has all that was asked for; the API server adds defaults."""
    if isinstance(wanted, dict):
        return all(name in found and contains(found[name], value) for name, value in wanted.items())
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(contains, found, wanted))
    return bool(found == wanted)
