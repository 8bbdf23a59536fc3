"""The simulated Cloud TPU API, by Google's own client: the queue, nodes, capacity, injected faults, lists, refusals."""

import http.client
import json
import urllib.parse
from typing import Any

import pytest

NODES = "/v2/projects/grant/locations/us-central1-a/nodes"
QUEUE = "/v2/projects/grant/locations/us-central1-a/queuedResources"


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"guaranteed": {}}, "one union"),
        ({"tpu": {}}, "ask for a node"),
        ({"parent": "projects/grant/locations/us-west4-a"}, "not the queued resource's own"),
        ({"multisliceParams": {"nodeCount": 2}}, "give one of them"),
        ({"nodeId": "a/b"}, "is no id"),
        ({"queueingPolicy": {"validUntilDuration": "1h"}}, "google-duration"),
        ({"node": {"acceleratorType": "v5litepod-12"}}, "invalid AcceleratorType"),
        ({"node": {"acceleratorType": "v4-8"}}, "us-central1-a does not offer v4-8"),
        ({"node": {"runtimeVersion": "v2-alpha-tpuv9"}}, "v2-alpha-tpuv5-lite"),
    ],
)
def test_what_contradicts_itself_or_is_not_offered_is_refused(
    lab: Any, changes: dict[str, Any], said: str
) -> None:
    body = lab.wanted("n")
    spec = body["tpu"]["nodeSpec"][0]
    if "node" in changes:
        spec["node"].update(changes["node"])
    else:
        (body if changes.keys() & {"guaranteed", "tpu", "queueingPolicy"} else spec).update(changes)
    error = lab.refused(lambda: lab.enqueue("q", body))
    assert error["status"] == "INVALID_ARGUMENT"
    assert said in error["message"]


def send(
    lab: Any, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, dict[str, Any], http.client.HTTPResponse]:
    """A request as it is, not as the client would allow it, and never sent again."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(lab.api.url).netloc, timeout=10)
    try:
        content = body if isinstance(body, str) or body is None else json.dumps(body)
        connection.request(method, path, content, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read()), response
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("method", "path", "body", "said"),
    [
        ("POST", f"{NODES}?nodeId=n", {"network_config": {}}, "Node.network_config: unknown name"),
        ("POST", f"{NODES}?nodeId=n", {"labels": {"a": 1}}, "Node.labels.a: 1 is no string"),
        ("POST", f"{NODES}?nodeId=n", {"networkConfig": {"queueCount": 2**31}}, "queueCount: 2147483648 is no int32"),
        ("POST", f"{NODES}?nodeId=n", {"dataDisks": [{"mode": "A"}]}, "Node.dataDisks[0].mode: 'A' is no value"),
        ("POST", f"{NODES}?nodeId=n", {"acceleratorType": "v6e-8"}, "Node.runtimeVersion: is required"),
        ("POST", f"{NODES}/n:explode", {}, "is no path"),
        ("GET", f"{QUEUE}?pageSize=many", None, "pageSize"),
        ("GET", f"{QUEUE}?fields=name", None, "unknown query parameter"),
        ("PATCH", f"{NODES}/n", None, "updateMask: is required"),
    ],
)  # fmt: skip
def test_a_request_that_is_not_as_the_document_says_is_refused_and_the_field_is_named(
    lab: Any, method: str, path: str, body: object, said: str
) -> None:
    code, answer, _ = send(lab, method, path, body)
    assert (code, answer["error"]["status"]) == (400, "INVALID_ARGUMENT")
    assert said in answer["error"]["message"]


# --- lists --------------------------------------------------------------------------------------------------------


def test_a_list_in_pages_is_the_whole_list_whatever_is_deleted_meanwhile(lab: Any) -> None:
    for number in range(5):
        lab.active(f"q{number}")
    found = []
    request = lab.queue.list(parent=lab.zone, pageSize=2)
    while request is not None:
        answer = request.execute()
        found.append([each["name"].rpartition("/")[2] for each in answer["queuedResources"]])
        if len(found) == 1:
            lab.control.vanish("q0")
        request = lab.queue.list_next(request, answer)
    assert found == [["q0", "q1"], ["q2", "q3"], ["q4"]]
