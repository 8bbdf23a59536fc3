"""The simulated Cloud TPU API, by Google's own client: the queue, nodes, capacity, injected faults, lists."""

import base64
import concurrent.futures
import http.client
import json
import threading
import time
import urllib.parse
from typing import Any

import pytest

from rehearsal.tpu_api import Clock, Delays, TpuApi
from rehearsal.tpu_api.clock import timestamp

SPOT = "us-central1-a:v5litepod:spot"
NODES = "/v2/projects/grant/locations/us-central1-a/nodes"
QUEUE = "/v2/projects/grant/locations/us-central1-a/queuedResources"


def states(lab: Any, own_id: str) -> list[str]:
    return [line.state for line in lab.control.journal() if line.name.endswith(f"queuedResources/{own_id}")]


def test_a_request_goes_from_accepted_through_the_queue_to_active(new_lab: Any) -> None:
    lab = new_lab(capacity={SPOT: 0})
    operation = lab.enqueue("q")
    assert lab.queue_state("q") == "ACCEPTED"
    lab.control.advance(2)
    assert lab.queue_state("q") == "WAITING_FOR_RESOURCES"
    # The operation ends long before the queue is served, and gives back what was asked for.
    done = lab.operation(operation)
    assert done["done"] is True
    assert done["response"]["spot"] == {}
    assert done["response"]["tpu"]["nodeSpec"][0]["nodeId"] == "q-node"
    lab.control.set_capacity(SPOT, 16)
    assert lab.queue_state("q") == "PROVISIONING"
    assert lab.node_state("q-node") == "CREATING"
    lab.control.advance(5)
    assert lab.queue_state("q") == "ACTIVE"
    assert lab.node_state("q-node") == "READY"
    assert lab.node("q-node")["queuedResource"] == f"{lab.zone}/queuedResources/q"
    assert lab.node("q-node")["schedulingConfig"] == {"spot": True}


def test_a_request_that_does_not_fit_waits_and_lets_a_smaller_one_pass(new_lab: Any) -> None:
    lab = new_lab(capacity={SPOT: 16})
    lab.enqueue("large", lab.wanted("large-node", "v5litepod-32"))
    lab.enqueue("small")
    lab.control.advance(3600)
    assert (lab.queue_state("large"), lab.queue_state("small")) == ("WAITING_FOR_RESOURCES", "ACTIVE")


def test_of_two_that_fit_the_older_is_served(new_lab: Any) -> None:
    lab = new_lab(capacity={SPOT: 0})
    for own_id in ("second-by-name", "first-by-name"):
        lab.enqueue(own_id)
    lab.control.advance(2)
    lab.control.set_capacity(SPOT, 16)
    lab.control.advance(60)
    assert lab.queue_state("second-by-name") == "ACTIVE"
    assert lab.queue_state("first-by-name") == "WAITING_FOR_RESOURCES"


def test_chips_of_one_tier_do_not_serve_another(new_lab: Any) -> None:
    lab = new_lab(capacity={SPOT: 64, "us-central1-a:v5litepod:reserved": 64}, other_chips=0)
    on_demand = {"tpu": lab.wanted("d-node")["tpu"]}
    reserved = {**lab.wanted("r-node"), "reservationName": f"{lab.zone}/reservations/mine", "guaranteed": {}}
    del reserved["spot"]
    for own_id, body in {"s": None, "d": on_demand, "r": reserved}.items():
        lab.enqueue(own_id, body)
    lab.control.advance(60)
    assert [lab.queue_state(own_id) for own_id in "sdr"] == ["ACTIVE", "WAITING_FOR_RESOURCES", "ACTIVE"]


@pytest.mark.parametrize(
    "policy",
    [
        {"validUntilDuration": "3600s"},
        {"validUntilTime": timestamp(1_800_003_600.0)},
        {"validInterval": {"endTime": timestamp(1_800_003_600.0)}},
    ],
    ids=["duration", "time", "interval"],
)
def test_a_request_that_still_waits_when_its_time_is_over_fails_for_good(
    new_lab: Any, policy: dict[str, Any]
) -> None:
    lab = new_lab(capacity={SPOT: 0})
    lab.enqueue("q", lab.wanted("n", queueingPolicy=policy))
    lab.control.advance(3599)
    assert lab.queue_state("q") == "WAITING_FOR_RESOURCES"
    lab.control.advance(1)
    state = lab.queued("q")["state"]
    assert state["state"] == "FAILED"
    assert state["stateInitiator"] == "SERVICE"
    assert "valid-until" in state["failedData"]["error"]["message"]
    lab.control.set_capacity(SPOT, 16)
    lab.control.advance(3600)
    assert lab.queue_state("q") == "FAILED"


def test_a_request_that_was_served_in_time_outlives_its_valid_until(lab: Any) -> None:
    lab.active("q", lab.wanted("n", queueingPolicy={"validUntilDuration": "30s"}))
    assert lab.queue_state("q") == "ACTIVE"


def test_a_request_is_not_served_before_its_time(lab: Any) -> None:
    lab.enqueue("q", lab.wanted("n", queueingPolicy={"validAfterDuration": "100s"}))
    lab.control.advance(99)
    assert lab.queue_state("q") == "WAITING_FOR_RESOURCES"
    lab.control.advance(1)
    assert lab.queue_state("q") == "PROVISIONING"


def test_an_active_one_is_not_deleted_without_force(lab: Any) -> None:
    lab.active("q")
    error = lab.refused(lambda: lab.delete_queued("q"))
    assert (error["code"], error["status"]) == (400, "FAILED_PRECONDITION")
    assert lab.queue_state("q") == "ACTIVE"


def test_force_deletes_its_nodes_with_it(lab: Any) -> None:
    lab.active("q")
    operation = lab.delete_queued("q", force=True)
    assert (lab.queue_state("q"), lab.node_state("q-node")) == ("DELETING", "DELETING")
    lab.control.advance(2)
    assert lab.refused(lambda: lab.queued("q"))["code"] == 404
    assert lab.refused(lambda: lab.node("q-node"))["code"] == 404
    assert lab.operation(operation)["response"] == {"@type": "type.googleapis.com/google.protobuf.Empty"}


@pytest.mark.parametrize("state", ["ACCEPTED", "WAITING_FOR_RESOURCES", "FAILED", "SUSPENDED"])
def test_one_without_nodes_is_deleted_without_force(new_lab: Any, state: str) -> None:
    lab = new_lab(capacity={SPOT: 16 if state == "SUSPENDED" else 0})
    lab.enqueue("q", lab.wanted("n", queueingPolicy={"validUntilDuration": "100s"}))
    if state != "ACCEPTED":
        lab.control.advance(100 if state == "FAILED" else 10)
    if state == "SUSPENDED":
        lab.control.preempt("q")
        lab.control.advance(10)
    assert lab.queue_state("q") == state
    lab.delete_queued("q")
    lab.control.advance(2)
    assert lab.refused(lambda: lab.queued("q"))["status"] == "NOT_FOUND"
    lab.control.advance(3600)  # its own events that are still to come find nothing to do
    assert lab.control.alive()["queuedResources"] == []


def test_a_preempted_one_is_suspended_and_never_queued_again(lab: Any) -> None:
    lab.active("q")
    lab.control.preempt("q")
    assert (lab.queue_state("q"), lab.node_state("q-node")) == ("SUSPENDING", "PREEMPTED")
    lab.control.advance(1e6)
    assert lab.queued("q")["state"] == {
        "state": "SUSPENDED", "stateInitiator": "SERVICE", "suspendedData": {},
    }  # fmt: skip
    assert lab.refused(lambda: lab.node("q-node"))["code"] == 404
    assert states(lab, "q")[-3:] == ["ACTIVE", "SUSPENDING", "SUSPENDED"]


def test_preempted_nodes_that_are_left_keep_a_suspended_one_from_being_deleted_without_force(
    lab: Any,
) -> None:
    lab.active("q")
    lab.control.preempt("q", leave_nodes=True)
    lab.control.advance(60)
    assert (lab.queue_state("q"), lab.node_state("q-node")) == ("SUSPENDED", "PREEMPTED")
    assert lab.refused(lambda: lab.delete_queued("q"))["status"] == "FAILED_PRECONDITION"
    lab.delete_queued("q", force=True)
    lab.control.advance(60)
    assert lab.control.alive()["nodes"] == []


def test_a_preempted_ones_chips_serve_the_next_in_the_queue(new_lab: Any) -> None:
    lab = new_lab(capacity={SPOT: 16})
    lab.active("first")
    lab.enqueue("second")
    lab.control.advance(60)
    assert lab.queue_state("second") == "WAITING_FOR_RESOURCES"
    lab.control.preempt("first")
    lab.control.advance(60)
    assert lab.queue_state("second") == "ACTIVE"


def test_one_that_is_preempted_while_it_is_provisioned_is_suspended(lab: Any) -> None:
    lab.enqueue("q")
    lab.control.advance(2)
    assert lab.queue_state("q") == "PROVISIONING"
    lab.control.preempt("q")
    lab.control.advance(60)
    assert lab.queue_state("q") == "SUSPENDED"


def test_one_whose_node_is_deleted_is_suspended_by_the_user(lab: Any) -> None:
    lab.active("q")
    lab.delete_node("q-node")
    lab.control.advance(60)
    assert lab.queued("q")["state"]["state"] == "SUSPENDED"
    assert lab.queued("q")["state"]["stateInitiator"] == "USER"


def test_a_multislice_request_makes_all_its_nodes_or_none(new_lab: Any) -> None:
    lab = new_lab(capacity={SPOT: 47})
    node_spec = {
        "parent": lab.zone, "node": lab.spec(), "multisliceParams": {"nodeCount": 3, "nodeIdPrefix": "np"},
    }  # fmt: skip
    lab.enqueue("q", {"spot": {}, "tpu": {"nodeSpec": [node_spec]}})
    lab.control.advance(60)
    assert lab.control.alive()["nodes"] == []
    lab.control.set_capacity(SPOT, 48)
    lab.control.advance(60)
    nodes = [lab.node(f"np-{number}") for number in range(3)]
    assert {node["state"] for node in nodes} == {"READY"}
    assert all(node["multisliceNode"] for node in nodes)
    lab.control.preempt("np-1")
    assert {lab.node_state(f"np-{number}") for number in range(3)} == {"PREEMPTED"}
    lab.control.advance(60)
    assert lab.queue_state("q") == "SUSPENDED"


def test_a_multislice_request_without_a_prefix_names_its_nodes_after_itself(lab: Any) -> None:
    node_spec = {"parent": lab.zone, "node": lab.spec(), "multisliceParams": {"nodeCount": 2}}
    lab.active("q", {"spot": {}, "tpu": {"nodeSpec": [node_spec]}})
    assert [node["name"].rpartition("/")[2] for node in lab.control.alive()["nodes"]] == ["q-0", "q-1"]


def test_a_name_that_is_taken_is_refused_until_it_is_free(new_lab: Any) -> None:
    lab = new_lab(capacity={SPOT: 0})
    lab.enqueue("q")
    assert lab.refused(lambda: lab.enqueue("q", lab.wanted("other")))["status"] == "ALREADY_EXISTS"
    # Also the name of a node that another one is still waiting for.
    assert lab.refused(lambda: lab.enqueue("other", lab.wanted("q-node")))["code"] == 409
    assert lab.refused(lambda: lab.create_node("q-node"))["code"] == 409
    lab.delete_queued("q")
    lab.control.advance(2)
    lab.enqueue("q")


def test_a_request_sent_again_with_its_request_id_is_carried_out_once(lab: Any) -> None:
    first = lab.enqueue("q", requestId="6d2e")
    again = lab.enqueue("q", requestId="6d2e")
    assert again["name"] == first["name"]
    assert lab.refused(lambda: lab.enqueue("another", requestId="6d2e"))["status"] == "INVALID_ARGUMENT"
    assert lab.refused(lambda: lab.enqueue("q"))["status"] == "ALREADY_EXISTS"


def test_more_than_the_quota_is_refused_at_once_and_what_is_dead_counts_until_it_is_deleted(
    new_lab: Any,
) -> None:
    lab = new_lab(quota={SPOT: 16})
    lab.active("q")
    lab.control.preempt("q")
    lab.control.advance(60)
    assert lab.queue_state("q") == "SUSPENDED"
    error = lab.refused(lambda: lab.enqueue("next"))
    assert (error["code"], error["status"]) == (429, "RESOURCE_EXHAUSTED")
    assert error["message"] == (
        "Quota limit 'TPUV5sLitepodPreemptiblePerProjectPerZoneForTPUAPI' has been exceeded."
        " Limit: 16 in zone us-central1-a."
    )
    lab.delete_queued("q")
    lab.control.advance(2)
    lab.active("next")


def test_a_queued_resource_and_its_nodes_count_against_the_quota_once(new_lab: Any) -> None:
    lab = new_lab(quota={SPOT: 32})
    lab.active("q")
    lab.active("next")
    # A quota is each project's own.
    elsewhere = lab.wanted("n")
    elsewhere["tpu"]["nodeSpec"][0]["parent"] = parent = "projects/another/locations/us-central1-a"
    lab.queue.create(parent=parent, queuedResourceId="q", body=elsewhere).execute()
    assert lab.refused(lambda: lab.enqueue("too-many"))["status"] == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"guaranteed": {}}, "one union"),
        ({"tpu": {}}, "ask for a node"),
        ({"queueingPolicy": {"validUntilDuration": "9s", "validAfterDuration": "1s"}}, "give one of them"),
        ({"queueingPolicy": {"validUntilTime": "2001-01-01T00:00:00Z"}}, "ended already"),
    ],
)
def test_what_contradicts_itself_is_refused(lab: Any, changes: dict[str, Any], said: str) -> None:
    error = lab.refused(lambda: lab.enqueue("q", lab.wanted("n") | changes))
    assert error["status"] == "INVALID_ARGUMENT"
    assert said in error["message"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parent": "projects/grant/locations/us-west4-a"}, "not the queued resource's own"),
        ({"multisliceParams": {"nodeCount": 2}}, "give one of them"),
        ({"nodeId": "a/b"}, "is no id"),
    ],
)
def test_a_node_that_contradicts_its_queued_resource_is_refused(
    lab: Any, changes: dict[str, Any], said: str
) -> None:
    body = lab.wanted("n")
    body["tpu"]["nodeSpec"][0] |= changes
    error = lab.refused(lambda: lab.enqueue("q", body))
    assert error["status"] == "INVALID_ARGUMENT"
    assert said in error["message"]


def test_a_node_is_created_within_an_operation(lab: Any) -> None:
    operation = lab.create_node("n")
    assert "done" not in operation
    assert operation["metadata"]["target"] == f"{lab.zone}/nodes/n"
    assert lab.node_state("n") == "CREATING"
    lab.control.advance(60)
    assert lab.node_state("n") == "READY"
    assert lab.operation(operation)["response"] == lab.node("n") | {
        "@type": "type.googleapis.com/google.cloud.tpu.v2.Node"
    }


def test_a_node_for_which_there_are_no_chips_fails_with_code_8_and_is_gone(new_lab: Any) -> None:
    lab = new_lab(capacity={"us-central1-a:v5litepod:on-demand": 15})
    operation = lab.create_node("n")
    lab.control.advance(1)
    error = lab.operation(operation)["error"]
    assert error["code"] == 8
    assert error["message"].startswith('There is no more capacity in the zone "us-central1-a"')
    assert lab.refused(lambda: lab.node("n"))["code"] == 404


def test_a_node_has_one_endpoint_a_worker_and_none_is_anybody_elses(lab: Any) -> None:
    nodes = [lab.ready_node("a"), lab.ready_node("b", "v5litepod-8")]
    assert [len(node["networkEndpoints"]) for node in nodes] == [4, 1]
    addresses = [end["ipAddress"] for node in nodes for end in node["networkEndpoints"]]
    assert len(set(addresses)) == 5
    assert all(address.startswith("10.") for address in addresses)


def test_workers_have_external_addresses_only_where_they_were_asked_for(lab: Any) -> None:
    inside = lab.ready_node("inside")
    outside = lab.ready_node("outside", networkConfig={"enableExternalIps": True})
    assert not any("accessConfig" in end for end in inside["networkEndpoints"])
    external = {end["accessConfig"]["externalIp"] for end in outside["networkEndpoints"]}
    assert len(external) == 4


def test_a_type_and_its_configuration_are_two_names_of_one_thing(lab: Any) -> None:
    by_type = lab.ready_node("by-type")
    body = lab.spec(acceleratorConfig={"type": "V5LITE_POD", "topology": "4x4"})
    del body["acceleratorType"]
    lab.nodes.create(parent=lab.zone, nodeId="by-config", body=body).execute()
    by_config = lab.node("by-config")
    for key in ("acceleratorType", "acceleratorConfig"):
        assert by_type[key] == by_config[key]


@pytest.mark.parametrize(
    ("accelerator", "said"),
    [
        ("v5litepod-12", "invalid AcceleratorType"),
        ("v4-8", "us-central1-a does not offer v4-8"),
        ("tpu7x-8", "only by Compute Engine and GKE"),
    ],
)
def test_hardware_that_is_not_offered_is_refused(lab: Any, accelerator: str, said: str) -> None:
    error = lab.refused(lambda: lab.create_node("n", accelerator))
    assert error["status"] == "INVALID_ARGUMENT"
    assert said in error["message"]


def test_a_pool_that_is_named_is_offered_wherever_the_catalogue_says_it_is_not(new_lab: Any) -> None:
    lab = new_lab(capacity={"us-central1-a:v4:on-demand": 4})
    assert lab.ready_node("n", "v4-8")["state"] == "READY"


@pytest.mark.parametrize("version", ["tpu-vm-tf-2.17.0-pod-pjrt", "tpu-ubuntu2204-base"])
def test_a_runtime_version_of_a_framework_is_known(lab: Any, version: str) -> None:
    lab.create_node("n", runtimeVersion=version)


def test_a_runtime_version_that_nobody_knows_is_refused(lab: Any) -> None:
    error = lab.refused(lambda: lab.create_node("n", runtimeVersion="v2-alpha-tpuv9"))
    assert "v2-alpha-tpuv5-lite" in error["message"]


def test_a_name_is_free_again_when_its_node_is_gone(lab: Any) -> None:
    lab.ready_node("n")
    before = lab.node("n")["id"]
    assert lab.refused(lambda: lab.create_node("n"))["status"] == "ALREADY_EXISTS"
    operation = lab.delete_node("n")
    assert lab.node_state("n") == "DELETING"
    assert lab.refused(lambda: lab.delete_node("n"))["status"] == "FAILED_PRECONDITION"
    lab.control.advance(2)
    assert lab.operation(operation)["done"] is True
    assert lab.refused(lambda: lab.delete_node("n"))["status"] == "NOT_FOUND"
    assert lab.ready_node("n")["id"] != before


def test_deleting_a_node_that_is_being_created_ends_its_creation_with_an_error(lab: Any) -> None:
    creation = lab.create_node("n")
    lab.delete_node("n")
    lab.control.advance(60)
    assert lab.operation(creation)["error"]["code"] == 1
    assert lab.control.alive()["nodes"] == []


def test_a_patch_changes_the_fields_of_its_mask_and_no_others(lab: Any) -> None:
    lab.ready_node("n", labels={"a": "1"}, description="before")
    body = {"labels": {"b": "2"}, "description": "after", "networkConfig": {"enableExternalIps": True}}
    name = f"{lab.zone}/nodes/n"
    mask = "labels,network_config.enable_external_ips"
    operation = lab.nodes.patch(name=name, updateMask=mask, body=body).execute()
    assert lab.node("n")["labels"] == {"a": "1"}
    lab.control.advance(1)
    assert lab.operation(operation)["response"]["labels"] == {"b": "2"}
    assert lab.node("n")["description"] == "before"
    assert "accessConfig" in lab.node("n")["networkEndpoints"][0]


@pytest.mark.parametrize("mask", ["acceleratorType", "labels,runtimeVersion"])
def test_a_field_that_google_does_not_let_change_can_not_be_patched(lab: Any, mask: str) -> None:
    lab.ready_node("n")
    patch = lab.nodes.patch(name=f"{lab.zone}/nodes/n", updateMask=mask, body={"labels": {}})
    assert lab.refused(patch)["status"] == "INVALID_ARGUMENT"


def test_a_spot_node_is_preempted_and_stays_so(new_lab: Any) -> None:
    lab = new_lab(capacity={SPOT: 16})
    lab.ready_node("n", schedulingConfig={"preemptible": True})
    lab.control.preempt("n")
    lab.control.advance(1e6)
    assert lab.node_state("n") == "PREEMPTED"
    lab.ready_node("next", schedulingConfig={"spot": True})  # its chips are free
    lab.delete_node("n")
    lab.control.advance(2)
    assert lab.refused(lambda: lab.node("n"))["code"] == 404


def test_a_preempted_node_that_is_being_deleted_takes_no_chips_back(new_lab: Any) -> None:
    lab = new_lab(capacity={SPOT: 16})
    lab.ready_node("n", schedulingConfig={"spot": True})
    lab.control.preempt("n")
    lab.delete_node("n")
    assert lab.control.alive()["capacity"][SPOT]["held"] == 0


def test_only_spot_is_preempted_and_the_rest_is_terminated(lab: Any) -> None:
    lab.ready_node("n")
    with pytest.raises(ValueError, match="only spot is preempted"):
        lab.control.preempt("n")
    lab.control.terminate("n")
    assert lab.node_state("n") == "TERMINATED"


def test_a_node_under_maintenance_says_so_and_comes_back(lab: Any) -> None:
    lab.ready_node("n")
    lab.control.maintain("n", seconds=600.0)
    lab.control.advance(599)
    assert (lab.node("n")["state"], lab.node("n")["health"]) == ("REPAIRING", "UNHEALTHY_MAINTENANCE")
    lab.control.advance(1)
    assert (lab.node("n")["state"], lab.node("n")["health"]) == ("READY", "HEALTHY")


def test_a_node_that_is_preempted_under_maintenance_does_not_come_back(lab: Any) -> None:
    lab.ready_node("n", schedulingConfig={"spot": True})
    lab.control.maintain("n")
    lab.control.preempt("n")
    lab.control.advance(3600)
    assert lab.node_state("n") == "PREEMPTED"


def guest_attributes(lab: Any, **body: Any) -> list[dict[str, Any]]:
    request = lab.nodes.getGuestAttributes(name=f"{lab.zone}/nodes/n", body=body)
    found: list[dict[str, Any]] = request.execute()["guestAttributes"]
    return found


def test_every_worker_publishes_its_name_and_a_host_key(lab: Any) -> None:
    lab.create_node("n")
    assert [found["queryValue"]["items"] for found in guest_attributes(lab)] == [[], [], [], []]
    lab.control.advance(60)
    names, keys = [], set()
    for worker in guest_attributes(lab):
        items = {(item["namespace"], item["key"]): item["value"] for item in worker["queryValue"]["items"]}
        names.append(items["instance", "hostname"])
        keys.add(items["hostkeys", "ssh-ed25519"])
    assert [name.rpartition("-w-")[2] for name in names] == ["0", "1", "2", "3"]
    assert len({name.rpartition("-w-")[0] for name in names}) == 1
    assert len(keys) == 4
    assert all(base64.b64decode(key)[4:15] == b"ssh-ed25519" for key in keys)


def test_guest_attributes_can_be_asked_of_one_worker_and_below_one_path(lab: Any) -> None:
    lab.ready_node("n")
    lab.control.set_guest_attribute("n", 2, "hostkeys", "ssh-ed25519", "AAAA")
    (found,) = guest_attributes(lab, queryPath="hostkeys/", workerIds=["2"])
    assert found["queryValue"]["items"] == [{"namespace": "hostkeys", "key": "ssh-ed25519", "value": "AAAA"}]
    (found,) = guest_attributes(lab, queryPath="hostkeys/ssh-rsa", workerIds=["0"])
    assert found["queryValue"]["items"] == []


def test_a_worker_that_the_node_does_not_have_is_refused(lab: Any) -> None:
    lab.ready_node("n")
    assert "n has 0, 1, 2, 3" in lab.refused(lambda: guest_attributes(lab, workerIds=["4"]))["message"]


def post_once(lab: Any, path: str, body: object) -> int:
    """The answer's code, from a client that never tries again."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(lab.api.url).netloc, timeout=10)
    try:
        connection.request("POST", path, json.dumps(body))
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("kind", "code", "status"),
    [("too-many-requests", 429, "RESOURCE_EXHAUSTED"), ("unavailable", 503, "UNAVAILABLE")],
)
def test_the_next_requests_of_a_method_are_refused_and_no_others(
    lab: Any, kind: str, code: int, status: str
) -> None:
    lab.control.inject(kind, methods="nodes.create", times=2)
    lab.enqueue("q")
    for _ in range(2):
        error = lab.refused(lambda: lab.create_node("n"))
        assert (error["code"], error["status"]) == (code, status)
    lab.create_node("n")


def test_a_pattern_hits_every_method_that_it_names(lab: Any) -> None:
    lab.control.inject("unavailable", methods="queuedResources.*", times=2)
    assert lab.refused(lambda: lab.enqueue("q"))["code"] == 503
    assert lab.refused(lab.queue.list(parent=lab.zone))["code"] == 503


def test_faults_that_have_not_happened_can_be_taken_back(lab: Any) -> None:
    lab.control.inject("unavailable", times=9)
    lab.control.clear_faults()
    assert lab.control.alive()["faults"] == []
    lab.enqueue("q")


@pytest.mark.parametrize(("kind", "nodes"), [("cut-before", 0), ("cut-after", 1)])
def test_a_connection_is_cut_before_or_after_the_request_was_carried_out(
    lab: Any, kind: str, nodes: int
) -> None:
    lab.control.inject(kind)
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        post_once(lab, f"{NODES}?nodeId=n", lab.spec())
    assert len(lab.control.alive()["nodes"]) == nodes


def test_googles_client_sends_a_create_again_by_itself_when_its_answer_is_lost(lab: Any) -> None:
    # httplib2 does so once: a create whose answer is lost comes back as "already exists", not as a broken connection.
    lab.control.inject("cut-after")
    assert lab.refused(lambda: lab.enqueue("q"))["status"] == "ALREADY_EXISTS"
    assert lab.queue_state("q") == "ACCEPTED"


def test_with_a_request_id_a_create_whose_answer_is_lost_is_answered_the_second_time(lab: Any) -> None:
    lab.control.inject("cut-after")
    assert lab.enqueue("q", requestId="6d2e")["metadata"]["verb"] == "create"
    assert len(lab.control.alive()["queuedResources"]) == 1


def test_a_slow_answer_comes_after_its_time_and_holds_up_nobody_else(lab: Any) -> None:
    lab.control.inject("slow", methods="nodes.create", seconds=0.5)
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        slow = pool.submit(post_once, lab, f"{NODES}?nodeId=n", lab.spec())
        while not lab.control.alive()["nodes"]:  # it is carried out first
            assert time.monotonic() - started < 10
        assert lab.node_state("n") == "CREATING"
        assert not slow.done()
        assert slow.result() == 200
    assert time.monotonic() - started >= 0.5


def test_closing_does_not_wait_for_slow_answers_or_idle_connections() -> None:
    with TpuApi() as api:
        netloc = urllib.parse.urlsplit(api.url).netloc
        api.control.inject("slow", methods="queuedResources.list", seconds=600.0)
        slow, idle = http.client.HTTPConnection(netloc), http.client.HTTPConnection(netloc)
        slow.request("GET", QUEUE)
        idle.connect()
        started = time.monotonic()
    assert time.monotonic() - started < 10
    assert [thread for thread in threading.enumerate() if "process_request" in thread.name] == []
    slow.close()
    idle.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [({"kind": "explode"}, "choose one of"), ({"kind": "slow", "seconds": -1}, "give 0 to 3600"),
     ({"kind": "slow", "times": 0}, "give 1 or more")],
)  # fmt: skip
def test_a_fault_that_makes_no_sense_is_refused(lab: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        lab.control.inject(**arguments)


def test_what_vanishes_is_gone_without_an_operation(lab: Any) -> None:
    lab.ready_node("n")
    lab.active("q")
    lab.active("whole")
    for name in ("n", "q-node", "whole"):
        lab.control.vanish(name)
    lab.control.advance(60)
    assert lab.control.alive()["nodes"] == []
    assert lab.queue_state("q") == "SUSPENDED"
    assert lab.refused(lambda: lab.queued("whole"))["code"] == 404


def test_a_request_can_fail_late(lab: Any) -> None:
    lab.enqueue("q")
    lab.control.advance(2)
    assert lab.queue_state("q") == "PROVISIONING"
    lab.control.fail("q", "the network is not there")
    assert lab.queued("q")["state"]["failedData"]["error"]["message"] == "the network is not there"
    assert lab.control.alive()["nodes"] == []


def test_a_short_name_that_two_have_must_be_said_in_full(lab: Any) -> None:
    lab.active("same", lab.wanted("same"))
    with pytest.raises(ValueError, match="give the full name"):
        lab.control.preempt("same")
    lab.control.preempt(f"{lab.zone}/nodes/same")
    assert lab.queue_state("same") == "SUSPENDING"


def test_what_comes_due_in_one_jump_happens_each_at_its_own_moment(lab: Any) -> None:
    lab.enqueue("q")
    lab.control.advance(1000)
    moments = {line.state: line.moment - 1_800_000_000.0 for line in lab.control.journal()}
    delays = Delays()
    assert moments["WAITING_FOR_RESOURCES"] == delays.accept_s
    assert moments["ACTIVE"] == delays.accept_s + delays.create_s


def test_a_clock_that_thaws_goes_on_from_where_it_stood() -> None:
    clock = Clock(frozen_at=1000.0)
    clock.advance(5)
    assert clock.now() == 1005.0
    clock.thaw()
    assert 1005.0 <= clock.now() < 1065.0
    clock.freeze()
    assert clock.now() == clock.now()
    with pytest.raises(ValueError, match="forward only"):
        clock.advance(-1)


def test_chips_that_are_taken_away_take_no_node_and_are_missed_by_the_next(new_lab: Any) -> None:
    lab = new_lab(capacity={"us-central1-a:v5litepod:spot": 32})
    lab.active("q")
    lab.control.set_capacity("us-central1-a:v5litepod:spot", 0)
    lab.enqueue("next")
    lab.control.advance(60)
    assert (lab.queue_state("q"), lab.queue_state("next")) == ("ACTIVE", "WAITING_FOR_RESOURCES")
    assert lab.control.alive()["capacity"]["us-central1-a:v5litepod:spot"] == {"chips": 0, "held": 16}


def test_of_many_clients_that_ask_at_once_for_one_name_one_gets_it(new_lab: Any) -> None:
    lab = new_lab(capacity={"us-central1-a:v5litepod:on-demand": 64})

    def create(number: int) -> int:
        return post_once(lab, f"{NODES}?nodeId=n{number % 4}", lab.spec())

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        codes = sorted(pool.map(create, range(32)))
    assert codes == [200] * 4 + [409] * 28
    lab.control.advance(60)
    assert len(lab.control.alive()["nodes"]) == 4


def names(things: list[dict[str, Any]]) -> list[str]:
    return [each["name"].rpartition("/")[2] for each in things]


def test_a_list_in_pages_is_the_whole_list(lab: Any) -> None:
    for number in range(5):
        lab.enqueue(f"q{number}")
    found, pages = [], 0
    request = lab.queue.list(parent=lab.zone, pageSize=2)
    while request is not None:
        answer = request.execute()
        found += names(answer["queuedResources"])
        pages += 1
        request = lab.queue.list_next(request, answer)
    assert (found, pages) == (["q0", "q1", "q2", "q3", "q4"], 3)


def test_a_page_begins_where_the_one_before_ended_whatever_was_deleted_meanwhile(lab: Any) -> None:
    for number in range(4):
        lab.active(f"q{number}")
    first = lab.queue.list(parent=lab.zone, pageSize=2).execute()
    lab.control.vanish("q0")
    second = lab.queue.list(parent=lab.zone, pageSize=2, pageToken=first["nextPageToken"]).execute()
    assert names(second["queuedResources"]) == ["q2", "q3"]


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


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ({"pageToken": "7b7d"}, "INVALID_ARGUMENT"),
        ({"pageToken": "nonsense"}, "INVALID_ARGUMENT"),
        ({"pageSize": -1}, "INVALID_ARGUMENT"),
    ],
)
def test_a_page_that_no_list_gave_is_refused(lab: Any, query: dict[str, Any], status: str) -> None:
    assert lab.refused(lab.queue.list(parent=lab.zone, **query))["status"] == status


def test_a_zone_that_is_not_there_is_refused_as_google_does(lab: Any) -> None:
    error = lab.refused(lab.queue.list(parent="projects/grant/locations/us-nowhere1-a"))
    assert (error["code"], error["status"]) == (403, "PERMISSION_DENIED")


def test_a_zone_lists_the_accelerator_types_that_can_be_created_there(lab: Any) -> None:
    types = lab.locations.acceleratorTypes()
    found = types.list(parent="projects/grant/locations/us-central2-b").execute()["acceleratorTypes"]
    assert all(each["type"].startswith("v4-") for each in found)
    (v4_8,) = [each for each in found if each["type"] == "v4-8"]
    assert v4_8["acceleratorConfigs"] == [{"type": "V4", "topology": "2x2x1"}]


def test_what_the_simulator_can_not_do_it_says_instead_of_ignoring_it(lab: Any) -> None:
    filtered = lab.locations.acceleratorTypes().list(parent=lab.zone, filter="type=v6e-8")
    for request in (filtered, lab.nodes.list(parent=lab.zone)):
        error = lab.refused(request)
        assert (error["code"], error["status"]) == (501, "UNIMPLEMENTED")
