"""What is said of a slice that may not come, or not come again."""

from __future__ import annotations

import pytest

from infra import catalogue
from infra.config import Allowances
from infra.policy import supply
from tests.infra.policy.stacks import a_grant, a_slice, a_stack, an_nfs, only


def test_a_zone_that_lists_the_type_is_no_finding() -> None:
    assert supply.findings(a_stack()) == ()


def test_a_zone_that_does_not_list_the_type_is_refused_with_those_that_do() -> None:
    finding = only(supply.findings(a_stack(a_slice(accelerator="v5p-8", zone="us-central1-b"))))
    assert (finding.severity, str(finding)) == (
        "error",
        (
            "tpu-stack:slices[0].zone: us-central1-b does not list v5p-8; these do: us-central1-a, us-east5-a, "
            "europe-west4-b; if that is meant, set tpu-stack:allow-unlisted: true"
        ),
    )


def test_a_slice_is_not_listed_where_only_its_single_host_is() -> None:
    (one_host,) = supply.findings(a_stack(a_slice(accelerator="v2-8", zone="us-central1-b")))
    assert "does not list" not in one_host.message
    finding, _ = supply.findings(a_stack(a_slice(accelerator="v2-32", zone="us-central1-b")))
    assert "these do: us-central1-a, europe-west4-a" in finding.message


@pytest.mark.parametrize(("accelerator", "warned"), [("v2-8", True), ("v3-8", True), ("v4-8", False)])
def test_v2_and_v3_get_a_warning_that_today_s_jax_may_not_start_there(accelerator: str, warned: bool) -> None:
    zone = catalogue.accelerator(accelerator).zones[0]
    found = supply.findings(a_stack(a_slice(accelerator=accelerator, zone=zone)))
    assert [(each.severity, "JAX may fail" in each.message) for each in found] == [("warning", True)] * warned


def test_an_ai_zone_gets_a_warning_of_what_it_takes() -> None:
    found = only(supply.findings(a_stack(a_slice(accelerator="v6e-8", zone="us-south1-ai1b"))))
    assert (found.severity, found.path) == ("warning", "tpu-stack:slices[0].zone")
    assert "reserved there" in found.message


def test_what_is_taken_although_it_is_not_known_is_warned_of_one_by_one() -> None:
    config = a_stack(
        a_slice(runtime_version="tpu-ubuntu2204-bas"),
        region="us-centrall1",
        nfs=an_nfs("us-central2-b", machine_type="e2-small"),
        grant=(a_grant(64, zone="us-centrall1-a"),),
    )
    found = supply.findings(config)
    assert {each.severity for each in found} == {"warning"}
    assert [each.path.removeprefix("tpu-stack:") for each in found] == [
        "slices[0].runtime-version",
        "grant[0].zone",
        "storage.bucket.region",
        "storage.nfs.machine-type",
        "images.region",
    ]


def test_allowing_an_unlisted_zone_leaves_a_warning() -> None:
    allow = Allowances(unlisted=True, billable=False, cross_region=False)
    finding = only(supply.findings(a_stack(a_slice(zone="us-west4-b"), allow=allow)))
    assert finding.severity == "warning"
    assert "does not list v5litepod-16" in finding.message
    assert "allow-unlisted" not in finding.message


def test_a_slice_is_named_by_its_place() -> None:
    finding = only(supply.findings(a_stack(a_slice("a"), a_slice("b", zone="us-west4-b"))))
    assert finding.path == "tpu-stack:slices[1].zone"


@pytest.mark.parametrize(
    ("wait_s", "said"), [(900, "15m"), (7200, "2h"), (86400, "1d"), (5400, "90m"), (61, "61s")]
)
def test_direct_warns_that_a_refused_quota_looks_like_a_hang_and_where_to_look(
    wait_s: int, said: str
) -> None:
    config = a_stack(a_slice(capacity="on-demand", provisioning="direct", wait_s=wait_s))
    finding = only(supply.findings(config))
    assert (finding.severity, finding.path) == ("warning", "tpu-stack:slices[0].provisioning")
    for part in ("429", f"until wait, {said},", "quotas of Cloud TPU API", "project my-project"):
        assert part in finding.message


def test_direct_spot_warns_that_a_preempted_node_is_not_made_again() -> None:
    _, finding = supply.findings(a_stack(a_slice(provisioning="direct")))
    assert (finding.severity, finding.path) == ("warning", "tpu-stack:slices[0].provisioning")
    assert "preempted is not made again" in finding.message


@pytest.mark.parametrize(
    ("accelerator", "notes"), [("v5litepod-32", 0), ("v5litepod-64", 1), ("v5litepod-256", 1)]
)
def test_64_spot_chips_at_once_get_a_note_that_they_seldom_come(accelerator: str, notes: int) -> None:
    findings = supply.findings(a_stack(a_slice(accelerator=accelerator)))
    assert [each.severity for each in findings] == ["note"] * notes


def test_the_note_counts_chips_of_one_slice_not_cores_nor_all_slices() -> None:
    assert supply.findings(a_stack(a_slice(accelerator="v5litepod-32", count=8))) == ()
    assert supply.findings(a_stack(a_slice(accelerator="v4-64", zone="us-central2-b"))) == ()
    assert supply.findings(a_stack(a_slice(accelerator="v5litepod-64", capacity="on-demand"))) == ()
