"""What a configuration reads across regions, may not get, opens to others, or lets be lost, is said or refused."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from infra import catalogue
from infra.config import AccessConfig, Allowances, NetworkConfig
from infra.policy import billing, egress, risks
from tests.infra.policy.stacks import a_grant, a_slice, a_stack, an_nfs, only

# --- reading across regions -------------------------------------------------------------------------------------


EUROPEAN = a_slice("eu", zone="europe-west4-b")
ACROSS = Allowances(unlisted=False, billable=False, cross_region=True)


def test_everything_in_one_region_and_zone_costs_nothing() -> None:
    assert egress.findings(a_stack()) == ()


def test_a_bucket_in_another_region_is_refused_with_the_price_of_a_tb() -> None:
    config = a_stack(a_slice())
    assert config.bucket is not None
    config = dataclasses.replace(config, bucket=dataclasses.replace(config.bucket, region="us-west4"))
    finding = only(egress.findings(config))
    assert (finding.severity, str(finding)) == (
        "error",
        (
            'tpu-stack:storage.bucket.region: bucket "my-project-dev-tpu-stack" is in us-west4, slice "main" in '
            "us-central1: reading it from there costs about 19 USD per TB (within North America, 0.02 USD per GiB); "
            "put it into that region; if that is meant, set tpu-stack:allow-cross-region: true"
        ),
    )


def test_images_in_another_region_are_refused() -> None:
    config = a_stack(a_slice())
    config = dataclasses.replace(config, images=dataclasses.replace(config.images, region="europe-west4"))
    finding = only(egress.findings(config))
    assert (finding.severity, finding.path) == ("error", "tpu-stack:images.region")
    assert "from Europe to North America, 0.08 USD per GiB" in finding.message


@pytest.mark.parametrize("kind", ["gateway", "filestore"])
def test_nfs_in_another_region_is_refused(kind: str) -> None:
    finding = only(egress.findings(a_stack(a_slice(), nfs=an_nfs("us-east1-d", kind=kind))))
    assert (finding.severity, finding.path) == ("error", "tpu-stack:storage.nfs.zone")


def test_nfs_in_another_zone_of_the_region_is_a_note_with_its_price() -> None:
    finding = only(egress.findings(a_stack(a_slice(), nfs=an_nfs("us-central1-b"))))
    assert (finding.severity, finding.path) == ("note", "tpu-stack:storage.nfs.zone")
    assert 'slice "main" in another zone' in finding.message
    assert "about 9 USD per TB (0.01 USD per GiB)" in finding.message


def test_slices_in_two_regions_are_told_which_of_them_read_across() -> None:
    config = a_stack(a_slice("here"), EUROPEAN, a_slice("too", zone="europe-west4-a"), nfs=None)
    bucket, images = egress.findings(config)
    assert 'slices "eu", "too" in europe-west4' in bucket.message
    assert '"here"' not in bucket.message
    assert "give the slices of each region a stack of their own" in bucket.message
    assert images.path == "tpu-stack:images.region"


def test_each_region_that_reads_across_has_its_own_price() -> None:
    config = a_stack(a_slice("far", zone="asia-east1-c"), EUROPEAN, region="us-east1", nfs=None)
    assert [each.path for each in egress.findings(config)] == [
        "tpu-stack:storage.bucket.region",
        "tpu-stack:storage.bucket.region",
        "tpu-stack:images.region",
        "tpu-stack:images.region",
    ]


def test_no_bucket_and_no_nfs_leave_only_the_images_to_be_read_across() -> None:
    config = a_stack(EUROPEAN, bucket=None, nfs=None)
    assert only(egress.findings(config)).path == "tpu-stack:images.region"


def test_allowing_it_leaves_the_same_figure_as_a_warning() -> None:
    refused = egress.findings(a_stack(EUROPEAN))
    allowed = egress.findings(a_stack(EUROPEAN, allow=ACROSS))
    assert {each.severity for each in allowed} == {"warning"}
    assert [each.message for each in allowed] == [
        each.message.removesuffix("; if that is meant, set tpu-stack:allow-cross-region: true")
        for each in refused
    ]


@pytest.mark.parametrize(
    ("source", "destination", "usd_per_gib"),
    [
        ("us-central1", "us-central1", 0.0),
        ("us-central1", "northamerica-northeast1", 0.02),
        ("europe-west1", "europe-west4", 0.02),
        ("asia-east1", "asia-northeast1", 0.08),
        ("southamerica-east1", "southamerica-west1", 0.08),
        ("us-central1", "europe-west4", 0.08),
        ("us-central1", "australia-southeast1", 0.15),
        ("asia-southeast2", "asia-east1", 0.15),
        ("africa-south1", "us-central1", None),
        ("me-west1", "me-central1", None),
    ],
)
def test_the_price_between_two_regions_follows_their_continents(
    source: str, destination: str, usd_per_gib: float | None
) -> None:
    assert egress.usd_per_gib(source, destination) == usd_per_gib
    assert egress.usd_per_gib(destination, source) == usd_per_gib


def test_another_region_is_never_free() -> None:
    for source, destination in itertools.permutations(billing.REGIONAL, 2):
        price = egress.usd_per_gib(source, destination)
        assert price is not None
        assert 0.01 <= price <= 0.15, (source, destination)


def test_a_price_that_is_not_known_is_called_so() -> None:
    assert "not known" in egress.estimate("africa-south1", "us-central1")


# --- slices that may not come -----------------------------------------------------------------------------------


def test_a_zone_that_lists_the_type_is_no_finding() -> None:
    assert risks.supply(a_stack()) == ()


def test_a_zone_that_does_not_list_the_type_is_refused_with_those_that_do() -> None:
    finding = only(risks.supply(a_stack(a_slice(accelerator="v5p-8", zone="us-central1-b"))))
    assert (finding.severity, str(finding)) == (
        "error",
        (
            "tpu-stack:slices[0].zone: us-central1-b does not list v5p-8; these do: us-central1-a, us-east5-a, "
            "europe-west4-b; if that is meant, set tpu-stack:allow-unlisted: true"
        ),
    )


def test_a_slice_is_not_listed_where_only_its_single_host_is() -> None:
    (one_host,) = risks.supply(a_stack(a_slice(accelerator="v2-8", zone="us-central1-b")))
    assert "does not list" not in one_host.message
    finding, _ = risks.supply(a_stack(a_slice(accelerator="v2-32", zone="us-central1-b")))
    assert "these do: us-central1-a, europe-west4-a" in finding.message


@pytest.mark.parametrize(("accelerator", "warned"), [("v2-8", True), ("v3-8", True), ("v4-8", False)])
def test_v2_and_v3_get_a_warning_that_today_s_jax_may_not_start_there(accelerator: str, warned: bool) -> None:
    zone = catalogue.accelerator(accelerator).zones[0]
    found = risks.supply(a_stack(a_slice(accelerator=accelerator, zone=zone)))
    assert [(each.severity, "JAX may fail" in each.message) for each in found] == [("warning", True)] * warned


def test_an_ai_zone_gets_a_warning_of_what_it_takes() -> None:
    found = only(risks.supply(a_stack(a_slice(accelerator="v6e-8", zone="us-south1-ai1b"))))
    assert (found.severity, found.path) == ("warning", "tpu-stack:slices[0].zone")
    assert "reserved there" in found.message


def test_what_is_taken_although_it_is_not_known_is_warned_of_one_by_one() -> None:
    config = a_stack(
        a_slice(runtime_version="tpu-ubuntu2204-bas"),
        region="us-centrall1",
        nfs=an_nfs("us-central2-b", machine_type="e2-small"),
        grant=(a_grant(64, zone="us-centrall1-a"),),
    )
    found = risks.supply(config)
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
    finding = only(risks.supply(a_stack(a_slice(zone="us-west4-b"), allow=allow)))
    assert finding.severity == "warning"
    assert "does not list v5litepod-16" in finding.message
    assert "allow-unlisted" not in finding.message


def test_a_slice_is_named_by_its_place() -> None:
    finding = only(risks.supply(a_stack(a_slice("a"), a_slice("b", zone="us-west4-b"))))
    assert finding.path == "tpu-stack:slices[1].zone"


@pytest.mark.parametrize(
    ("wait_s", "said"), [(900, "15m"), (7200, "2h"), (86400, "1d"), (5400, "90m"), (61, "61s")]
)
def test_direct_warns_that_a_refused_quota_looks_like_a_hang_and_where_to_look(
    wait_s: int, said: str
) -> None:
    config = a_stack(a_slice(capacity="on-demand", provisioning="direct", wait_s=wait_s))
    finding = only(risks.supply(config))
    assert (finding.severity, finding.path) == ("warning", "tpu-stack:slices[0].provisioning")
    for part in ("429", f"until wait, {said},", "quotas of Cloud TPU API", "project my-project"):
        assert part in finding.message


def test_direct_spot_warns_that_a_preempted_node_is_not_made_again() -> None:
    _, finding = risks.supply(a_stack(a_slice(provisioning="direct")))
    assert (finding.severity, finding.path) == ("warning", "tpu-stack:slices[0].provisioning")
    assert "preempted is not made again" in finding.message


@pytest.mark.parametrize(
    ("accelerator", "notes"), [("v5litepod-32", 0), ("v5litepod-64", 1), ("v5litepod-256", 1)]
)
def test_64_spot_chips_at_once_get_a_note_that_they_seldom_come(accelerator: str, notes: int) -> None:
    findings = risks.supply(a_stack(a_slice(accelerator=accelerator)))
    assert [each.severity for each in findings] == ["note"] * notes


def test_the_note_counts_chips_of_one_slice_not_cores_nor_all_slices() -> None:
    assert risks.supply(a_stack(a_slice(accelerator="v5litepod-32", count=8))) == ()
    assert risks.supply(a_stack(a_slice(accelerator="v4-64", zone="us-central2-b"))) == ()
    assert risks.supply(a_stack(a_slice(accelerator="v5litepod-64", capacity="on-demand"))) == ()


# --- what is opened, what can be lost ---------------------------------------------------------------------------


def network(existing: str | None = None, *, external_addresses: bool = False) -> NetworkConfig:
    return NetworkConfig(existing=existing, subnetwork=None, external_addresses=external_addresses)


def test_the_defaults_open_nothing() -> None:
    assert risks.exposure(a_stack()) == ()


@pytest.mark.parametrize(
    ("count", "said"),
    [(1, "each of the 4 hosts"), (2, "of the 8 that"), (3, "12 hosts an address on the internet, more")],
)
def test_external_addresses_warn_with_their_number_and_the_quota(count: int, said: str) -> None:
    config = a_stack(a_slice(count=count), network=network(external_addresses=True))
    finding = only(risks.exposure(config))
    assert (finding.severity, finding.path) == ("warning", "tpu-stack:network.external-addresses")
    assert said in finding.message
    assert ("more than the 8" in finding.message) == (count > 2)
    assert "the firewall still admits IAP alone" in finding.message


def test_an_existing_network_warns_that_its_rules_are_not_ours_and_what_it_needs() -> None:
    finding = only(risks.exposure(a_stack(network=network("shared"))))
    assert (finding.severity, finding.path) == ("warning", "tpu-stack:network.existing")
    for part in ('"shared"', "rules of its own", "Private Google Access", "Cloud NAT"):
        assert part in finding.message
    assert "default-allow-ssh" not in finding.message


def test_the_default_network_is_said_to_admit_the_internet_to_ssh() -> None:
    finding = only(risks.exposure(a_stack(network=network("default"))))
    assert "default-allow-ssh admits all of the internet to port 22" in finding.message


def test_nobody_with_access_is_a_warning_and_anybody_is_enough() -> None:
    nobody = a_stack(access=AccessConfig(members=(), administrators=()))
    finding = only(risks.exposure(nobody))
    assert (finding.severity, finding.path) == ("warning", "tpu-stack:access")
    assert (
        risks.exposure(a_stack(access=AccessConfig(members=(), administrators=("user:b@example.com",)))) == ()
    )


def test_without_protection_what_destroy_deletes_is_named() -> None:
    finding = only(risks.exposure(a_stack(protect=False)))
    assert (finding.severity, finding.path) == ("warning", "tpu-stack:protect")
    for part in ("pulumi destroy", 'bucket "my-project-dev-tpu-stack"', "NFS server", "image repository"):
        assert part in finding.message


def test_without_protection_only_what_there_is_can_be_lost() -> None:
    message = only(risks.exposure(a_stack(protect=False, bucket=None, nfs=None))).message
    assert "bucket" not in message
    assert "NFS" not in message
