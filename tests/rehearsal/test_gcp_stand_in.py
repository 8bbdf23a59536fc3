"""The stand-in for the gcp provider: what it takes, what it refuses, and what there is afterwards."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rehearsal.gcp_stand_in import arguments, provider, tpu_vm
from rehearsal.gcp_stand_in.arguments import UNKNOWN, mistakes
from rehearsal.gcp_stand_in.provider import Provider, Settings
from rehearsal.gcp_stand_in.table import KINDS
from rehearsal.gcp_stand_in.world import Fault, Thing, World, WorldError, short
from rehearsal.tpu_api import Delays, TpuApi
from tests.rehearsal.waiting import until

Json = dict[str, Any]

NETWORK = "gcp:compute/network:Network"
DISK = "gcp:compute/disk:Disk"
BUCKET = "gcp:storage/bucket:Bucket"
ACCOUNT = "gcp:serviceaccount/account:Account"
TPU_VM = "gcp:tpu/v2Vm:V2Vm"

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
    settings = Settings(project="p", zone="us-central1-a", region="us-central1")
    return Provider(settings=settings, world_file=world.path)


def check(gcp: Provider, type_token: str, news: Json, olds: Json | None = None) -> tuple[Json, list[str]]:
    inputs, found = gcp.check(urn(type_token), olds or {}, news, b"\x01\x02\x03\x04")
    return inputs, [f"{each.path}: {each.reason}" for each in found]


def diff(gcp: Provider, type_token: str, olds: Json, news: Json) -> tuple[list[str], list[str]]:
    return gcp.diff(urn(type_token), olds, news, [])


# --- the table ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_token", sorted(KINDS))
def test_the_table_speaks_only_of_properties_that_the_sdk_has(type_token: str) -> None:
    kind, known = KINDS[type_token], arguments.of_type(type_token)
    of_id = set(re.findall(r"\{(\w+)\}", kind.id))
    named = of_id | kind.in_place | kind.grows | ({kind.guard} if kind.guard else set())
    assert named - known.keys() == set()
    assert not of_id & kind.in_place
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
        assert arguments.of_type(type_token).keys() == said.keys()
        for key, argument in arguments.of_type(type_token).items():
            if argument.shape.kind in ("str", "int", "float", "bool"):
                assert said[key].__name__ == argument.shape.kind, (type_token, key)
            if argument.shape.kind == "object":
                assert said[key].__name__ == argument.shape.class_name, (type_token, key)


# --- what is taken ------------------------------------------------------------------------------------------------


def test_a_property_that_the_sdk_does_not_know_is_refused_with_those_that_it_knows(gcp: Provider) -> None:
    _, found = check(
        gcp, "gcp:iap/tunnelIamMember:TunnelIamMember", {"role": "r", "member": "m", "rolle": "r"}
    )
    assert found == ["rolle: pulumi_gcp knows no such property; it knows condition, member, project, role"]


@pytest.mark.parametrize(
    ("allows", "wrong"),
    [
        ([{"protocol": "tcp", "port": ["22"]}], "allows[0].port: pulumi_gcp knows no such property"),
        ([{"ports": ["22"]}], "allows[0].protocol: required, and not given"),
        ([{"protocol": "tcp", "ports": "22"}], "allows[0].ports: str where a list is wanted"),
        ([{"protocol": "tcp", "ports": [22]}], "allows[0].ports[0]: int where str is wanted"),
        ({"protocol": "tcp"}, "allows: dict where a list is wanted"),
        (["tcp"], "allows[0]: str where object is wanted"),
    ],
)
def test_mistakes_inside_a_property_are_found_too(gcp: Provider, allows: object, wrong: str) -> None:
    _, found = check(gcp, "gcp:compute/firewall:Firewall", {"network": "n", "allows": allows})
    assert len(found) == 1 and found[0].startswith(wrong)


@pytest.mark.parametrize(
    ("value", "right"),
    [(1000, True), (1000.5, False), (True, False), ("1000", False), (UNKNOWN, True), (None, True)],
)
def test_a_number_is_a_whole_number_or_not_known_yet(value: object, right: bool) -> None:
    found = mistakes("gcp:compute/firewall:Firewall", {"network": "n", "priority": value})
    assert (found == []) is right


def test_a_type_that_is_not_in_the_table_is_refused_and_the_error_says_where_to_add_it(gcp: Provider) -> None:
    with pytest.raises(WorldError, match=r"gcp:pubsub/topic:Topic.*compute:Network.*table\.py"):
        check(gcp, "gcp:pubsub/topic:Topic", {})


def test_project_and_zone_come_from_the_providers_configuration(gcp: Provider) -> None:
    inputs, found = check(gcp, DISK, {"name": "d"})
    assert found == [] and (inputs["project"], inputs["zone"]) == ("p", "us-central1-a")
    assert check(gcp, DISK, {"name": "d", "zone": "europe-west4-b"})[0]["zone"] == "europe-west4-b"


def test_a_zone_that_nobody_gives_is_asked_for() -> None:
    _, found = check(Provider(settings=Settings(project="p"), world_file=None), DISK, {"name": "d"})
    assert found == ["zone: required; set it, or gcp:zone for all resources"]


def test_a_name_that_is_not_given_is_made_once_and_kept(gcp: Provider) -> None:
    inputs, _ = check(gcp, NETWORK, {})
    assert inputs["name"] == "thing-0102030"
    assert check(gcp, NETWORK, {}, olds={"name": "thing-fffffff"})[0]["name"] == "thing-fffffff"


# --- what changes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_token", "olds", "news", "replaces"),
    [
        (NETWORK, {"name": "a"}, {"name": "b"}, True),
        (NETWORK, {"routingMode": "REGIONAL"}, {"routingMode": "GLOBAL"}, False),
        (DISK, DISK_INPUTS, DISK_INPUTS | {"size": 20}, False),
        (DISK, DISK_INPUTS, DISK_INPUTS | {"size": 5}, True),
        (BUCKET, {"location": "US"}, {"location": "EU"}, True),
        (BUCKET, {"labels": {"a": "b"}}, {}, False),
        (TPU_VM, VM_INPUTS, VM_INPUTS | {"labels": {"a": "b"}}, False),
        (TPU_VM, VM_INPUTS, VM_INPUTS | {"runtimeVersion": "other"}, True),
        ("gcp:projects/iAMMember:IAMMember", {"role": "a"}, {"role": "b"}, True),
        (NETWORK, {"deletionPolicy": "PREVENT"}, {}, False),
    ],
)
def test_a_change_is_made_in_place_where_google_can_and_by_a_new_one_elsewhere(
    gcp: Provider, type_token: str, olds: Json, news: Json, replaces: bool
) -> None:
    changed, again = diff(gcp, type_token, olds, news)
    assert len(changed) == 1
    assert again == (changed if replaces else [])


def test_null_and_absent_are_the_same_and_ignored_changes_are_none(gcp: Provider) -> None:
    assert diff(gcp, NETWORK, {"name": "a", "mtu": None}, {"name": "a"}) == ([], [])
    assert gcp.diff(urn(NETWORK), {"mtu": 1}, {"mtu": 2}, ["mtu"]) == ([], [])


# --- what there is ------------------------------------------------------------------------------------------------


def test_what_is_made_is_in_the_world_until_it_is_deleted(gcp: Provider, world: World) -> None:
    own_id, made = gcp.create(urn(DISK), DISK_INPUTS, 0)
    assert own_id == "projects/p/zones/us-central1-a/disks/d"
    assert made["selfLink"].endswith(own_id)
    assert [thing.id for thing in world.of_type("compute:Disk")] == [own_id]
    gcp.delete(urn(DISK), own_id, made, 0)
    gcp.delete(urn(DISK), own_id, made, 0)  # twice is as good as once
    assert world.things() == {}


def test_a_name_that_is_taken_is_refused(gcp: Provider) -> None:
    gcp.create(urn(DISK), DISK_INPUTS, 0)
    with pytest.raises(WorldError, match="Error 409.*already exists"):
        gcp.create(urn(DISK, "other"), DISK_INPUTS, 0)


def test_what_somebody_else_deleted_is_read_as_gone(gcp: Provider, world: World) -> None:
    own_id, _ = gcp.create(urn(DISK), DISK_INPUTS, 0)
    assert gcp.read(urn(DISK), own_id, {}) is not None
    world.remove(DISK, own_id)
    assert gcp.read(urn(DISK), own_id, DISK_INPUTS) is None
    with pytest.raises(WorldError, match="Error 404"):
        gcp.update(urn(DISK), own_id, DISK_INPUTS, DISK_INPUTS | {"size": 20}, 0)


def test_what_somebody_else_changed_is_read_as_it_is(gcp: Provider, world: World) -> None:
    own_id, _ = gcp.create(urn(DISK), DISK_INPUTS, 0)
    world.put(Thing(type=DISK, id=own_id, inputs=DISK_INPUTS | {"size": 99}, outputs={"size": 99}))
    found = gcp.read(urn(DISK), own_id, DISK_INPUTS)
    assert found is not None and found[0]["size"] == 99 and found[1]["size"] == 99


def test_an_update_keeps_what_google_had_filled_in(gcp: Provider) -> None:
    inputs = {"accountId": "runner", "project": "p"}
    own_id, made = gcp.create(urn(ACCOUNT), inputs, 0)
    after = gcp.update(urn(ACCOUNT), own_id, inputs, inputs | {"displayName": "Runner"}, 0)
    assert made["email"] == "runner@p.iam.gserviceaccount.com"
    assert after == made | {"displayName": "Runner"}
    again = gcp.read(urn(ACCOUNT), own_id, inputs)
    assert again is not None and again[1] == after


def test_a_bucket_with_objects_is_deleted_only_where_that_is_asked_for(gcp: Provider, world: World) -> None:
    inputs = {"name": "b", "location": "us-central1", "project": "p"}
    own_id, made = gcp.create(urn(BUCKET), inputs, 0)
    world.fill("b", 3)
    with pytest.raises(WorldError, match="containing objects without `force_destroy`"):
        gcp.delete(urn(BUCKET), own_id, made, 0)
    assert world.of_type("storage:Bucket")
    gcp.delete(urn(BUCKET), own_id, made | {"forceDestroy": True}, 0)
    assert not world.of_type("storage:Bucket")


@pytest.mark.parametrize(
    ("told", "left"), [({"deletionPolicy": "PREVENT"}, True), ({"deletionPolicy": "ABANDON"}, True)]
)
def test_a_deletion_policy_keeps_what_there_is(gcp: Provider, world: World, told: Json, left: bool) -> None:
    own_id, made = gcp.create(urn(DISK), DISK_INPUTS, 0)
    if told["deletionPolicy"] == "PREVENT":
        with pytest.raises(WorldError, match="protected by deletionPolicy"):
            gcp.delete(urn(DISK), own_id, made | told, 0)
    else:
        gcp.delete(urn(DISK), own_id, made | told, 0)
    assert bool(world.things()) is left


def test_a_protected_machine_is_not_deleted(gcp: Provider, world: World) -> None:
    token = "gcp:compute/instance:Instance"
    inputs = {
        "name": "vm",
        "project": "p",
        "zone": "us-central1-a",
        "machineType": "e2-small",
        "deletionProtection": True,
        "bootDisk": {},
        "networkInterfaces": [{"network": "n", "accessConfigs": [{}]}],
    }
    own_id, made = gcp.create(urn(token), inputs, 0)
    interface = made["networkInterfaces"][0]
    assert interface["networkIp"].startswith("10.") and interface["accessConfigs"][0]["natIp"]
    with pytest.raises(WorldError, match="protected by deletionProtection"):
        gcp.delete(urn(token), own_id, made, 0)
    assert world.things()


@pytest.mark.parametrize(
    ("zone", "machine_type", "made"),
    [
        ("us-central1-a", "e2-small", True),
        ("us-central2-b", "n1-standard-1", True),
        ("us-central2-b", "e2-small", False),
        ("us-central1-a", "e2-smal", False),
    ],
)
def test_a_machine_that_its_zone_does_not_have_is_refused_in_google_s_words(
    gcp: Provider, world: World, zone: str, machine_type: str, made: bool
) -> None:
    inputs: dict[str, Any] = {"name": "vm", "project": "p", "zone": zone, "machineType": machine_type}
    inputs |= {"bootDisk": {}, "networkInterfaces": [{"network": "n"}]}
    if made:
        gcp.create(urn("gcp:compute/instance:Instance"), inputs, 0)
    else:
        wrong = f"Machine type with name '{machine_type}' does not exist in zone '{zone}'., invalid"
        with pytest.raises(WorldError, match=f"Error 400: Invalid value for field .*{wrong}"):
            gcp.create(urn("gcp:compute/instance:Instance"), inputs, 0)
    assert bool(world.of_type("compute:Instance")) is made


INSTANCE = "gcp:compute/instance:Instance"
ADDRESS = "gcp:compute/address:Address"
SUBNETWORK = "gcp:compute/subnetwork:Subnetwork"


def test_what_is_in_use_is_kept_but_a_disk_is_taken_out_of_the_machine_that_runs(
    gcp: Provider, world: World
) -> None:
    region = {"project": "p", "region": "us-central1"}
    subnet = {"name": "s", "network": "n", "ipCidrRange": "10.7.0.0/20", **region}
    subnet_id, subnet_made = gcp.create(urn(SUBNETWORK), subnet, 0)
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
    machine_id, machine_made = gcp.create(urn(INSTANCE), machine, 0)
    for kind, own_id, made, user in (
        (ADDRESS, address_id, address_made, machine_id),
        (SUBNETWORK, subnet_id, subnet_made, address_id),
    ):
        with pytest.raises(WorldError, match=f"Error 400: .*{own_id}' is already being used by '{user}'"):
            gcp.delete(urn(kind), own_id, made, 0)
    gcp.delete(urn(DISK), disk_id, disk_made, 0)
    assert world.pulled() == [f"{disk_id} from {machine_id}"]
    assert world.of_type("compute:Instance")[0].inputs["attachedDisks"] == []
    gcp.delete(urn(INSTANCE), machine_id, machine_made, 0)
    with pytest.raises(WorldError, match="Error deleting instance: googleapi: Error 404: .*notFound"):
        gcp.delete(urn(INSTANCE), machine_id, machine_made, 0)
    gcp.delete(urn(ADDRESS), address_id, address_made, 0)
    gcp.delete(urn(SUBNETWORK), subnet_id, subnet_made, 0)
    assert world.things() == {}


def test_a_refused_deletion_leaves_the_thing(gcp: Provider, world: World) -> None:
    world.inject({"compute:Disk": "kept"})
    own_id, made = gcp.create(urn(DISK), DISK_INPUTS, 0)
    with pytest.raises(WorldError, match="Error 400: .*resourceInUseByAnotherResource"):
        gcp.delete(urn(DISK), own_id, made, 0)
    assert world.things()


def test_the_old_one_goes_first_where_the_provider_could_have_given_the_name(gcp: Provider) -> None:
    repository = urn("gcp:artifactregistry/repository:Repository")
    assert gcp.old_first(urn(DISK), ["zone"], ["zone"])
    assert not gcp.old_first(urn(DISK), ["name"], ["name"])
    assert not gcp.old_first(urn(DISK), ["size"], [])
    assert not gcp.old_first(repository, ["location"], ["location"])


def test_the_cleanup_policies_of_a_repository_come_back_sorted_by_their_ids(gcp: Provider) -> None:
    token = "gcp:artifactregistry/repository:Repository"
    policies = [{"id": "keep"}, {"id": "delete"}]
    inputs = {"repositoryId": "r", "project": "p", "location": "us-central1", "cleanupPolicies": policies}
    own_id, made = gcp.create(urn(token), inputs, 0)
    found = gcp.read(urn(token), own_id, inputs)
    assert found is not None and found[0]["cleanupPolicies"] == policies[::-1] == made["cleanupPolicies"]


def test_an_id_is_made_of_the_name_where_a_link_is_given(gcp: Provider) -> None:
    router = "projects/p/regions/us-central1/routers/r"
    inputs = {"name": "nat", "project": "p", "region": "us-central1", "router": router}
    assert gcp.create(urn("gcp:compute/routerNat:RouterNat"), inputs, 0)[0] == "p/us-central1/r/nat"


def test_several_that_make_things_at_once_lose_none(world: World) -> None:
    def add(thread: int) -> None:
        for number in range(10):
            mine = World(path=world.path)
            mine.add(Thing(type=NETWORK, id=f"{thread}-{number}-{mine.number()}", inputs={}, outputs={}))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({thing.id.rpartition("-")[2] for thing in world.things().values()}) == 80


def test_without_a_world_things_are_checked_but_not_made() -> None:
    bare = Provider(settings=Settings(project="p"), world_file=None)
    assert check(bare, NETWORK, {"name": "n"})[1] == []
    with pytest.raises(WorldError, match=provider.WORLD_VARIABLE):
        bare.create(urn(NETWORK), {"name": "n", "project": "p"}, 0)


# --- what goes wrong on purpose -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "said"), [("quota", "quotaExceeded"), ("denied", "forbidden"), ("disabled", "disabled")]
)
def test_a_fault_refuses_its_type_and_no_other(gcp: Provider, world: World, fault: Fault, said: str) -> None:
    world.inject({"compute:Disk": fault})
    with pytest.raises(WorldError, match=f"Error 403.*{said}"):
        gcp.create(urn(DISK), DISK_INPUTS, 0)
    gcp.create(urn(NETWORK), {"name": "n", "project": "p"}, 0)
    assert [short(thing.type) for thing in world.things().values()] == ["compute:Network"]


def test_a_fault_that_there_is_not_is_told(gcp: Provider, world: World) -> None:
    world.inject({"compute:Disk": "qouta"})  # type: ignore[dict-item]
    with pytest.raises(WorldError, match="'qouta' is none; choose one of quota, denied"):
        gcp.create(urn(DISK), DISK_INPUTS, 0)


@pytest.mark.parametrize(("fault", "made"), [("hang-before", False), ("hang-after", True)])
def test_a_creation_that_hangs_has_made_the_thing_or_not(
    gcp: Provider, world: World, fault: Fault, made: bool
) -> None:
    world.inject({"compute:Disk": fault})
    thread = threading.Thread(target=gcp.create, args=(urn(DISK), DISK_INPUTS, 0))
    thread.start()
    if made:
        until(lambda: bool(world.things()))
    assert bool(world.things()) is made and thread.is_alive()
    world.inject({})
    thread.join(10)
    assert not thread.is_alive() and world.things()


# --- TPU VMs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def api() -> Iterator[TpuApi]:
    with TpuApi(capacity={"us-central1-a:v5litepod:on-demand": 16}, delays=Delays().scaled(0.01)) as api:
        yield api


@pytest.fixture
def tpus(api: TpuApi, world: World) -> Provider:
    return Provider(settings=Settings(project="p", tpu_endpoint=f"{api.url}/v2/"), world_file=world.path)


def test_a_tpu_vm_is_a_node_of_the_cloud_tpu_api(tpus: Provider, api: TpuApi) -> None:
    account = {"email": "runner@p.iam.gserviceaccount.com", "scopes": ["cloud-platform"]}
    own_id, made = tpus.create(
        urn(TPU_VM), VM_INPUTS | {"serviceAccount": account, "labels": {"team": "nlp"}}, 30
    )
    assert own_id == VM_ID
    assert (made["state"], len(made["networkEndpoints"])) == ("READY", 4)
    assert made["effectiveLabels"] == {"team": "nlp", "goog-pulumi-provisioned": "true"}
    (node,) = api.control.alive()["nodes"]
    assert node["name"] == VM_ID
    tpus.delete(urn(TPU_VM), own_id, made, 30)
    assert api.control.alive()["nodes"] == []
    tpus.delete(urn(TPU_VM), own_id, made, 30)


def test_a_tpu_vm_is_changed_in_place(tpus: Provider) -> None:
    tpus.create(urn(TPU_VM), VM_INPUTS, 30)
    after = tpus.update(urn(TPU_VM), VM_ID, VM_INPUTS, VM_INPUTS | {"metadata": {"a": "b"}}, 30)
    assert after["metadata"] == {"a": "b"} and after["state"] == "READY"


def test_no_capacity_is_told_as_the_operations_error_and_nothing_is_left(tpus: Provider, api: TpuApi) -> None:
    api.control.set_capacity("us-central1-a:v5litepod:on-demand", 0)
    with pytest.raises(WorldError, match="Error code 8, message: There is no more capacity"):
        tpus.create(urn(TPU_VM), VM_INPUTS, 30)
    assert api.control.alive()["nodes"] == []


def test_a_429_is_tried_again_silently(tpus: Provider, api: TpuApi) -> None:
    api.control.inject("too-many-requests", "nodes.create", times=2)
    assert tpus.create(urn(TPU_VM), VM_INPUTS, 30)[1]["state"] == "READY"


def test_a_429_that_does_not_end_is_told_a_while_after_the_time_is_over(
    tpus: Provider, api: TpuApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tpu_vm, "IN_FLIGHT_S", 0.6)
    api.control.inject("too-many-requests", "nodes.create", times=1000)
    start = time.monotonic()
    with pytest.raises(WorldError, match="Error creating Vm: googleapi: Error 429"):
        tpus.create(urn(TPU_VM), VM_INPUTS, 0.3)
    assert 0.6 < time.monotonic() - start < 10


def test_other_refusals_are_told_at_once(tpus: Provider) -> None:
    with pytest.raises(WorldError, match="googleapi: Error 400"):
        tpus.create(urn(TPU_VM), VM_INPUTS | {"acceleratorType": "v5litepod-3"}, 30)


def test_a_tpu_vm_that_is_gone_is_read_as_gone_and_one_that_was_taken_says_so(
    tpus: Provider, api: TpuApi
) -> None:
    api.control.set_capacity("us-central1-a:v5litepod:spot", 16)
    tpus.create(urn(TPU_VM), VM_INPUTS | {"schedulingConfig": {"spot": True}}, 30)
    api.control.preempt("tpu")
    found = tpus.read(urn(TPU_VM), VM_ID, VM_INPUTS)
    assert found is not None and found[1]["state"] == "PREEMPTED"
    api.control.vanish("tpu")
    assert tpus.read(urn(TPU_VM), VM_ID, VM_INPUTS) is None


def test_a_service_that_does_not_answer_is_told(world: World) -> None:
    nowhere = Provider(
        settings=Settings(project="p", tpu_endpoint="http://127.0.0.1:9/v2/"), world_file=world.path
    )
    with pytest.raises(WorldError, match="does not answer"):
        nowhere.read(urn(TPU_VM), VM_ID, VM_INPUTS)
    with pytest.raises(WorldError, match="gcp:tpuV2CustomEndpoint"):
        Provider(settings=Settings(project="p"), world_file=world.path).read(urn(TPU_VM), VM_ID, VM_INPUTS)


def test_the_access_token_is_not_kept() -> None:
    settings = Settings.read({"gcp:config:project": "p", "gcp:config:accessToken": "a-secret"})
    assert settings.project == "p" and "a-secret" not in repr(settings)
