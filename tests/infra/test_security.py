"""What the internet can reach of a stack: only IAP's tunnels to port 22; and who may do what."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest

from tests.infra.conftest import SHAPES, every_shape


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


# --- who may do what --------------------------------------------------------------------------------------------


HOSTS = "serviceAccount:tpu-stack-dev@my-project.iam.gserviceaccount.com"
OWNER_ROLES = {"roles/owner", "roles/editor", "roles/storage.admin", "roles/artifactregistry.admin"}


def bindings(declared: Any) -> list[Any]:
    return [each for each in declared.resources if "member" in each.inputs and "role" in each.inputs]


def test_the_hosts_account_has_the_bucket_and_the_images_and_nothing_else(declare: Any) -> None:
    theirs = [each for each in bindings(declare()) if each.inputs["member"] == HOSTS]
    assert {(each.kind.rpartition(":")[2], each.inputs["role"]) for each in theirs} == {
        ("BucketIAMMember", "roles/storage.objectUser"),
        ("BucketIAMMember", "roles/storage.legacyBucketReader"),
        ("RepositoryIamMember", "roles/artifactregistry.reader"),
    }


def test_without_a_bucket_the_hosts_account_has_the_images_alone(declare: Any) -> None:
    theirs = [each for each in bindings(declare(storage={"bucket": False})) if each.inputs["member"] == HOSTS]
    assert [each.kind.rpartition(":")[2] for each in theirs] == ["RepositoryIamMember"]


def test_nobody_gets_a_role_that_changes_the_project(declare: Any) -> None:
    declared = declare(
        access={"members": ["user:ada@example.com"], "administrators": ["group:ops@example.com"]}
    )
    assert not {each.inputs["role"] for each in bindings(declared)} & OWNER_ROLES
    of_the_project = {each.inputs["role"] for each in declared.all("projects/iAMMember:IAMMember")}
    assert of_the_project == {
        "roles/iap.tunnelResourceAccessor",
        "roles/compute.osLogin",
        "roles/compute.osAdminLogin",
    }


def test_a_tunnel_leads_to_port_22_alone(declare: Any) -> None:
    (tunnel,) = [
        each for each in bindings(declare()) if each.inputs["role"] == "roles/iap.tunnelResourceAccessor"
    ]
    assert tunnel.inputs["member"] == "user:ada@example.com"
    assert tunnel.inputs["condition"]["expression"] == "destination.port == 22"


def test_each_stack_has_tunnels_of_its_own(declare: Any) -> None:
    """The title is part of a binding: without it the end of one stack would shut out the people of another."""
    (tunnel,) = [
        each for each in bindings(declare()) if each.inputs["role"] == "roles/iap.tunnelResourceAccessor"
    ]
    assert tunnel.inputs["condition"]["title"] == "SSH to tpu-stack-dev"


def test_only_administrators_become_root(declare: Any) -> None:
    declared = declare(
        access={
            "members": ["user:ada@example.com", "user:root@example.com"],
            "administrators": ["user:root@example.com"],
        }
    )
    roles: dict[str, set[str]] = {}
    for each in declared.all("projects/iAMMember:IAMMember"):
        roles.setdefault(each.inputs["member"], set()).add(each.inputs["role"])
    assert "roles/compute.osLogin" in roles["user:ada@example.com"]
    assert "roles/compute.osAdminLogin" not in roles["user:ada@example.com"]
    assert "roles/compute.osAdminLogin" in roles["user:root@example.com"]


def test_people_may_use_the_hosts_account_and_no_other(declare: Any) -> None:
    """OS Login lets nobody into a machine whose account they may not use; on the project it would be all accounts."""
    (use,) = declare().all("serviceaccount/iAMMember:IAMMember")
    assert use.inputs["role"] == "roles/iam.serviceAccountUser"
    assert use.inputs["serviceAccountId"] == f"projects/my-project/serviceAccounts/{HOSTS.partition(':')[2]}"


def test_nobody_named_is_nobody_let_in(declare: Any) -> None:
    assert {each.inputs["member"] for each in bindings(declare(access={}))} == {HOSTS}


def test_every_host_runs_as_the_stacks_own_account(declare: Any) -> None:
    declared = declare(
        slices=[
            {"name": "q", "accelerator": "v5litepod-8"},
            {"name": "d", "accelerator": "v5litepod-8", "provisioning": "direct"},
        ]
    )
    email = HOSTS.partition(":")[2]
    assert declared.one("QueuedResource").inputs["service_account_email"] == email
    assert declared.one("V2Vm").inputs["serviceAccount"]["email"] == email


def test_the_file_server_has_no_account_at_all(declare: Any) -> None:
    assert "serviceAccount" not in declare().one("compute/instance:Instance").inputs


def test_the_bucket_is_closed_to_the_public_and_has_one_kind_of_permissions(declare: Any) -> None:
    bucket = declare().one("Bucket").inputs
    assert bucket["publicAccessPrevention"] == "enforced"
    assert bucket["uniformBucketLevelAccess"] is True
    assert bucket["forceDestroy"] is False
