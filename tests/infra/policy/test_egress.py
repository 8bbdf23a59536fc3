"""Data and images are where the slices are, or what reading across costs is said and refused."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from infra.config import Allowances
from infra.policy import billing, egress
from tests.infra.policy.stacks import a_slice, a_stack, an_nfs, only

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
