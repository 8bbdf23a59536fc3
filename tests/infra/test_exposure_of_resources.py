"""What the internet can reach of a stack: nothing, but through IAP. One rule a test, over every shape of stack."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest

from tests.infra.shapes import SHAPES, every_shape


@every_shape
def test_no_firewall_rule_lets_any_address_in_but_those_of_iap(declare: Any, values: dict[str, Any]) -> None:
    rules = declare(**values).all("Firewall")
    ranges = {each for rule in rules for each in rule.inputs.get("sourceRanges", [])}
    assert ranges == {"35.235.240.0/20"}


@every_shape
def test_iap_reaches_port_22_alone_and_our_machines_alone(declare: Any, values: dict[str, Any]) -> None:
    declared = declare(**values)
    (rule,) = [each for each in declared.all("Firewall") if "sourceRanges" in each.inputs]
    assert rule.inputs["allows"] == [{"protocol": "tcp", "ports": ["22"]}]
    tags = {"tpu-stack-dev-host"}
    assert set(rule.inputs["targetTags"]) == (
        tags | {"tpu-stack-dev-gateway"} if declared.all("compute/instance:Instance") else tags
    )


@every_shape
def test_every_rule_names_the_tags_that_it_is_for(declare: Any, values: dict[str, Any]) -> None:
    """A rule without target tags opens every machine of the network, which may be somebody else's."""
    for rule in declare(**values).all("Firewall"):
        assert rule.inputs["targetTags"]
        assert all(tag.startswith("tpu-stack-dev-") for tag in rule.inputs["targetTags"])
        assert rule.inputs["direction"] == "INGRESS"
        assert rule.inputs.get("sourceRanges") or rule.inputs.get("sourceTags")


@every_shape
def test_hosts_reach_each_other_on_every_port(declare: Any, values: dict[str, Any]) -> None:
    (rule,) = [each for each in declare(**values).all("Firewall") if each.name == "host-to-host"]
    assert rule.inputs["sourceTags"] == rule.inputs["targetTags"] == ["tpu-stack-dev-host"]
    assert rule.inputs["allows"] == [{"protocol": protocol} for protocol in ("tcp", "udp", "icmp")]


def test_nfs_is_reached_from_the_hosts_alone(declare: Any) -> None:
    (rule,) = [each for each in declare().all("Firewall") if each.name == "host-to-nfs"]
    assert rule.inputs["sourceTags"] == ["tpu-stack-dev-host"]
    assert rule.inputs["targetTags"] == ["tpu-stack-dev-gateway"]
    assert rule.inputs["allows"] == [{"protocol": "tcp", "ports": ["2049"]}]


@pytest.mark.parametrize("shape", ["Filestore", "no storage at all"])
def test_without_a_gateway_nothing_is_opened_for_one(declare: Any, shape: str) -> None:
    names = {each.name for each in declare(**SHAPES[shape]).all("Firewall")}
    assert names == {"iap-ssh", "host-to-host"}


@every_shape
def test_no_machine_has_an_external_address_by_default(declare: Any, values: dict[str, Any]) -> None:
    declared = declare(**values)
    for queued in declared.all("QueuedResource"):
        assert queued.inputs["external_addresses"] is False
    for node in declared.all("V2Vm"):
        assert node.inputs["networkConfig"]["enableExternalIps"] is False
    for machine in declared.all("compute/instance:Instance"):
        assert all("accessConfigs" not in each for each in machine.inputs["networkInterfaces"])
    for address in declared.all("Address"):
        assert address.inputs["addressType"] == "INTERNAL"


def test_external_addresses_are_given_to_the_hosts_that_were_asked_for(declare: Any) -> None:
    declared = declare(
        network={"external-addresses": True},
        slices=[
            {"name": "q", "accelerator": "v5litepod-8"},
            {"name": "d", "accelerator": "v5litepod-8", "provisioning": "direct"},
        ],
    )
    assert declared.one("QueuedResource").inputs["external_addresses"] is True
    assert declared.one("V2Vm").inputs["networkConfig"]["enableExternalIps"] is True


def test_hosts_without_an_external_address_reach_google_and_the_internet(declare: Any) -> None:
    declared = declare(**SHAPES["three slices in two zones"])
    subnetworks = {each.inputs["region"]: each for each in declared.all("Subnetwork")}
    assert set(subnetworks) == {"us-central1", "us-east1"}
    assert all(each.inputs["privateIpGoogleAccess"] is True for each in subnetworks.values())
    assert {each.inputs["region"] for each in declared.all("RouterNat")} == set(subnetworks)


def test_subnets_of_a_stack_do_not_overlap(declare: Any) -> None:
    declared = declare(**SHAPES["three slices in two zones"])
    first, second = (ipaddress.ip_network(each.inputs["ipCidrRange"]) for each in declared.all("Subnetwork"))
    assert not first.overlaps(second)


def test_in_an_existing_network_only_firewall_rules_are_made(declare: Any) -> None:
    declared = declare(network={"existing": "shared", "subnetwork": "training"})
    for kind in ("compute/network:Network", "Subnetwork", "Router", "RouterNat"):
        assert not declared.all(kind)
    queued = declared.one("QueuedResource").inputs
    assert queued["network"] == "projects/my-project/global/networks/shared"
    assert queued["subnetwork"] == "projects/my-project/regions/us-central1/subnetworks/training"
    assert {each.inputs["network"] for each in declared.all("Firewall")} == {queued["network"]}


@every_shape
def test_people_come_in_by_os_login_alone(declare: Any, values: dict[str, Any]) -> None:
    declared = declare(**values)
    machines = [
        *declared.all("QueuedResource"),
        *declared.all("V2Vm"),
        *declared.all("compute/instance:Instance"),
    ]
    assert machines
    for machine in machines:
        assert machine.inputs["metadata"]["enable-oslogin"] == "TRUE"
        assert machine.inputs["metadata"]["block-project-ssh-keys"] == "TRUE"
        assert machine.inputs["metadata"]["serial-port-enable"] == "FALSE"


@every_shape
def test_every_machine_carries_the_tag_that_the_rules_are_for(declare: Any, values: dict[str, Any]) -> None:
    declared = declare(**values)
    for host in (*declared.all("QueuedResource"), *declared.all("V2Vm")):
        assert host.inputs["tags"] == ["tpu-stack-dev-host"]
    for gateway in declared.all("compute/instance:Instance"):
        assert gateway.inputs["tags"] == ["tpu-stack-dev-gateway"]
