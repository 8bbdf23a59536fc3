"""The stand-in for the gcp provider: what it takes, what it refuses, and what there is afterwards."""

import re
from pathlib import Path

import pytest

from contracts.aliases import Json
from rehearsal.gcp_stand_in import arguments
from rehearsal.gcp_stand_in.arguments import UNKNOWN
from rehearsal.gcp_stand_in.provider import Provider
from rehearsal.gcp_stand_in.stand_in_world import World
from rehearsal.gcp_stand_in.table import KINDS

NETWORK = "gcp:compute/network:Network"
DISK = "gcp:compute/disk:Disk"
BUCKET = "gcp:storage/bucket:Bucket"
NODE_POOL = "gcp:container/nodePool:NodePool"
TPU_VM = "gcp:tpu/v2Vm:V2Vm"
SUBNETWORK = "gcp:compute/subnetwork:Subnetwork"

DISK_INPUTS: Json = {"name": "d", "project": "p", "zone": "us-central1-a", "size": 10}
VM_INPUTS: Json = {
    "name": "tpu",
    "project": "p",
    "zone": "us-central1-a",
    "acceleratorType": "v5litepod-16",
    "runtimeVersion": "v2-alpha-tpuv5-lite",
}


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
