"""The stand-in for the gcp provider: what it takes, what it refuses, and what there is afterwards."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.aliases import Json
from rehearsal.gcp_stand_in import arguments, tpu_vm
from rehearsal.gcp_stand_in.arguments import UNKNOWN
from rehearsal.gcp_stand_in.provider import Provider, provider_settings
from rehearsal.gcp_stand_in.table import KINDS
from rehearsal.gcp_stand_in.world import Thing, World, WorldError
from rehearsal.tpu_api import Delays, TpuApi

NETWORK = "gcp:compute/network:Network"
DISK = "gcp:compute/disk:Disk"
BUCKET = "gcp:storage/bucket:Bucket"
ACCOUNT = "gcp:serviceaccount/account:Account"
FILESTORE = "gcp:filestore/instance:Instance"
NODE_POOL = "gcp:container/nodePool:NodePool"
TPU_VM = "gcp:tpu/v2Vm:V2Vm"
INSTANCE = "gcp:compute/instance:Instance"
ADDRESS = "gcp:compute/address:Address"
SUBNETWORK = "gcp:compute/subnetwork:Subnetwork"
REPOSITORY = "gcp:artifactregistry/repository:Repository"

DISK_INPUTS: Json = {"name": "d", "project": "p", "zone": "us-central1-a", "size": 10}
VM_INPUTS: Json = {
    "name": "tpu",
    "project": "p",
    "zone": "us-central1-a",
    "acceleratorType": "v5litepod-16",
    "runtimeVersion": "v2-alpha-tpuv5-lite",
}
VM_ID = "projects/p/locations/us-central1-a/nodes/tpu"


def urn(type_token: str, name: str = "thing") -> str:
    return f"urn:pulumi:dev::tpu-stack::tpu-stack:Parent${type_token}::{name}"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(path=tmp_path / "world.json")


@pytest.fixture
def gcp(world: World) -> Provider:
    return Provider(settings={"project": "p", "zone": "us-central1-a", "region": "us-central1"}, world=world)


def check(gcp: Provider, type_token: str, news: Json, olds: Json | None = None) -> tuple[Json, list[str]]:
    inputs, found = gcp.check(urn(type_token), olds or {}, news, b"\x01\x02\x03\x04")
    return inputs, [f"{path}: {reason}" for path, reason in found]


def diff(gcp: Provider, type_token: str, olds: Json, news: Json) -> tuple[list[str], list[str]]:
    return gcp.diff(urn(type_token), olds, news, [])


# --- the table ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_token", sorted(KINDS))
def test_the_table_speaks_only_of_properties_that_the_sdk_has(type_token: str) -> None:
    kind, known = KINDS[type_token], arguments.resource_arguments(type_token)
    of_id = set(re.findall(r"\{(\w+)\}", kind.id))
    in_place = {path.partition(".")[0] for path in kind.in_place.split()}
    assert {*of_id, *in_place, *kind.grows.split(), *kind.sorted_by} - known.keys() == set()
    assert not of_id & in_place
    if kind.names_itself:
        assert "name" in of_id and not known["name"].required


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gcp.compute.Manged:DeprecationWarning")
def test_what_is_read_from_the_source_of_the_sdk_is_what_its_classes_say() -> None:
    import importlib

    from pulumi import _types

    for type_token in KINDS:
        module, _, name = type_token.removeprefix("gcp:").partition(":")
        found = importlib.import_module(f"pulumi_gcp.{module.partition('/')[0]}")
        said = _types.input_type_types(getattr(found, f"{name}Args"))
        assert arguments.resource_arguments(type_token).keys() == said.keys()
        for key, argument in arguments.resource_arguments(type_token).items():
            if argument.shape.kind in ("str", "int", "float", "bool"):
                assert said[key].__name__ == argument.shape.kind, (type_token, key)
            if argument.shape.kind == "object":
                assert said[key].__name__ == argument.shape.class_name, (type_token, key)


# --- what is taken ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"allows": [{"protocol": "tcp", "port": ["22"]}]},
         "allows[0].port: pulumi_gcp knows no such property; it knows ports, p"),
        ({"allows": [{"ports": ["22"]}]}, "allows[0].protocol: required, and not given"),
        ({"allows": [{"protocol": "tcp", "ports": "22"}]}, "allows[0].ports: str where a list is wanted"),
        ({"allows": [{"protocol": "tcp", "ports": [22]}]}, "allows[0].ports[0]: int where str is wanted"),
        ({"allows": ["tcp"]}, "allows[0]: str where object is wanted"),
        ({"priority": 1000}, None),
        ({"priority": UNKNOWN}, None),
        ({"priority": 1000.5}, "priority: float where int is wanted"),
        ({"priority": True}, "priority: bool where int is wanted"),
        ({"network": None}, "network: required"),
    ],
)  # fmt: skip
def test_what_the_sdk_would_not_take_is_named_with_its_path(
    gcp: Provider, changed: Json, wrong: str | None
) -> None:
    _, found = check(gcp, "gcp:compute/firewall:Firewall", {"network": "n", **changed})
    if wrong is None:
        assert found == []
    else:
        assert len(found) == 1 and found[0].startswith(wrong)


def test_project_and_zone_come_from_the_configuration_a_name_is_made_once_and_an_unknown_type_is_refused(
    gcp: Provider, world: World
) -> None:
    inputs, found = check(gcp, DISK, {"name": "d"})
    assert found == [] and (inputs["project"], inputs["zone"]) == ("p", "us-central1-a")
    assert check(gcp, DISK, {"name": "d", "zone": "europe-west4-b"})[0]["zone"] == "europe-west4-b"
    _, found = check(Provider(settings={"project": "p"}, world=world), DISK, {"name": "d"})
    assert found == ["zone: required; set it, or gcp:zone for all resources"]
    inputs, _ = check(gcp, NETWORK, {})
    assert inputs["name"] == "thing-0102030"
    with pytest.raises(WorldError, match=r"gcp:pubsub/topic:Topic.*compute:Network.*table\.py"):
        check(gcp, "gcp:pubsub/topic:Topic", {})  # the error says where to add it
    assert check(gcp, NETWORK, {}, olds={"name": "thing-fffffff"})[0]["name"] == "thing-fffffff"


# --- what changes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_token", "olds", "news", "replaces"),
    [
        (NETWORK, {"name": "a"}, {"name": "b"}, True),
        (SUBNETWORK, {"privateIpGoogleAccess": True}, {}, False),
        (DISK, DISK_INPUTS, DISK_INPUTS | {"size": 20}, False),
        (DISK, DISK_INPUTS, DISK_INPUTS | {"size": 5}, True),
        (BUCKET, {"location": "US"}, {"location": "EU"}, True),
        (BUCKET, {"labels": {"a": "b"}}, {}, False),
        (
            NODE_POOL,
            {"nodeConfig": {"spot": True}},
            {"nodeConfig": {"spot": True, "resourceLabels": {}}},
            False,
        ),
        (
            NODE_POOL,
            {"nodeConfig": {"spot": True}},
            {"nodeConfig": {"spot": False, "resourceLabels": {}}},
            True,
        ),
        (TPU_VM, VM_INPUTS, VM_INPUTS | {"labels": {"a": "b"}}, False),
        (TPU_VM, VM_INPUTS, VM_INPUTS | {"runtimeVersion": "other"}, True),
        ("gcp:projects/iAMMember:IAMMember", {"role": "a"}, {"role": "b"}, True),
    ],
)
def test_a_change_is_made_in_place_where_google_can_and_by_a_new_one_elsewhere(
    gcp: Provider, type_token: str, olds: Json, news: Json, replaces: bool
) -> None:
    changed, again = diff(gcp, type_token, olds, news)
    assert len(changed) == 1
    assert again == (changed if replaces else [])


def test_null_and_absent_are_the_same_ignored_changes_are_none_and_the_old_one_goes_first(
    gcp: Provider,
) -> None:
    assert diff(gcp, NETWORK, {"name": "a", "mtu": None}, {"name": "a"}) == ([], [])
    assert gcp.diff(urn(NETWORK), {"mtu": 1}, {"mtu": 2}, ["mtu"]) == ([], [])
    # Where the provider could have given the name.
    assert gcp.old_first(urn(DISK), ["zone"], ["zone"])
    assert not gcp.old_first(urn(DISK), ["name"], ["name"])
    assert not gcp.old_first(urn(DISK), ["size"], [])
    assert not gcp.old_first(urn(REPOSITORY), ["location"], ["location"])


# --- what there is ------------------------------------------------------------------------------------------------


def test_what_is_made_is_in_the_world_until_it_is_deleted_and_its_name_is_taken(
    gcp: Provider, world: World
) -> None:
    own_id, made = gcp.create(urn(DISK), DISK_INPUTS, 0)
    assert own_id == "projects/p/zones/us-central1-a/disks/d"
    assert made["selfLink"].endswith(own_id)
    assert [thing.id for thing in world.with_type("compute:Disk")] == [own_id]
    with pytest.raises(WorldError, match=r"Error 409.*already exists"):
        gcp.create(urn(DISK, "other"), DISK_INPUTS, 0)
    world.replace(Thing(type=DISK, id=own_id, inputs=DISK_INPUTS | {"size": 99}, outputs={"size": 99}))
    found = gcp.read(urn(DISK), own_id, DISK_INPUTS)  # as somebody else has changed it
    assert found is not None and found[0]["size"] == 99 and found[1]["size"] == 99
    gcp.delete(urn(DISK), own_id, 0)
    gcp.delete(urn(DISK), own_id, 0)  # twice is as good as once
    assert world.things() == {} and gcp.read(urn(DISK), own_id, DISK_INPUTS) is None
    with pytest.raises(WorldError, match="Error 404"):
        gcp.update(urn(DISK), own_id, DISK_INPUTS, DISK_INPUTS | {"size": 20}, 0)


def test_what_is_in_use_is_kept_but_a_disk_is_taken_out_of_the_machine_that_runs(
    gcp: Provider, world: World
) -> None:
    region = {"project": "p", "region": "us-central1"}
    subnet = {"name": "s", "network": "n", "ipCidrRange": "10.7.0.0/20", **region}
    subnet_id, _ = gcp.create(urn(SUBNETWORK), subnet, 0)
    address = {"name": "a", "addressType": "INTERNAL", "subnetwork": subnet_id, **region}
    address_id, address_made = gcp.create(urn(ADDRESS), address, 0)
    assert address_made["address"].startswith("10.7.")
    disk_id, disk_made = gcp.create(urn(DISK), DISK_INPUTS, 0)
    machine = {
        "name": "vm",
        "project": "p",
        "zone": "us-central1-a",
        "machineType": "e2-small",
        "attachedDisks": [{"source": disk_made["selfLink"]}],
        "networkInterfaces": [{"subnetwork": subnet_id, "networkIp": address_made["address"]}],
    }
    machine_id, _ = gcp.create(urn(INSTANCE), machine, 0)
    for kind, own_id, user in ((ADDRESS, address_id, machine_id), (SUBNETWORK, subnet_id, address_id)):
        with pytest.raises(WorldError, match=f"Error 400: .*{own_id}' is already being used by '{user}'"):
            gcp.delete(urn(kind), own_id, 0)
    gcp.delete(urn(DISK), disk_id, 0)
    assert world.pulled() == [f"{disk_id} from {machine_id}"]
    assert world.with_type("compute:Instance")[0].inputs["attachedDisks"] == []
    gcp.delete(urn(INSTANCE), machine_id, 0)
    with pytest.raises(WorldError, match="Error deleting instance: googleapi: Error 404: .*notFound"):
        gcp.delete(urn(INSTANCE), machine_id, 0)
    gcp.delete(urn(ADDRESS), address_id, 0)
    gcp.delete(urn(SUBNETWORK), subnet_id, 0)
    assert world.things() == {}


def test_google_keeps_what_it_filled_in_sorts_cleanup_policies_and_takes_the_name_out_of_a_link(
    gcp: Provider,
) -> None:
    inputs: Json = {"accountId": "runner", "project": "p"}
    own_id, made = gcp.create(urn(ACCOUNT), inputs, 0)
    after = gcp.update(urn(ACCOUNT), own_id, inputs, inputs | {"displayName": "Runner"}, 0)
    assert made["email"] == "runner@p.iam.gserviceaccount.com"
    assert after == made | {"displayName": "Runner"}
    again = gcp.read(urn(ACCOUNT), own_id, inputs)
    assert again is not None and again[1] == after

    share = {"name": "share", "project": "p", "location": "us-central1-a", "tier": "BASIC_HDD"}
    inputs = share | {
        "networks": [{"network": "n", "modes": ["MODE_IPV4"]}],
        "fileShares": {"capacityGb": 1024},
    }
    own_id, made = gcp.create(urn(FILESTORE), inputs, 0)
    after = gcp.update(urn(FILESTORE), own_id, inputs, inputs | {"fileShares": {"capacityGb": 2048}}, 0)
    assert after["networks"] == made["networks"] and after["networks"][0]["ipAddresses"]

    policies = [{"id": "keep"}, {"id": "delete"}]
    inputs = {"repositoryId": "r", "project": "p", "location": "us-central1", "cleanupPolicies": policies}
    own_id, made = gcp.create(urn(REPOSITORY), inputs, 0)
    found = gcp.read(urn(REPOSITORY), own_id, inputs)
    assert found is not None and found[0]["cleanupPolicies"] == policies[::-1] == made["cleanupPolicies"]

    router = "projects/p/regions/us-central1/routers/r"
    inputs = {"name": "nat", "project": "p", "region": "us-central1", "router": router}
    assert gcp.create(urn("gcp:compute/routerNat:RouterNat"), inputs, 0)[0] == "p/us-central1/r/nat"


# --- TPU VMs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def api() -> Iterator[TpuApi]:
    with TpuApi(capacity={"us-central1-a:v5litepod:on-demand": 16}, delays=Delays().scaled(0.01)) as api:
        yield api


@pytest.fixture
def tpus(api: TpuApi, world: World) -> Provider:
    return Provider(settings={"project": "p", "tpuV2CustomEndpoint": f"{api.url}/v2/"}, world=world)


def test_a_tpu_vm_is_a_node_of_the_cloud_tpu_api_changed_in_place(tpus: Provider, api: TpuApi) -> None:
    account = {"email": "runner@p.iam.gserviceaccount.com", "scopes": ["cloud-platform"]}
    api.control.inject("too-many-requests", "nodes.create", times=2)  # tried again silently
    own_id, made = tpus.create(
        urn(TPU_VM), VM_INPUTS | {"serviceAccount": account, "labels": {"team": "nlp"}}, 30
    )
    assert own_id == VM_ID
    assert (made["state"], len(made["networkEndpoints"])) == ("READY", 4)
    assert made["effectiveLabels"] == {"team": "nlp", "goog-pulumi-provisioned": "true"}
    (node,) = api.control.alive()["nodes"]
    assert node["name"] == VM_ID
    after = tpus.update(urn(TPU_VM), VM_ID, VM_INPUTS, VM_INPUTS | {"metadata": {"a": "b"}}, 30)
    assert after["metadata"] == {"a": "b"} and after["state"] == "READY"
    tpus.delete(urn(TPU_VM), own_id, 30)
    assert api.control.alive()["nodes"] == []
    tpus.delete(urn(TPU_VM), own_id, 30)


def test_what_the_api_refuses_is_told_and_nothing_is_left(
    tpus: Provider, api: TpuApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WorldError, match="googleapi: Error 400"):
        tpus.create(urn(TPU_VM), VM_INPUTS | {"acceleratorType": "v5litepod-3"}, 30)
    api.control.set_capacity("us-central1-a:v5litepod:on-demand", 0)
    with pytest.raises(WorldError, match="Error code 8, message: There is no more capacity"):
        tpus.create(urn(TPU_VM), VM_INPUTS, 30)
    monkeypatch.setattr(tpu_vm, "IN_FLIGHT_S", 0.2)
    api.control.inject("too-many-requests", "nodes.create", times=1000)
    with pytest.raises(WorldError, match="Error creating Vm: googleapi: Error 429"):
        tpus.create(urn(TPU_VM), VM_INPUTS, 0.1)
    assert api.control.alive()["nodes"] == []


def test_the_access_token_is_not_kept() -> None:
    given = {"gcp:config:project": "p", "gcp:config:zone": "", "gcp:config:accessToken": "a-secret"}
    assert provider_settings(given) == {"project": "p"}
