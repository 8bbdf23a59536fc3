"""Nodes of the simulator: made without a queue, looked at, changed, stopped, lost, deleted."""

import base64
from typing import Any

import pytest

SPOT = "us-central1-a:v5litepod:spot"


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


def test_a_node_has_no_endpoints_before_it_runs(lab: Any) -> None:
    lab.create_node("n")
    assert "networkEndpoints" not in lab.node("n")


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


def test_a_stopped_node_gives_up_its_chips_and_may_not_get_them_back(new_lab: Any) -> None:
    lab = new_lab(capacity={"us-central1-a:v5litepod:on-demand": 8})
    name = f"{lab.zone}/nodes/n"
    lab.ready_node("n", "v5litepod-8")
    lab.nodes.stop(name=name, body={}).execute()
    lab.control.advance(2)
    assert lab.node_state("n") == "STOPPED"
    lab.ready_node("other", "v5litepod-8")
    operation = lab.nodes.start(name=name, body={}).execute()
    lab.control.advance(60)
    assert lab.operation(operation)["error"]["code"] == 8
    assert lab.node_state("n") == "STOPPED"
    lab.delete_node("other")
    lab.control.advance(2)
    lab.nodes.start(name=name, body={}).execute()
    lab.control.advance(60)
    assert lab.node_state("n") == "READY"


def test_a_node_of_several_workers_can_not_be_stopped(lab: Any) -> None:
    lab.ready_node("n")
    stop = lab.nodes.stop(name=f"{lab.zone}/nodes/n", body={})
    assert lab.refused(stop)["status"] == "FAILED_PRECONDITION"


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
