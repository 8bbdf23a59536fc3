"""What the keeper is given of the cloud, and that without it nothing is declared that is its."""

import json
from typing import Any

import pytest

from contracts import inventory
from infra import control_folder
from infra.cloud_tpu.tpu_request import SliceSpec
from tests.infra.conftest import BOTH_KINDS, SHAPES, Declare, Declared, Resource

KEEPER = "serviceAccount:tpu-stack-dev-keeper@my-project.iam.gserviceaccount.com"
ROLE = "projects/my-project/roles/tpuStackKeeper_0123abcd"
WITH_BUCKET = {name: shape for name, shape in SHAPES.items() if name != "no storage at all"}


def by_urn(declared: Declared) -> dict[str, Resource]:
    return {each.urn: each for each in declared.resources if each.kind != "pulumi:pulumi:Stack"}


@pytest.mark.parametrize("shape", WITH_BUCKET.values(), ids=list(WITH_BUCKET))
def test_without_the_keeper_the_stack_is_what_it_is_with_it_less_the_keepers_own_resources(
    declare: Declare, shape: dict[str, Any]
) -> None:
    """So a stack that does not ask for it has no account, role, rule or object of it, and no input that names it."""
    without, with_it = by_urn(declare(**shape)), by_urn(declare(**shape, keeper=True))
    gateway = any("Gateway" in each for each in without)
    added = sorted(with_it[urn].kind.rpartition(":")[2] for urn in set(with_it) - set(without))
    on_the_gateway = [
        "Account", "BucketIAMMember", "BucketIAMMember", "Firewall", "IAMCustomRole", "IAMMember", "IAMMember",
        "KeeperAccount",
    ]  # fmt: skip
    assert added == (on_the_gateway if gateway else [])
    assert set(without) <= set(with_it)
    changed = {
        (each.kind.rpartition(":")[2], name)
        for urn, each in without.items()
        for name in {*each.inputs, *with_it[urn].inputs}
        if each.inputs.get(name) != with_it[urn].inputs.get(name)
    }
    assert not declare(**shape).inventory.has_keeper
    # The inventory in the specification says that there is a keeper.
    assert changed == {("BucketObject", "content"), *([("Instance", "serviceAccount")] if gateway else [])}


def test_the_keeper_may_make_and_remove_tpus_be_root_on_hosts_use_the_bucket_and_named_secrets_and_nothing_else(
    declare: Declare,
) -> None:
    root = "user:root@example.com"
    access = {"members": ["user:ada@example.com"], "administrators": [root]}
    declared = declare(
        keeper=True, notify={"slack": "slack", "webhook": "slack", "smtp": "mail"}, access=access
    )
    assert declared.one("IAMCustomRole").inputs["roleId"] == ROLE.rpartition("/")[2]
    assert declared.one("IAMCustomRole").inputs["permissions"] == [
        "compute.instances.osAdminLogin", "compute.instances.osLogin", "tpu.nodes.create", "tpu.nodes.delete",
        "tpu.nodes.get", "tpu.nodes.list", "tpu.nodes.update", "tpu.operations.get",
    ]  # fmt: skip
    there = {"name": "c", "accelerator": "v6e-16", "zone": "us-east5-a", "provisioning": "compute"}
    on_compute = declare(keeper=True, slices=[there], zone="us-east5-a").one("IAMCustomRole").inputs
    assert "compute.instanceGroupManagers.create" in on_compute["permissions"]
    bindings = [each for each in declared.resources if each.inputs.get("member") == KEEPER]
    on = {
        (each.inputs.get(place), each.inputs["role"])
        for each in bindings
        for place in ("bucket", "secretId", "serviceAccountId", "project")
        if each.inputs.get(place) and (place != "project" or "secretId" not in each.inputs)
    }
    accounts = "projects/my-project/serviceAccounts"
    hosts = f"{accounts}/tpu-stack-dev@my-project.iam.gserviceaccount.com"
    assert on == {
        ("my-project-dev-tpu-stack", "roles/storage.objectUser"),
        ("my-project-dev-tpu-stack", "roles/storage.legacyBucketReader"),
        ("slack", "roles/secretmanager.secretAccessor"),
        ("mail", "roles/secretmanager.secretAccessor"),
        (hosts, "roles/iam.serviceAccountUser"),
        ("my-project", ROLE),
    }
    # Who may run programs on the gateway has the keeper's rights: administrators, and no member.
    (own,) = [each for each in declared.all("Account") if each.name == "keeper"]
    uses = {
        each.inputs["member"]
        for each in declared.all("serviceaccount/iAMMember:IAMMember")
        if own.inputs["accountId"] in each.inputs["serviceAccountId"]
    }
    assert uses == {root}
    services = {each.inputs["service"] for each in declared.all("projects/service:Service")}
    assert "secretmanager.googleapis.com" in services


@pytest.mark.parametrize("keeper", [False, True])
def test_a_host_may_not_touch_the_control_documents(declare: Declare, keeper: bool) -> None:
    """Else a job could write the queue, and `fab queue work` would run its code as whoever typed that."""
    hosts = [each.inputs for each in declare(keeper=keeper).all("BucketIAMMember") if each.name == "objects"]
    (binding,) = hosts
    control_folder = "projects/_/buckets/my-project-dev-tpu-stack/objects/control/"
    assert binding["condition"]["expression"] == f'!resource.name.startsWith("{control_folder}")'


def test_the_gateway_runs_as_the_keeper_and_reaches_port_22_of_the_hosts(declare: Declare) -> None:
    declared = declare(keeper=True)
    machine = declared.one("compute/instance:Instance").inputs
    assert f"serviceAccount:{machine['serviceAccount']['email']}" == KEEPER
    rule = {each.name: each.inputs for each in declared.all("Firewall")}["keeper-ssh"]
    assert rule["sourceTags"] == ["tpu-stack-dev-gateway"] and "sourceRanges" not in rule
    assert rule["targetTags"] == ["tpu-stack-dev-host"]
    assert rule["allows"] == [{"protocol": "tcp", "ports": ["22"]}]


@pytest.mark.parametrize(
    "keeper", [{}, {"keeper": True, "notify": {"smtp": "mail"}}], ids=["alone", "keeper"]
)
def test_the_specification_has_what_a_slice_is_made_of_and_depends_on_no_slice(
    declare: Declare, keeper: dict[str, Any]
) -> None:
    """Were it to wait for slices, `pulumi destroy` would delete it last, and others make again what was deleted."""
    declared = declare(slices=BOTH_KINDS, **keeper)
    described = declared.one("BucketObject")
    assert (described.inputs["bucket"], described.inputs["name"]) == (
        "my-project-dev-tpu-stack",
        "control/stack.json",
    )
    slices = {each.urn for kind in ("QueuedResource", "V2Vm", "TpuSlice") for each in declared.all(kind)}
    assert not slices & declared.needs(described)
    assert all(described.urn not in declared.needs(each) for each in declared.resources)
    # The provider takes the content of any object for a secret.
    found = json.loads(described.inputs["content"]["value"])
    queued = declared.one("QueuedResource")
    assert list(found["slices"]) == ["q"]
    assert SliceSpec.from_props(found["slices"]["q"]) == SliceSpec.from_props(queued.inputs)
    assert found["slices"]["q"]["lease_url"] == "gs://my-project-dev-tpu-stack/control/leases/q.json"
    assert found["owner"] == "0123abcd"
    mail = {"TPU_STACK_SMTP": "secret:projects/my-project/secrets/mail"}
    assert found["environment"] == (mail if keeper else {})
    vacant = inventory.from_json(found["inventory"])
    made = declared.inventory
    assert [each.origin for each in vacant.slices] == [each.origin for each in made.slices]
    assert not any(each.hosts for each in vacant.slices)
    assert made.control == vacant.control == "gs://my-project-dev-tpu-stack/control"
    assert made.has_keeper == vacant.has_keeper == bool(keeper)
    assert (vacant.gateway, vacant.storage, vacant.project) == (made.gateway, made.storage, made.project)


def test_a_variable_of_a_channel_is_one_that_notifications_are_sent_by(declare: Declare) -> None:
    notify = pytest.importorskip("console.notify")
    assert set(control_folder.CHANNELS.values()) == set(notify.VARIABLES.values())
