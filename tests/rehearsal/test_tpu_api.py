"""The simulated Cloud TPU API, by Google's own client: lists in pages, and what is refused."""

import http.client
import json
import urllib.parse
from collections.abc import Iterator
from typing import Any

import google.oauth2.credentials
import pytest
from googleapiclient import discovery
from googleapiclient.errors import HttpError

from contracts.aliases import Json
from rehearsal.simulated_cloud import Clock, SimulatedCloud

ZONE = "projects/grant/locations/us-central1-a"
NODES, QUEUE = f"/v2/{ZONE}/nodes", f"/v2/{ZONE}/queuedResources"


class Lab:
    """A simulator with no end of capacity on a frozen clock, and Google's client of its queue."""

    def __init__(self, api: SimulatedCloud) -> None:
        self.api = api
        token = google.oauth2.credentials.Credentials(token="a-secret")  # type: ignore[no-untyped-call]
        self.client = discovery.build(
            "tpu", "v2", static_discovery=True, credentials=token, client_options={"api_endpoint": api.url}
        )
        self.queue = self.client.projects().locations().queuedResources()

    def enqueue(self, own_id: str, body: Json) -> None:
        self.queue.create(parent=ZONE, queuedResourceId=own_id, body=body).execute()


@pytest.fixture
def lab() -> Iterator[Lab]:
    with SimulatedCloud(clock=Clock(frozen_at=1_800_000_000.0)) as api:
        lab = Lab(api)
        yield lab
        lab.client.close()


def wanted(node_id: str) -> Json:
    """A queued resource's body: a spot node of that id."""
    node = {"acceleratorType": "v5litepod-16", "runtimeVersion": "v2-alpha-tpuv5-lite"}
    return {"spot": {}, "tpu": {"nodeSpec": [{"parent": ZONE, "nodeId": node_id, "node": node}]}}


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
    lab: Lab, changes: dict[str, Any], said: str
) -> None:
    body = wanted("n")
    spec = body["tpu"]["nodeSpec"][0]
    if "node" in changes:
        spec["node"].update(changes["node"])
    else:
        (body if changes.keys() & {"guaranteed", "tpu", "queueingPolicy"} else spec).update(changes)
    with pytest.raises(HttpError) as refusal:
        lab.enqueue("q", body)
    error = json.loads(refusal.value.content)["error"]
    assert (error["code"], error["status"]) == (refusal.value.resp.status, "INVALID_ARGUMENT")
    assert said in error["message"]


def send(
    lab: Lab, method: str, path: str, body: object = None, **headers: str
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
    lab: Lab, method: str, path: str, body: object, said: str
) -> None:
    code, answer, _ = send(lab, method, path, body)
    assert (code, answer["error"]["status"]) == (400, "INVALID_ARGUMENT")
    assert said in answer["error"]["message"]


# --- lists --------------------------------------------------------------------------------------------------------


def test_a_list_in_pages_is_the_whole_list_whatever_is_deleted_meanwhile(lab: Lab) -> None:
    for number in range(5):
        lab.enqueue(f"q{number}", wanted(f"q{number}-node"))
    found = []
    request = lab.queue.list(parent=ZONE, pageSize=2)
    while request is not None:
        answer = request.execute()
        found.append([each["name"].rpartition("/")[2] for each in answer["queuedResources"]])
        if len(found) == 1:
            lab.api.control.vanish("q0")
        request = lab.queue.list_next(request, answer)
    assert found == [["q0", "q1"], ["q2", "q3"], ["q4"]]
