"""From a spec to bodies of the API, checked against Google's discovery document, and back."""

import dataclasses
from typing import Any

import pytest
from pulumi.output import Unknown

from infra import queued_resource
from infra.cloud_tpu import tpu_request
from infra.cloud_tpu.tpu_request import SliceSpec
from infra.queued_resource import QueuedResourceArgs
from infra.slice_apis import slice_api
from rehearsal.simulator import discovery
from tests.infra.cloud_tpu.lab import OWNER, wanted_props

DISK = "projects/grant/zones/us-central1-a/disks/data"
RESERVATION = "projects/grant/locations/us-central1-a/reservations/ours"
EVERYTHING: dict[str, Any] = {
    "reservation_name": RESERVATION,
    "capacity": "reserved",
    "guaranteed_s": 86400.0,
    "valid_until_s": 21600.0,
    "network": "projects/grant/global/networks/n",
    "subnetwork": "projects/grant/regions/us-central1/subnetworks/s",
    "service_account_email": "a@grant.iam.gserviceaccount.com",
    "metadata": {"enable-oslogin": "TRUE"},
    "labels": {"team": "nlp"},
    "tags": ["tpu-stack-tpu"],
    "data_disks": [{"source_disk": DISK, "mode": "read-only"}],
    "boot_disk_kms_key": "projects/grant/locations/us-central1/keyRings/r/cryptoKeys/k",
    "description": "of ada",
}


def spec(**more: Any) -> SliceSpec:
    return SliceSpec.from_props(wanted_props(**more))


@pytest.mark.parametrize("node_count", [1, 2])
def test_a_flex_start_body_is_as_v2alpha1_documents_it(node_count: int) -> None:
    flex = spec(capacity="flex-start", run_duration_s=86400.0, node_count=node_count)
    body = tpu_request.queued_resource(flex)
    assert tpu_request.api_version(flex) == "v2alpha1"
    assert discovery.shipped("v2alpha1").wrong("QueuedResource", body) == []
    assert (body["provisioningModel"], body["runDuration"]) == ("FLEX_START", {"maxRunDuration": "86400s"})


def test_a_body_with_everything_is_as_the_api_documents_it() -> None:
    body = tpu_request.queued_resource(spec(**EVERYTHING))
    assert discovery.shipped().wrong("QueuedResource", body) == []
    assert body == {
        "reservationName": RESERVATION,
        "guaranteed": {"minDuration": "86400s"},
        "queueingPolicy": {"validUntilDuration": "21600s"},
        "tpu": {
            "nodeSpec": [
                {
                    "parent": "projects/grant/locations/us-central1-a",
                    "nodeId": "main",
                    "node": {
                        "acceleratorType": "v5litepod-16",
                        "runtimeVersion": "v2-alpha-tpuv5-lite",
                        "networkConfig": {
                            "network": "projects/grant/global/networks/n",
                            "subnetwork": "projects/grant/regions/us-central1/subnetworks/s",
                            "enableExternalIps": False,
                        },
                        "serviceAccount": {
                            "email": "a@grant.iam.gserviceaccount.com",
                            "scope": ["https://www.googleapis.com/auth/cloud-platform"],
                        },
                        "metadata": {"enable-oslogin": "TRUE"},
                        "labels": {"team": "nlp", "tpu-stack-owner": OWNER},
                        "tags": ["tpu-stack-tpu"],
                        "dataDisks": [{"sourceDisk": DISK, "mode": "READ_ONLY"}],
                        "bootDiskConfig": {
                            "customerEncryptionKey": {
                                "kmsKeyName": "projects/grant/locations/us-central1/keyRings/r/cryptoKeys/k"
                            }
                        },
                        "description": "of ada",
                    },
                }
            ]
        },
    }


@pytest.mark.parametrize(
    ("more", "tier", "has", "lacks"),
    [
        ({}, {"spot"}, {"networkConfig": {"enableExternalIps": False}}, "serviceAccount"),
        ({"capacity": "on-demand"}, set(), {"runtimeVersion": "v2-alpha-tpuv5-lite"}, "metadata"),
        ({"capacity": "reserved", "reservation_name": RESERVATION}, {"reservationName"}, {}, "tags"),
        (
            {"accelerator_type": None, "accelerator_generation": "V4", "topology": "2x2x4"}, {"spot"},
            {"acceleratorConfig": {"type": "V4", "topology": "2x2x4"}}, "acceleratorType",
        ),
    ],
)  # fmt: skip
def test_only_what_was_asked_for_is_said_of_tier_and_node(
    more: dict[str, Any], tier: set[str], has: dict[str, Any], lacks: str
) -> None:
    body = tpu_request.queued_resource(spec(**more))
    node = tpu_request.requested_node(body)
    assert set(body) - {"tpu"} == tier
    assert node | has == node and lacks not in node


@pytest.mark.parametrize("node_count", [1.0, 3.0])
def test_several_nodes_are_one_multislice_with_our_name_as_prefix_and_are_read_back(
    node_count: float,
) -> None:
    asked = spec(node_count=node_count)
    body = tpu_request.queued_resource(asked) | {"name": asked.name}
    (node_spec,) = body["tpu"]["nodeSpec"]
    many = {"multisliceParams": {"nodeCount": 3, "nodeIdPrefix": "main"}}
    assert {key: node_spec[key] for key in node_spec if key not in ("parent", "node")} == (
        {"nodeId": "main"} if node_count == 1 else many
    )
    assert asked.node_ids == (("main",) if node_count == 1 else ("main-0", "main-1", "main-2"))
    assert tpu_request.node_ids(body) == asked.node_ids
    for each in (node_spec, node_spec.get("multisliceParams", {})):  # without names: as their queued resource
        each.pop("nodeId", None), each.pop("nodeIdPrefix", None)
    assert tpu_request.node_ids(body) == asked.node_ids


# --- whose it is ---


@pytest.mark.parametrize(
    ("labels", "owner", "ours"),
    [
        ({}, OWNER, False),
        ({"tpu-stack-owner": "other"}, OWNER, False),
        ({"tpu-stack-owner": ""}, "", False),
        ({"tpu-stack-owner": OWNER}, OWNER, True),
    ],
)
def test_what_has_no_owner_is_not_ours(labels: dict[str, str], owner: str, ours: bool) -> None:
    assert tpu_request.is_owned({"labels": labels}, owner) == ours
    assert not tpu_request.is_owned({}, owner)


@pytest.mark.parametrize("project", ["grant", "123456789"])
def test_a_node_belongs_to_its_queued_resource_though_google_writes_the_project_as_a_number(
    project: str,
) -> None:
    name = f"projects/{project}/locations/us-central1-a/queuedResources/main"
    assert tpu_request.belongs_to({"queuedResource": name}, spec())
    assert not tpu_request.belongs_to({"queuedResource": f"{name}-2"}, spec())
    assert not tpu_request.belongs_to({}, spec())


# --- whether it is the same ---


def test_what_was_asked_for_what_google_fills_in_and_full_paths_are_no_difference() -> None:
    everything = spec(**EVERYTHING)
    found = tpu_request.queued_resource(everything)
    assert tpu_request.differences(everything, found, waiting=True) == ()
    short = spec(**(EVERYTHING | {"network": "n", "subnetwork": "s"}))
    assert tpu_request.differences(short, found, waiting=True) == ()
    any_reservation = f"{RESERVATION.rpartition('/')[0]}/-"  # Google names the one that it took
    asked = spec(**(EVERYTHING | {"reservation_name": any_reservation}))
    assert tpu_request.queued_resource(asked)["reservationName"] == any_reservation
    assert tpu_request.differences(asked, found, waiting=True) == ()
    filled = tpu_request.queued_resource(spec())
    node = tpu_request.requested_node(filled)
    node["networkConfig"] |= {"network": "default", "subnetwork": "default"}
    node["acceleratorConfig"] = {"type": "V5LITE_POD", "topology": "4x4"}
    node["serviceAccount"] = {"email": "123-compute@developer.gserviceaccount.com"}
    assert tpu_request.differences(spec(), filled, waiting=True) == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accelerator_type", "v5litepod-8"),
        ("capacity", "spot"),
        ("runtime_version", "tpu-vm-base"),
        ("reservation_name", f"{RESERVATION}-2"),
        ("node_count", 2.0),
        ("guaranteed_s", 3600.0),
        ("network", "m"),
        ("subnetwork", "t"),
        ("service_account_email", "b@grant.iam.gserviceaccount.com"),
        ("data_disks", []),
        ("data_disks", [{"source_disk": DISK, "mode": "read-write"}]),
        ("boot_disk_kms_key", None),
        ("valid_until_s", 3600.0),
        ("valid_until_s", None),
    ],
)
def test_every_property_that_is_another_is_a_difference(name: str, value: Any) -> None:
    found = tpu_request.queued_resource(spec(**EVERYTHING))
    other = spec(**(EVERYTHING | {name: value}))
    assert tpu_request.differences(other, found, waiting=True) == (name,)


def test_a_deadline_counts_only_while_it_waits_and_google_may_show_it_as_a_time() -> None:
    found = tpu_request.queued_resource(spec(valid_until_s=3600.0))
    assert tpu_request.differences(spec(), found, waiting=False) == ()
    shown = tpu_request.queued_resource(spec()) | {
        "createTime": "2026-11-20T10:00:00.5Z",
        "queueingPolicy": {"validUntilTime": "2026-11-20T16:00:00Z"},
    }
    assert tpu_request.differences(spec(valid_until_s=21600.0), shown, waiting=True) == ()
    assert tpu_request.differences(spec(valid_until_s=3600.0), shown, waiting=True) == ("valid_until_s",)


# --- patch ---


def test_a_node_that_is_as_asked_for_is_not_patched_and_the_mask_names_what_the_body_has() -> None:
    everything, plain = (spec(**more) for more in (EVERYTHING, {}))
    as_asked, other = (
        tpu_request.requested_node(tpu_request.queued_resource(each)) for each in (everything, plain)
    )
    assert tpu_request.patch(everything, as_asked, ()) == ("", {})
    mask, body = tpu_request.patch(spec(**EVERYTHING, external_addresses=True), other, ())
    assert mask == "labels,metadata,tags,description,networkConfig.enableExternalIps"
    assert discovery.shipped().wrong("Node", body) == []
    assert body["networkConfig"] == {"enableExternalIps": True}


def test_keys_that_others_have_written_stay_and_ours_go_when_not_asked_for_any_more() -> None:
    was = {"old": "1", "enable-oslogin": "FALSE"}
    of_gcloud = {"ssh-keys": "ada:ssh-ed25519 AAAA"}
    node = tpu_request.requested_node(tpu_request.queued_resource(spec())) | {"metadata": was | of_gcloud}
    patch = tpu_request.patch(spec(metadata={"enable-oslogin": "TRUE"}), node, [{"metadata": was}])
    assert patch == ("metadata", {"metadata": {"enable-oslogin": "TRUE", **of_gcloud}})


# --- what changes and what replaces -----------------------------------------------------------------------------


UNKNOWN = Unknown()  # type: ignore[no-untyped-call]
ACTIVE = {"state": "ACTIVE", "nodes": [], "create_time": "t"}
OTHER: dict[str, Any] = {
    "node_count": 2.0,
    "guaranteed_s": 60.0,
    "data_disks": [{"source_disk": "d", "mode": "read-only"}],
}


def between(state: str, **more: Any) -> tuple[bool | None, list[str]]:
    """Whether anything changes, and what is a reason to replace."""
    found = queued_resource.changes_between(
        {**wanted_props(), **ACTIVE, "state": state}, wanted_props(**more)
    )
    assert found.delete_before_replace
    return found.changes, found.replaces or []


def test_every_property_is_either_changed_in_place_or_replaces() -> None:
    names = {field.name for field in dataclasses.fields(QueuedResourceArgs)}
    in_place, replacing = queued_resource.IN_PLACE, queued_resource.REPLACING
    assert names == {*replacing, *in_place, queued_resource.TIMING}
    assert not in_place & {*replacing}


@pytest.mark.parametrize("name", queued_resource.REPLACING)
def test_what_cannot_change_in_place_replaces(name: str) -> None:
    assert between("ACTIVE", **{name: OTHER.get(name, "another")}) == (True, [name])


LOST = ("SUSPENDING", "SUSPENDED", "FAILED", "DELETING", "PREEMPTED", "TERMINATED", "MISSING")
DEFAULTS = {"labels": {}, "tags": [], "description": "", "external_addresses": False, "node_count": 1}


@pytest.mark.parametrize(
    ("state", "more", "changes", "replaces"),
    [
        ("ACTIVE", {}, False, []),
        # Absent, empty and the default are the same.
        ("ACTIVE", DEFAULTS, False, []),
        ("ACTIVE", {"labels": {"a": "b"}}, True, []),
        ("ACTIVE", {"metadata": {"a": "b"}}, True, []),
        ("ACTIVE", {"tags": ["a"]}, True, []),
        ("ACTIVE", {"description": "a"}, True, []),
        ("ACTIVE", {"external_addresses": True}, True, []),
        ("ACTIVE", {"wait_s": 7200.0}, True, []),
        # What still waits is waited for by an update.
        *((state, {}, True, []) for state in ("ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "UNREAD")),
        *((state, {}, True, ["state"]) for state in LOST),
        # A deadline matters only to what still waits.
        ("ACTIVE", {"valid_until_s": 60.0}, True, []),
        ("WAITING_FOR_RESOURCES", {"valid_until_s": 60.0}, True, ["valid_until_s"]),
        # What is not known yet may be another.
        ("ACTIVE", {"network": UNKNOWN}, True, ["network"]),
        ("ACTIVE", {"labels": {"a": UNKNOWN}}, True, []),
    ],
)
def test_what_changes_and_what_replaces_follows_from_state_and_properties(
    state: str, more: dict[str, Any], changes: bool, replaces: list[str]
) -> None:
    assert between(state, **more) == (changes, replaces)


# --- what states come to ----------------------------------------------------------------------------------------


NODE_STATES = (
    "READY", "REPAIRING", "RESTARTING", "REIMAGING", "STOPPED", "STARTING", "HIDDEN", "UNKNOWN", "CREATING",
)  # fmt: skip
ALL_STATES = discovery.shipped().schemas["QueuedResourceState"]["properties"]["state"]["enum"]
NEVER_SERVED_AGAIN = {"SUSPENDING", "SUSPENDED", "FAILED", "DELETING"}


def queued(state: str, **more: Any) -> dict[str, Any]:
    return {"state": {"state": state, **more}}


def test_what_has_not_been_served_waits_and_so_does_what_nobody_knows_yet() -> None:
    assert slice_api.ACTIVE in ALL_STATES and set(ALL_STATES) > NEVER_SERVED_AGAIN
    for state in (*ALL_STATES, "BRAND_NEW"):
        look = tpu_request.look(queued(state), {})
        lost, active = state in NEVER_SERVED_AGAIN, state == "ACTIVE"
        assert (look.kind, look.state) == ("lost" if lost else "active" if active else "waiting", state)
        assert slice_api.state_kind(state) == look.kind
    assert tpu_request.look({}, {}).kind == "waiting"


@pytest.mark.parametrize(
    ("nodes", "kind", "state", "may_be_running"),
    [
        # Nodes that may come back are no loss.
        *(({"a": {"state": state}}, "active", "ACTIVE", True) for state in NODE_STATES),
        *(
            ({"a": {"state": "READY"}, "b": {"state": state}}, "lost", state, False)
            for state in ("PREEMPTED", "TERMINATED", "DELETING")
        ),
        # One that says that it is over counts more than one that is missing, and others may run beside that.
        ({"a": None, "b": {"state": "PREEMPTED"}}, "lost", "PREEMPTED", False),
        ({"a": None, "b": {"state": "READY"}}, "lost", "MISSING", True),
        ({"a": None}, "lost", "MISSING", False),
    ],
)
def test_an_active_one_is_what_its_worst_node_is(
    nodes: dict[str, Any], kind: str, state: str, may_be_running: bool
) -> None:
    look = tpu_request.look(queued("ACTIVE"), nodes)
    assert (look.kind, look.state, look.may_be_running) == (kind, state, may_be_running)
    assert (f"is {state}" in look.reason) == (kind == "lost" and state != "MISSING")


def test_the_reason_of_a_loss_is_told() -> None:
    failed = queued("FAILED", failedData={"error": {"code": 9, "message": "no such network"}})
    assert tpu_request.look(failed, {}).reason == "it is FAILED: no such network"
    suspended = queued("SUSPENDED", stateInitiator="USER")
    assert tpu_request.look(suspended, {}).reason == "it is SUSPENDED by a user"
