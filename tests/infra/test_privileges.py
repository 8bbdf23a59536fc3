"""Who may do what: the hosts' account the bucket and the images, people the tunnel and their own account."""

from __future__ import annotations

from typing import Any

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
