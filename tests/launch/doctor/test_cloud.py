"""Google Cloud through this machine's credentials, each answer of which is a finding and none a hang or a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import google.auth.exceptions
import pytest

from contracts.inventory import Slice
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
