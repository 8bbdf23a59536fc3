"""Google Cloud through this machine's credentials, each answer of which is a finding and none a hang or a token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import google.auth.exceptions
import pytest

from contracts.inventory import Host, Inventory, Slice, Storage
from launch.doctor import google_cloud
from launch.doctor.workstation import Answer, Machine

MakeMachine = Callable[..., Machine]
SLICE = Slice(
    name="s", accelerator_type="v5litepod-16", generation="v5e", topology="4x4", zone="europe-west4-b",
    capacity="spot", origin="queued-resource q", count=1, devices_per_host=4, hosts=(),
)  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ("ACTIVE\n", "ok"),
        ("SUSPENDED\n", "fail"),
        ("FAILED", "fail"),
        ("WAITING_FOR_RESOURCES", "warn"),
        ("", "warn"),
        (Answer(exit_code=1, stderr="ERROR: NOT_FOUND: no such thing"), "fail"),
        (Answer(exit_code=1, stderr="ERROR: no credentials"), "warn"),
        (Answer(exit_code=None), "skip"),
    ],
)
def test_a_slice_that_is_gone_or_suspended_is_a_failure_and_one_that_waits_is_not(
    make_machine: MakeMachine, answer: Answer | str, state: str
) -> None:
    machine = make_machine({"gcloud compute tpus queued-resources describe q --zone=europe-west4-b": answer})
    said = google_cloud.queued_resource(machine.ask, "p", SLICE)
    assert said.state == state
    assert state != "fail" or "fab recover" in said.remedy


def refusing(error: Exception) -> Callable[[], Any]:
    def credentials() -> Any:
        raise error

    return credentials


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (google.auth.exceptions.DefaultCredentialsError("none"), "fail"),  # type: ignore[no-untyped-call]
        (google.auth.exceptions.RefreshError("expired"), "fail"),  # type: ignore[no-untyped-call]
        (google.auth.exceptions.TransportError("no route"), "warn"),  # type: ignore[no-untyped-call]
    ],
)
def test_missing_and_refused_credentials_are_told_apart_from_a_network_that_is_away(
    monkeypatch: pytest.MonkeyPatch, error: Exception, state: str
) -> None:
    monkeypatch.setattr(google_cloud, "_credentials", refusing(error))
    assert google_cloud.default_credentials({}).state == state


def test_no_token_is_in_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    class Credentials:
        token = "ya29.secret"

    monkeypatch.setattr(google_cloud, "_credentials", lambda: (Credentials(), "p"))
    said = google_cloud.default_credentials({})
    assert said.state == "ok" and "ya29" not in said.message


def test_a_rehearsal_needs_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(google_cloud, "_credentials", refusing(AssertionError()))
    environ = {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:1"}
    assert google_cloud.default_credentials(environ).state == "skip"
    assert [said.state for said in google_cloud.roles("p", environ)] == ["skip"]


def test_a_role_that_is_missing_is_named_and_one_that_cannot_be_asked_for_is_no_failure() -> None:
    def has(*names: str) -> google_cloud.Test:
        def test(project: str, wanted: Sequence[str]) -> Sequence[str]:
            return [name for name in wanted if name in names]

        return test

    assert [said.state for said in google_cloud.roles("p", {}, has(*google_cloud.PERMISSIONS))] == ["ok"]
    (lacking,) = google_cloud.roles("p", {}, has("compute.instances.osLogin"))
    assert lacking.state == "warn" and "roles/iap.tunnelResourceAccessor" in lacking.remedy

    def refused(project: str, wanted: Sequence[str]) -> Sequence[str]:
        raise RuntimeError("403")

    assert [said.state for said in google_cloud.roles("p", {}, refused)] == ["warn"]


HOSTS = tuple(
    Host(
        index=index, name=f"w-{index}", internal_address="10.0.0.1", external_address=None, user=None,
        host_keys=("ssh-ed25519 AAAA",), reach="iap",
    )
    for index in range(4)
)  # fmt: skip
SLICE_STACK = Slice(
    name="s", accelerator_type="v5litepod-16", generation="v5e", topology="4x4", zone="europe-west4-b",
    capacity="spot", origin="queued-resource q", count=1, devices_per_host=4, hosts=HOSTS,
)  # fmt: skip
INVENTORY = Inventory(
    stack="dev",
    project="p",
    storage=Storage(bucket_url="gs://b", bucket_region="EUROPE-WEST4", nfs_source=None, nfs_mount=None),
    images={"jax": "europe-west4-docker.pkg.dev/p/r/jax@sha256:00"},
    gateway=None,
    slices=(SLICE_STACK,),
)


def test_a_stack_whose_parts_are_all_in_one_region_is_well() -> None:
    said = [*google_cloud.slice_in_use(INVENTORY, SLICE_STACK), *google_cloud.regions(INVENTORY, SLICE_STACK)]
    assert {each.state for each in said} == {"ok"}
    assert any("USD an hour" in each.message for each in said)


@pytest.mark.parametrize(
    ("region", "words"), [("US-CENTRAL1", "in us-central1, the TPUs"), ("EU", "in the multi-region eu")]
)
def test_a_bucket_elsewhere_is_told_of_with_what_it_costs(region: str, words: str) -> None:
    storage = dataclasses.replace(INVENTORY.storage, bucket_region=region)
    said = google_cloud.regions(dataclasses.replace(INVENTORY, storage=storage), SLICE_STACK)[0]
    assert said.state == "warn" and words in said.message and "billed" in said.remedy


def test_an_image_elsewhere_or_named_by_a_tag_is_told_of() -> None:
    images = {"jax": "us-docker.pkg.dev/p/r/jax:latest"}
    said = google_cloud.regions(dataclasses.replace(INVENTORY, images=images), SLICE_STACK)
    assert [each.state for each in said] == ["ok", "warn", "warn"]
    assert "digest" in said[2].remedy


def test_hosts_that_are_missing_or_have_no_key_are_told_of() -> None:
    nameless = dataclasses.replace(HOSTS[0], host_keys=())
    few = dataclasses.replace(SLICE_STACK, hosts=(nameless, HOSTS[1]))
    messages = [each.message for each in google_cloud.slice_in_use(INVENTORY, few) if each.state == "warn"]
    assert messages[0] == "v5litepod-16 has 4 hosts, the inventory has 2"
    assert messages[1].startswith("no host key is known of host 0")


def test_machines_that_are_none_of_googles_have_no_price_and_no_region() -> None:
    own = dataclasses.replace(SLICE_STACK, accelerator_type="workstation", zone="under my desk")
    said = [*google_cloud.slice_in_use(INVENTORY, own), *google_cloud.regions(INVENTORY, own)]
    assert [each.state for each in said] == ["ok", "skip"]
