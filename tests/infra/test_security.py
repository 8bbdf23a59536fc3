"""What the internet can reach of a stack: only IAP's tunnels to port 22; and who may do what."""

import ipaddress
from typing import Any

import pytest

from rehearsal.gcp_stand_in.table import KINDS
from tests.infra.conftest import BOTH_KINDS, SHAPES, Declare, Declared, Resource

HOST, GATEWAY = "tpu-stack-dev-host", "tpu-stack-dev-gateway"
SSH = [{"protocol": "tcp", "ports": ["22"]}]
NFS = [{"protocol": "tcp", "ports": ["2049"]}]
EVERY_PORT = [{"protocol": protocol} for protocol in ("tcp", "udp", "icmp")]


def machines(declared: Declared) -> list[Resource]:
    kinds = ("QueuedResource", "V2Vm", "compute/instance:Instance")
    return [each for kind in kinds for each in declared.all(kind)]


# --- what can be reached ----------------------------------------------------------------------------------------


def test_iap_reaches_port_22_hosts_reach_each_other_and_the_gateways_nfs_and_nothing_else_comes_in(
    any_stack: Declared,
) -> None:
    """A rule without target tags would open every machine of the network, which may be somebody else's."""
    has_gateway = bool(any_stack.all("compute/instance:Instance"))
    is_cluster = bool(any_stack.all("NodePool")) and not machines(any_stack)
    rules = {each.name: each.inputs for each in any_stack.all("Firewall")}
    assert {rule["direction"] for rule in rules.values()} <= {"INGRESS"}
    opened = {
        name: (
            rule.get("sourceRanges", []),
            rule.get("sourceTags", []),
            sorted(rule["targetTags"]),
            rule["allows"],
        )
        for name, rule in rules.items()
    }
    assert (
        opened == {}
        if is_cluster
        else {
            "iap-ssh": (["35.235.240.0/20"], [], [GATEWAY, HOST] if has_gateway else [HOST], SSH),
            "host-to-host": ([], [HOST], [HOST], EVERY_PORT),
            **({"host-to-nfs": ([], [HOST], [GATEWAY], NFS)} if has_gateway else {}),
        }
    )


def test_every_machine_carries_its_tag_has_no_external_address_and_lets_people_in_only_by_os_login(
    any_stack: Declared,
) -> None:
    for machine in machines(any_stack):
        is_gateway = machine.kind.endswith("Instance")
        assert machine.inputs["tags"] == [GATEWAY if is_gateway else HOST]
        metadata = machine.inputs["metadata"]
        assert metadata["enable-oslogin"] == metadata["block-project-ssh-keys"] == "TRUE"
        assert metadata["serial-port-enable"] == "FALSE"
        assert "accessConfigs" not in (machine.inputs["networkInterfaces"][0] if is_gateway else {})
        assert machine.inputs.get("external_addresses", False) is False
        assert machine.inputs.get("networkConfig", {}).get("enableExternalIps", False) is False
    assert {each.inputs["addressType"] for each in any_stack.all("Address")} <= {"INTERNAL"}


def test_hosts_without_an_external_address_reach_google_and_the_internet(declare: Declare) -> None:
    declared = declare(**SHAPES["three slices in two zones"])
    subnetworks = {each.inputs["region"]: each.inputs for each in declared.all("Subnetwork")}
    assert set(subnetworks) == {"us-central1", "us-east1"}
    assert all(each["privateIpGoogleAccess"] is True for each in subnetworks.values())
    assert {each.inputs["region"] for each in declared.all("RouterNat")} == set(subnetworks)
    first, second = (ipaddress.ip_network(each["ipCidrRange"]) for each in subnetworks.values())
    assert not first.overlaps(second)


def test_in_an_existing_network_only_firewall_rules_are_made(declare: Declare) -> None:
    declared = declare(network={"existing": "shared", "subnetwork": "training"})
    for kind in ("compute/network:Network", "Subnetwork", "Router", "RouterNat"):
        assert not declared.all(kind)
    queued = declared.one("QueuedResource").inputs
    assert queued["network"] == "projects/my-project/global/networks/shared"
    assert queued["subnetwork"] == "projects/my-project/regions/us-central1/subnetworks/training"
    assert {each.inputs["network"] for each in declared.all("Firewall")} == {queued["network"]}


# --- who may do what --------------------------------------------------------------------------------------------


def test_a_stack_that_is_only_a_cluster_grants_what_launching_in_it_takes_and_lets_nobody_log_in(
    declare: Declare,
) -> None:
    alone = declare(**SHAPES["a cluster and nothing else"])
    granted = {(each.inputs["member"].partition(":")[0], each.inputs["role"]) for each in bindings(alone)}
    launch = "projects/my-project/roles/tpuStackLaunch_0123abcd"
    assert granted == {
        ("user", launch),
        ("principal", "roles/storage.objectUser"),
        ("principal", "roles/storage.legacyBucketReader"),
        ("serviceAccount", "roles/artifactregistry.reader"),
        ("serviceAccount", "roles/container.defaultNodeServiceAccount"),
    }
    assert [each.name for each in alone.all("Account")] == ["nodes"]
    services = {each.inputs["service"].partition(".")[0] for each in alone.all("projects/service:Service")}
    assert not services & {"iap", "oslogin"}
    # Nodes have no address of their own, and what a cluster runs is not all in Google's registries.
    assert len(alone.all("RouterNat")) == 1
    # In somebody else's cluster the stack has nothing that a network could be for.
    theirs = declare(
        **SHAPES["a cluster and nothing else"], cluster={"context": "theirs", "namespace": "ours"}
    )
    assert not [
        each.kind for each in theirs.resources if each.kind.startswith(("gcp:compute", "gcp:projects/iAM"))
    ]
    # A TPU VM, or a gateway, brings the rights to log in with it.
    additions: tuple[dict[str, Any], ...] = (
        {"slices": [*SHAPES["node pools"]["slices"], *BOTH_KINDS]},
        {"storage": {}},
    )
    for more in additions:
        assert bindings(declare(**(SHAPES["a cluster and nothing else"] | more)), role=TUNNEL)


EMAIL = "tpu-stack-dev@my-project.iam.gserviceaccount.com"
HOSTS = f"serviceAccount:{EMAIL}"
TUNNEL = "roles/iap.tunnelResourceAccessor"


def bindings(declared: Declared, **wanted: str) -> list[Resource]:
    found = [each for each in declared.resources if "member" in each.inputs and "role" in each.inputs]
    return [each for each in found if all(each.inputs[key] == value for key, value in wanted.items())]


@pytest.mark.parametrize(
    ("storage", "roles"),
    [
        ({}, ["roles/artifactregistry.reader", "roles/storage.legacyBucketReader", "roles/storage.objectUser"]),
        ({"bucket": False}, ["roles/artifactregistry.reader"]),
    ],
)  # fmt: skip
def test_the_hosts_account_has_the_bucket_and_the_images_and_nothing_of_the_project(
    declare: Declare, storage: dict[str, Any], roles: list[str]
) -> None:
    theirs = bindings(declare(storage=storage), member=HOSTS)
    assert sorted(each.inputs["role"] for each in theirs) == roles
    kinds = {each.kind.rpartition(":")[2] for each in theirs}
    assert kinds <= {"BucketIAMMember", "RepositoryIamMember"}


def test_members_log_in_as_themselves_administrators_as_root_and_nobody_changes_the_project(
    declare: Declare,
) -> None:
    """OS Login lets nobody into a machine whose account they may not use; on the project it would be all accounts."""
    ada, root = "user:ada@example.com", "user:root@example.com"
    declared = declare(access={"members": [ada, root], "administrators": [root]})
    of_project: dict[str, set[str]] = {}
    for each in declared.all("projects/iAMMember:IAMMember"):
        of_project.setdefault(each.inputs["member"], set()).add(each.inputs["role"])
    assert of_project == {
        ada: {TUNNEL, "roles/compute.osLogin"},
        root: {TUNNEL, "roles/compute.osAdminLogin"},
    }
    uses = declared.all("serviceaccount/iAMMember:IAMMember")
    assert {each.inputs["member"] for each in uses} == {ada, root}
    for use in uses:
        assert use.inputs["role"] == "roles/iam.serviceAccountUser"
        assert use.inputs["serviceAccountId"] == f"projects/my-project/serviceAccounts/{EMAIL}"
    assert {each.inputs["member"] for each in bindings(declare(access={}))} == {HOSTS}


def test_members_take_leases_and_see_the_hosts_of_slices_and_decide_no_more_of_what_runs(
    declare: Declare,
) -> None:
    """Whoever launches takes the slice's lease; whoever writes the rest of the control documents acts as others."""
    ada = "user:ada@example.com"
    of_bucket = declare(access={"members": [ada]}).all("BucketIAMMember")
    objects = "projects/_/buckets/my-project-dev-tpu-stack/objects/control/"
    assert {
        each.inputs["role"].rpartition(".")[2]: (each.inputs.get("condition") or {}).get("expression")
        for each in of_bucket
        if each.inputs["member"] == ada
    } == {
        "legacyBucketReader": None,
        "objectUser": f'resource.name.startsWith("{objects}leases/")',
        "objectViewer": f'resource.name.startsWith("{objects}inventory.json")',
    }
    assert declare(storage={"bucket": False}).all("BucketIAMMember") == []


def test_two_stacks_of_a_project_have_nothing_in_common_but_its_services(declare: Declare) -> None:
    """Google keeps one of each: the end of one stack would take it from the other, whose `up` would say unchanged."""
    everything: dict[str, Any] = {
        "slices": [*BOTH_KINDS, {"name": "p", "accelerator": "v5litepod-16", "provisioning": "node-pool"}],
        "access": {"members": ["user:ada@example.com"], "administrators": ["user:root@example.com"]},
        "keeper": True,
        "notify": {"slack": "my-slack"},
        "budget_usd_per_hour": 1000,
    }

    def made(stack: str) -> set[str]:
        of_google = [each for each in declare(stack=stack, **everything).resources if each.kind in KINDS]
        ids = {each.urn: f"{each.kind} {KINDS[each.kind].resource_id(each.inputs)}" for each in of_google}
        assert len(set(ids.values())) == len(ids)
        return set(ids.values())

    shared = made("dev") & made("prod")
    assert {each.partition(" ")[0] for each in shared} == {"gcp:projects/service:Service"}


def test_a_tunnel_leads_only_to_port_22_and_each_stack_has_its_own(declare: Declare) -> None:
    """The title is part of a binding: without it the end of one stack would shut out the people of another."""
    (tunnel,) = bindings(declare(), role=TUNNEL)
    assert tunnel.inputs["member"] == "user:ada@example.com"
    assert tunnel.inputs["condition"]["expression"] == "destination.port == 22"
    assert tunnel.inputs["condition"]["title"] == "SSH to tpu-stack-dev"


def test_every_host_runs_as_the_stacks_own_account_the_file_server_has_none_and_addresses_are_asked_for(
    declare: Declare,
) -> None:
    declared = declare(network={"external-addresses": True}, slices=BOTH_KINDS)
    queued, node = declared.one("QueuedResource").inputs, declared.one("V2Vm").inputs
    assert queued["service_account_email"] == node["serviceAccount"]["email"] == EMAIL
    assert queued["external_addresses"] is node["networkConfig"]["enableExternalIps"] is True
    assert "serviceAccount" not in declared.one("compute/instance:Instance").inputs


def test_the_bucket_is_closed_to_the_public_and_has_one_kind_of_permissions(declare: Declare) -> None:
    bucket = declare().one("Bucket").inputs
    assert bucket["publicAccessPrevention"] == "enforced"
    assert bucket["uniformBucketLevelAccess"] is True
    assert bucket["forceDestroy"] is False
