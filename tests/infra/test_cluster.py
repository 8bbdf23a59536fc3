"""A slice as node pools: what is declared of the cluster, of its pools, and of who may do what in it."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from contracts import inventory
from infra import catalogue
from infra.gke import cluster
from infra.network import OWN_RANGE
from tests.infra.conftest import Declare, Declared

ROOT = Path(__file__).resolve().parents[2]
POOL: dict[str, Any] = {
    "name": "main",
    "accelerator": "v6e-16",
    "zone": "us-east5-b",
    "provisioning": "node-pool",
}
PODS = (
    "principal://iam.googleapis.com/projects/4711/locations/global/workloadIdentityPools/my-project.svc.id.goog/"
    "subject/ns/tpu-stack-dev/sa/tpu-stack"
)


def pools(declared: Declared) -> dict[str, dict[str, Any]]:
    """The pools of slices, by name."""
    return {each.inputs["name"]: each.inputs for each in declared.all("NodePool") if each.name != "system"}


def pool_of(declared: Declared) -> dict[str, Any]:
    """The inputs of the one pool of a slice."""
    return pools(declared)["main"]


def declared_with(declare: Declare, **changes: Any) -> Declared:
    return declare(zone="us-east5-b", slices=[POOL | changes])


# --- the pools of a slice -------------------------------------------------------------------------------------------


SHAPES: dict[str, dict[str, tuple[dict[str, str], str, int, dict[str, str] | None]]] = {
    "us-east5-a": {
        "v6e-16": ({"zone": "us-east5-b"}, "ct6e-standard-4t", 4, {"type": "COMPACT", "tpuTopology": "4x4"}),
        "v6e-8": ({"zone": "us-east5-b"}, "ct6e-standard-8t", 1, None),
        "v6e-1": ({"zone": "us-east5-b"}, "ct6e-standard-1t", 1, None),
        "v5p-32": ({}, "ct5p-hightpu-4t", 4, {"type": "COMPACT", "tpuTopology": "2x2x4"}),
    },
    "us-central1-c": {
        "v5litepod-4": ({"zone": "us-central1-a"}, "ct5lp-hightpu-4t", 1, None),
        "tpu7x-8": ({}, "tpu7x-standard-4t", 1, None),
        # Compute Engine refuses TPU7x with a compact placement policy.
        "tpu7x-128": ({}, "tpu7x-standard-4t", 16,
                      {"type": "", "policyName": "tpu-stack-dev-tpu7x-128", "tpuTopology": "4x4x4"}),
    },
    "us-central2-b": {"v4-16": ({}, "ct4p-hightpu-4t", 2, {"type": "COMPACT", "tpuTopology": "2x2x2"})},
}  # fmt: skip


@pytest.mark.parametrize("zone", SHAPES)
def test_a_pool_has_the_machines_and_the_wiring_of_its_slice(declare: Declare, zone: str) -> None:
    table = SHAPES[zone]
    asked = [POOL | {"zone": zone, "name": each, "accelerator": each} | table[each][0] for each in table]
    declared = declare(zone=zone, slices=asked)
    entries = {each.name: each for each in declared.inventory.slices}
    for name, (place, machine, nodes, placement) in table.items():
        pool, entry = pools(declared)[name], entries[name]
        assert (pool["nodeConfig"]["machineType"], pool["nodeCount"]) == (machine, nodes)
        assert pool.get("placementPolicy") == placement
        assert pool["nodeLocations"] == [place.get("zone", zone)] == [entry.zone]
        assert entry.pool is not None
        assert (entry.pool.machine_type, entry.pool.nodes, entry.hosts) == (machine, nodes, ())
        assert entry.pool.chips_per_node == int(machine[-2])
        assert entry.devices_per_host == entry.pool.chips_per_node * (2 if "tpu7x" in machine else 1)
    policies = {each.inputs["name"]: each.inputs["workloadPolicy"] for each in declared.all("ResourcePolicy")}
    wanted = [each for _, _, _, each in table.values() if each is not None and "policyName" in each]
    assert policies == {
        each["policyName"]: {"type": "HIGH_THROUGHPUT", "acceleratorTopology": each["tpuTopology"]}
        for each in wanted
    }


ZERO_TO_ALL = {
    "autoscaling": {"minNodeCount": 0, "maxNodeCount": 4, "locationPolicy": "ANY"},
}


def reserved(value: str) -> dict[str, Any]:
    key = "compute.googleapis.com/reservation-name"
    kind = "SPECIFIC_RESERVATION"
    return {"reservationAffinity": {"consumeReservationType": kind, "key": key, "values": [value]}}


CAPACITIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {"nodeCount": 4}),
    "spot": (
        {"capacity": "spot"},
        {
            "spot": True,
            "kubeletConfig": {
                "shutdownGracePeriodSeconds": 120,
                "shutdownGracePeriodCriticalPodsSeconds": 15,
            },
        },
        {"nodeCount": 4},
    ),
    "ours": ({"capacity": "reserved", "reservation": "spring"}, reserved("spring"), {"nodeCount": 4}),
    "theirs": (
        {"capacity": "reserved", "reservation": "projects/other/reservations/spring"},
        reserved("projects/other/reservations/spring"),
        {"nodeCount": 4},
    ),
    "flex": (
        {"capacity": "flex-start"},
        {"flexStart": True, "reservationAffinity": {"consumeReservationType": "NO_RESERVATION"}},
        ZERO_TO_ALL,
    ),
    "idle": ({"scale-to-zero": True}, {}, ZERO_TO_ALL),
}


def test_capacity_is_asked_of_gke_in_its_own_words_and_the_inventory_has_it(declare: Declare) -> None:
    slices = [POOL | {"name": name} | asked for name, (asked, _, _) in CAPACITIES.items()]
    declared = declare(zone="us-east5-b", slices=slices)
    named = ("spot", "flexStart", "reservationAffinity", "kubeletConfig")
    sized = ("nodeCount", "initialNodeCount", "autoscaling")
    for entry in declared.inventory.slices:
        asked, node, pool = CAPACITIES[entry.name]
        made = pools(declared)[entry.name]
        assert {key: made["nodeConfig"][key] for key in named if key in made["nodeConfig"]} == node
        assert {key: made[key] for key in sized if key in made} == pool
        # Google's queue gives other nodes in place of those that fail.
        assert made["management"]["autoRepair"] is (asked.get("capacity") != "flex-start")
        assert entry.capacity == asked.get("capacity", "on-demand") and entry.pool is not None
        assert entry.pool.reservation == ("spring" if "reservation" in asked else None)


def test_several_slices_are_pools_with_numbers(declare: Declare) -> None:
    declared = declared_with(declare, count=2)
    assert set(pools(declared)) == {"main-0", "main-1"}
    (entry,) = declared.inventory.slices
    assert (entry.origin, entry.count) == ("node-pool main", 2)


def test_a_pool_is_labelled_runs_as_the_nodes_account_and_hides_it_from_pods(declare: Declare) -> None:
    declared = declared_with(declare, labels={"team": "nlp"}, **{"boot-disk": {"kms-key": KEY}})
    node = pool_of(declared)["nodeConfig"]
    assert node["resourceLabels"] == {"team": "nlp", "tpu-stack": "dev", "tpu-stack-slice": "main"}
    assert node["serviceAccount"] == "tpu-stack-dev-nodes@my-project.iam.gserviceaccount.com"
    assert node["workloadMetadataConfig"] == {"mode": "GKE_METADATA"}
    assert node["bootDiskKmsKey"] == KEY
    # Nodes are of one shape for ever: another is another pool of the same name, so the old one goes first.
    (pool,) = [each for each in declared.all("NodePool") if each.name == "main"]
    assert pool.options.deleteBeforeReplace
    assert made_safe(node) and made_safe(declared.one("container/cluster:Cluster").inputs["nodeConfig"])
    system = next(each for each in declared.all("NodePool") if each.name == "system")
    assert made_safe(system.inputs["nodeConfig"])
    # Google gives it to new nodes only: pools that are there without it are not made again for it.
    for each in (pool, system):
        assert "nodeConfig.shieldedInstanceConfig" in each.options.ignoreChanges
    # Without a tag no firewall rule of the stack lets anybody in, not even IAP.
    assert "tags" not in node


def made_safe(node: dict[str, Any]) -> bool:
    wanted = {"enableSecureBoot": True, "enableIntegrityMonitoring": True}
    return bool(node["shieldedInstanceConfig"] == wanted)


KEY = "projects/my-project/locations/us-east5/keyRings/r/cryptoKeys/k"


def test_every_machine_type_of_the_catalogue_is_one_that_the_generation_has() -> None:
    """Sizes are read from the topology; what GKE has no machine for would be found only by its refusal."""
    offered = catalogue.OFFERS["gke"].values()
    assert {each.generation.name for each in offered} == {
        each.name for each in catalogue.GENERATIONS if each.nodes
    }
    for each in offered:
        kind = each.node_kind
        assert kind is not None and each.chips_per_host in kind.chips, each
        assert each.machine_type == f"{kind.prefix}-{each.chips_per_host}t"
    assert catalogue.accelerator("tpu7x-8", "gke").devices_per_host == 8
    listed = {zone for each in catalogue.GENERATIONS for zone in each.flex_start_zones}
    assert listed <= {zone for each in offered for zone in each.zones}


# --- the cluster ----------------------------------------------------------------------------------------------------


def test_the_cluster_is_private_and_asks_only_google_who_somebody_is(declare: Declare) -> None:
    made = declared_with(declare).one("container/cluster:Cluster").inputs
    assert made["privateClusterConfig"] == {"enablePrivateNodes": True}
    assert made["masterAuth"] == {"clientCertificateConfig": {"issueClientCertificate": False}}
    assert made["enableLegacyAbac"] is False
    assert made["datapathProvider"] == "ADVANCED_DATAPATH"  # or network policies are not enforced
    assert made["workloadIdentityConfig"] == {"workloadPool": "my-project.svc.id.goog"}
    assert made["releaseChannel"] == {"channel": "REGULAR"}
    assert made["removeDefaultNodePool"] is True
    assert made["location"] == "us-east5-b"


def test_its_api_server_is_reached_by_name_and_iam_or_by_address_from_named_networks_never_both(
    declare: Declare,
) -> None:
    by_name = declared_with(declare)
    inputs = by_name.one("container/cluster:Cluster").inputs
    assert inputs["controlPlaneEndpointsConfig"] == {
        "dnsEndpointConfig": {"allowExternalTraffic": True},
        "ipEndpointsConfig": {"enabled": False},
    }
    assert "masterAuthorizedNetworksConfig" not in inputs
    assert by_name.inventory.cluster == inventory.Cluster(
        name="tpu-stack-dev",
        context=None,
        endpoint="https://gke-1.us-east5.gke.goog",
        namespace="tpu-stack-dev",
        service_account="tpu-stack",
    )
    by_address = declare(
        zone="us-east5-b",
        slices=[POOL],
        cluster={"authorized-networks": ["203.0.113.0/24"], "namespace": "ours"},
    )
    inputs = by_address.one("container/cluster:Cluster").inputs
    assert inputs["controlPlaneEndpointsConfig"] == {
        "dnsEndpointConfig": {"allowExternalTraffic": False},
        "ipEndpointsConfig": {"enabled": True},
    }
    assert inputs["masterAuthorizedNetworksConfig"] == {
        "cidrBlocks": [{"cidrBlock": "203.0.113.0/24"}],
        "gcpPublicCidrsAccessEnabled": False,
    }
    found = by_address.inventory.cluster
    assert found is not None
    assert (found.endpoint, found.ca_certificate, found.namespace) == (
        "https://10.9.9.9",
        "authority",
        "ours",
    )


def test_pods_have_ranges_that_no_subnet_can_meet_and_in_an_existing_network_those_that_gke_finds(
    declare: Declare,
) -> None:
    ranges = declared_with(declare).one("container/cluster:Cluster").inputs["ipAllocationPolicy"]
    assert set(ranges.values()) == {cluster.POD_RANGE, cluster.SERVICE_RANGE}
    assert not any(each.startswith(OWN_RANGE.partition(".")[0] + ".") for each in ranges.values())
    theirs = declare(zone="us-east5-b", slices=[POOL], network={"existing": "shared"})
    assert theirs.one("container/cluster:Cluster").inputs["ipAllocationPolicy"] == {}


def test_pods_have_the_bucket_and_nothing_else_and_nodes_the_images_and_their_own_logs(
    declare: Declare,
) -> None:
    declared = declared_with(declare)
    assert rights_of(declared, PODS) == {
        ("BucketIAMMember", "roles/storage.objectUser"),
        ("BucketIAMMember", "roles/storage.legacyBucketReader"),
    }
    nodes = "serviceAccount:tpu-stack-dev-nodes@my-project.iam.gserviceaccount.com"
    assert rights_of(declared, nodes) == {
        ("RepositoryIamMember", "roles/artifactregistry.reader"),
        ("IAMMember", "roles/container.defaultNodeServiceAccount"),
    }
    # Its identities are there only once the cluster is.
    made = declared.one("container/cluster:Cluster").urn
    for each in declared.all("BucketIAMMember"):
        if each.inputs["member"] == PODS:
            assert made in declared.needs(each)


def test_what_the_keeper_keeps_is_out_of_reach_of_pods_as_of_hosts(declare: Declare) -> None:
    declared = declare(zone="us-east5-b", slices=[POOL], keeper=True)
    (writes,) = [
        each
        for each in declared.all("BucketIAMMember")
        if each.inputs["member"] == PODS and each.inputs["role"].endswith("objectUser")
    ]
    assert "objects/control/" in writes.inputs["condition"]["expression"]


def test_people_may_launch_and_can_read_no_secret_and_change_no_right(declare: Declare) -> None:
    people = {"members": ["user:ada@example.com"], "administrators": ["group:ops@example.com"]}
    declared = declare(zone="us-east5-b", slices=[POOL], access=people)
    role = declared.one("IAMCustomRole").inputs
    assert (
        "container.jobs.create" in role["permissions"] and "container.clusters.connect" in role["permissions"]
    )
    assert not [
        each
        for each in role["permissions"]
        if re.search(r"secrets\.(?!create)|role|update.*luster|webhook", each, re.IGNORECASE)
    ]
    bound = {
        each.inputs["member"] for each in declared.all("IAMMember") if "tpuStackLaunch" in each.inputs["role"]
    }
    assert bound == {"user:ada@example.com", "group:ops@example.com"}


def test_the_role_that_the_docs_give_in_a_namespace_has_the_verbs_of_the_one_in_the_project() -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    (written,) = re.findall(r"^```yaml\n(apiVersion: rbac\..*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    in_namespace: set[tuple[str, str]] = set()
    for rule in yaml.safe_load(written)["rules"]:
        for resource in rule["resources"]:
            for verb in set(rule["verbs"]) - {"watch", "patch"}:  # of IAM's words list and update
                in_namespace.add(IAM_WORDS.get((resource, verb)) or (resource, verb))
    in_project = {(what.lower(), verb) for _, what, verb in (each.split(".") for each in cluster.LAUNCH)}
    # Of the whole cluster; whoever has only a namespace cannot ask for them, and is asked by nobody.
    of_cluster = {"clusters", "namespaces", "nodes", "selfsubjectaccessreviews"}
    assert {each for each in in_project if each[0] not in of_cluster} == in_namespace


IAM_WORDS = {
    ("pods/exec", "create"): ("pods", "exec"),
    ("pods/exec", "get"): ("pods", "exec"),
    ("pods/portforward", "create"): ("pods", "portForward"),
    ("pods/portforward", "get"): ("pods", "portForward"),
    ("pods/log", "get"): ("pods", "getLogs"),
    **{
        ("jobsets", verb): ("thirdpartyobjects", verb)
        for verb in ("create", "delete", "get", "list", "update")
    },
}


def test_a_stack_of_vms_has_no_cluster_and_one_of_pools_no_vms_and_a_service_more(declare: Declare) -> None:
    vms, both = declare(), declare(zone="us-east5-b", slices=[POOL, {"name": "vm", "accelerator": "v6e-8"}])
    assert not vms.all("container/cluster:Cluster") and vms.inventory.cluster is None
    names = [{each.inputs["service"] for each in it.all("projects/service:Service")} for it in (vms, both)]
    assert names[1] - names[0] == {"container.googleapis.com"}
    assert [each.name for each in both.all("QueuedResource")] == ["vm"]
    assert [each.name for each in both.inventory.slices] == ["main", "vm"]
    assert [each.pool is None for each in both.inventory.slices] == [False, True]
    kept = declare(zone="us-east5-b", slices=[], cluster={"zone": "us-east5-b"})
    assert [each.name for each in kept.all("NodePool")] == ["system"]


def test_of_a_cluster_that_exists_nothing_is_made_and_the_inventory_says_where_it_is(
    declare: Declare,
) -> None:
    declared = declare(zone="us-east5-b", slices=[POOL], cluster={"context": "theirs", "namespace": "ours"})
    for kind in (
        "container/cluster:Cluster",
        "NodePool",
        "IAMCustomRole",
        "ResourcePolicy",
        "QueuedResource",
    ):
        assert not declared.all(kind)
    assert declared.inventory.cluster == inventory.Cluster(
        name="theirs", context="theirs", namespace="ours", service_account="tpu-stack"
    )
    pool = declared.inventory.slices[0].pool
    assert pool is not None and pool.scales_to_zero, "while no run has its nodes they are somebody else's"
    assert inventory.from_json(inventory.to_json(declared.inventory)) == declared.inventory


def rights_of(declared: Declared, member: str) -> set[tuple[str, str]]:
    return {
        (each.kind.rpartition(":")[2], each.inputs["role"])
        for each in declared.resources
        if each.inputs.get("member") == member
    }
