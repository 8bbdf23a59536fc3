"""The simulated Cloud TPU API, by Google's own client: the queue, nodes, capacity, injected faults, lists, refusals."""

import http.client
import json
import urllib.parse
from typing import Any

import pytest

from rehearsal.tpu_api import Node, discovery

SPOT = "us-central1-a:v5litepod:spot"
ON_DEMAND = "us-central1-a:v5litepod:on-demand"
NODES = "/v2/projects/grant/locations/us-central1-a/nodes"
QUEUE = "/v2/projects/grant/locations/us-central1-a/queuedResources"
WAITING = "WAITING_FOR_RESOURCES"


# --- queued resources ---------------------------------------------------------------------------------------------


def test_a_request_goes_through_the_queue_to_active_is_deleted_by_force_and_its_name_is_taken_until_then(
    new_lab: Any,
) -> None:
    lab = new_lab(capacity={SPOT: 0})
    operation = lab.enqueue("q")
    assert lab.queue_state("q") == "ACCEPTED"
    lab.control.advance(2)
    assert lab.queue_state("q") == WAITING
    # The operation ends long before the queue is served, and gives back what was asked for.
    done = lab.operation(operation)
    assert (done["done"], done["response"]["spot"]) == (True, {})
    assert done["response"]["tpu"]["nodeSpec"][0]["nodeId"] == "q-node"
    assert lab.refused(lambda: lab.enqueue("q", lab.wanted("other")))["status"] == "ALREADY_EXISTS"
    # Also the name of a node that another one is still waiting for.
    assert lab.refused(lambda: lab.enqueue("other", lab.wanted("q-node")))["code"] == 409
    assert lab.refused(lambda: lab.create_node("q-node"))["code"] == 409
    lab.control.set_capacity(SPOT, 16)
    assert (lab.queue_state("q"), lab.node_state("q-node")) == ("PROVISIONING", "CREATING")
    lab.control.advance(5)
    assert (lab.queue_state("q"), lab.node_state("q-node")) == ("ACTIVE", "READY")
    node = lab.node("q-node")
    assert node["queuedResource"] == f"{lab.zone}/queuedResources/q"
    assert node["schedulingConfig"] == {"spot": True}

    error = lab.refused(lambda: lab.delete_queued("q"))
    assert (error["code"], error["status"]) == (400, "FAILED_PRECONDITION")
    operation = lab.delete_queued("q", force=True)
    assert (lab.queue_state("q"), lab.node_state("q-node")) == ("DELETING", "DELETING")
    lab.control.advance(2)
    assert lab.refused(lambda: lab.queued("q"))["code"] == 404
    assert lab.refused(lambda: lab.node("q-node"))["code"] == 404
    assert lab.operation(operation)["response"] == {"@type": "type.googleapis.com/google.protobuf.Empty"}
    moments = [line.moment for line in lab.control.journal()]
    assert moments == sorted(moments)


# --- nodes --------------------------------------------------------------------------------------------------------


def test_a_node_is_created_patched_and_deleted_within_operations(lab: Any) -> None:
    creation = lab.create_node("n", labels={"a": "1"}, description="before")
    assert "done" not in creation and creation["metadata"]["target"] == f"{lab.zone}/nodes/n"
    assert lab.node_state("n") == "CREATING"
    lab.control.advance(60)
    node = lab.node("n")
    answered = lab.operation(creation)["response"]
    assert answered == node | {"@type": "type.googleapis.com/google.cloud.tpu.v2.Node"}
    assert lab.refused(lambda: lab.create_node("n"))["status"] == "ALREADY_EXISTS"

    body = {"labels": {"b": "2"}, "description": "after", "networkConfig": {"enableExternalIps": True}}
    mask = "labels,network_config.enable_external_ips"
    operation = lab.nodes.patch(name=f"{lab.zone}/nodes/n", updateMask=mask, body=body).execute()
    assert lab.node("n")["labels"] == {"a": "1"}
    lab.control.advance(1)
    assert lab.operation(operation)["response"]["labels"] == {"b": "2"}
    assert lab.node("n")["description"] == "before"
    assert "accessConfig" in lab.node("n")["networkEndpoints"][0]
    patch = lab.nodes.patch(name=f"{lab.zone}/nodes/n", updateMask="labels,runtimeVersion", body=body)
    assert lab.refused(patch)["status"] == "INVALID_ARGUMENT"

    deletion = lab.delete_node("n")
    assert lab.node_state("n") == "DELETING"
    assert lab.refused(lambda: lab.delete_node("n"))["status"] == "FAILED_PRECONDITION"
    lab.control.advance(2)
    assert lab.operation(deletion)["done"] is True
    assert lab.refused(lambda: lab.delete_node("n"))["status"] == "NOT_FOUND"
    assert lab.ready_node("n")["id"] != node["id"]


def test_a_creation_fails_with_code_8_without_chips_and_with_code_1_where_its_node_is_deleted(
    new_lab: Any,
) -> None:
    lab = new_lab(capacity={ON_DEMAND: 16})
    deleted = lab.create_node("deleted")
    lab.delete_node("deleted")
    lab.control.advance(60)
    assert lab.operation(deleted)["error"]["code"] == 1
    operation = lab.create_node("n", "v5litepod-32")
    lab.control.advance(1)
    error = lab.operation(operation)["error"]
    assert error["code"] == 8
    assert error["message"].startswith('There is no more capacity in the zone "us-central1-a"')
    assert lab.control.alive()["nodes"] == []


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


def test_output_only_fields_are_ignored_and_an_answer_that_the_document_does_not_allow_is_a_bug(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Google's own provider for Pulumi and Terraform sends `name` with a node.
    lab.create_node("n", name="another", state="READY", queuedResource="nobody", createTime="never")
    node = lab.node("n")
    assert (node["name"], node["state"]) == (f"{lab.zone}/nodes/n", "CREATING")
    assert "queuedResource" not in node
    rendered = Node.render
    monkeypatch.setattr(Node, "render", lambda self: rendered(self) | {"state": "FINE"})
    error = lab.refused(lambda: lab.node("n"))
    assert (error["code"], error["status"]) == (500, "INTERNAL")
    assert "Node.state" in error["message"]
    response = {"@type": "type.googleapis.com/google.cloud.tpu.v2.Node", "colour": "red"}
    wrong = discovery.shipped().wrong("Operation", {"name": "o", "response": response})
    assert [at for at, _ in wrong] == ["Operation.response.colour"]


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


def test_a_list_is_of_its_project_and_zone_and_a_dash_stands_for_all_zones(lab: Any) -> None:
    for parent in ("projects/grant/locations/us-central1-a", "projects/grant/locations/us-west4-a",
                   "projects/another/locations/us-central1-a"):  # fmt: skip
        body = {"tpu": {"nodeSpec": [{"parent": parent, "nodeId": "n", "node": lab.spec()}]}}
        lab.queue.create(parent=parent, queuedResourceId="q", body=body).execute()

    def listed(parent: str) -> list[str]:
        found = lab.queue.list(parent=parent).execute().get("queuedResources", [])
        return [each["name"].split("/")[3] for each in found]

    assert listed("projects/grant/locations/us-central1-a") == ["us-central1-a"]
    assert listed("projects/grant/locations/-") == ["us-central1-a", "us-west4-a"]
    assert listed("projects/grant/locations/us-south1-a") == []
    lab.control.advance(3600)
    nodes = lab.nodes.list(parent="projects/grant/locations/-").execute()["nodes"]
    assert [each["name"].split("/")[3] for each in nodes] == ["us-central1-a", "us-west4-a"]
    nowhere = lab.queue.list(parent="projects/grant/locations/us-nowhere1-a")
    assert lab.refused(nowhere)["status"] == "PERMISSION_DENIED"

    types = lab.locations.acceleratorTypes()
    found = types.list(parent="projects/grant/locations/us-central2-b").execute()["acceleratorTypes"]
    assert all(each["type"].startswith("v4-") for each in found)
    (v4_8,) = [each for each in found if each["type"] == "v4-8"]
    assert v4_8["acceleratorConfigs"] == [{"type": "V4", "topology": "2x2x1"}]
    for request in (
        types.list(parent=lab.zone, filter="type=v6e-8"),
        lab.nodes.stop(name=f"{lab.zone}/nodes/n", body={}),
    ):
        assert lab.refused(request)["status"] == "UNIMPLEMENTED"  # said instead of ignored
