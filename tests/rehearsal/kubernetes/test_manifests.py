"""What is made of a run's plan is what a real API server and JobSet's own webhooks take, with no field that they do not
know."""

import copy
from typing import Any

import pytest
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from backends.pods import manifests
from tests.backends.pods.pod_plans import CLUSTER, TABLE
from tests.control_plane import LocalControlPlane

PATHS = {
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
    "JobSet": "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets",
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


@pytest.mark.parametrize("name", TABLE)
def test_every_manifest_is_accepted_as_it_is(api: client.ApiClient, name: str) -> None:
    for manifest in manifests.manifests(*TABLE[name]):
        found = ask(api, manifest)
        assert contains(found["spec"], manifest["spec"]), manifest["kind"]


def test_what_jobset_refuses_is_refused(api: client.ApiClient) -> None:
    wrong = copy.deepcopy(manifests.manifests(*TABLE["two slices"])[0])
    wrong["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"] = ["PodFailed"]
    with pytest.raises(ApiException, match="PodFailed"):
        ask(api, wrong)


def contains(found: Any, wanted: Any) -> bool:
    """Whether an object has all that was asked for; the API server adds defaults."""
    if isinstance(wanted, dict):
        return all(name in found and contains(found[name], value) for name, value in wanted.items())
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(contains, found, wanted))
    return bool(found == wanted)
