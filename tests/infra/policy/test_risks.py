"""What a configuration reads across regions, may not get, opens to others, or lets be lost, is said or refused."""

import dataclasses
from typing import Any

import pytest

from infra import catalogue
from infra.config import AccessConfig, Allowances, Config, NetworkConfig
from infra.policy import risks
from tests.infra.policy.stacks import a_disk, a_grant, a_slice, a_stack, an_nfs, only

# --- reading across regions -------------------------------------------------------------------------------------


EUROPEAN = a_slice("eu", zone="europe-west4-b")
IN_TWO_REGIONS = a_stack(a_slice("here"), EUROPEAN, a_slice("too", zone="europe-west4-a"), nfs=None)


def moved(what: str, region: str) -> Config:
    """A stack whose bucket or images are elsewhere."""
    config = a_stack()
    return dataclasses.replace(config, **{what: dataclasses.replace(getattr(config, what), region=region)})


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (a_stack(), []),
        (
            moved("bucket", "us-west4"),
            [
                (
                    "error",
                    ('tpu-stack:storage.bucket.region: bucket "my-project-dev-tpu-stack" is in us-west4, slice "main" '
                    "in us-central1: reading it from there costs about 19 USD per TB"
                    " (within North America, 0.02 USD per "
                    "GiB); put it into that region; if that is meant, set tpu-stack:allow-cross-region: true"),
                )
            ],
        ),
        (moved("images", "europe-west4"), [("error", "from Europe to North America, 0.08 USD per GiB")]),
        (a_stack(nfs=an_nfs("us-east1-d")), [("error", "tpu-stack:storage.nfs.zone: the NFS server")]),
        (a_stack(nfs=an_nfs("us-east1-d", kind="filestore")), [("error", "tpu-stack:storage.nfs.zone: ")]),
        # Another zone of the region has its price too, and is not refused.
        (
            a_stack(nfs=an_nfs("us-central1-b")),
            [("note", 'slice "main" in another zone of the region: traffic between them costs about 9 USD per TB')],
        ),
        # Each region that reads across is told which slices do, and what a stack of one place would be.
        (
            IN_TWO_REGIONS,
            [
                ("error", '"eu", "too" in europe-west4: '),
                ("error", "; give the slices of each region a stack of their own; "),
            ],
        ),
        (
            a_stack(a_slice("far", zone="asia-east1-c"), EUROPEAN, region="us-east1", nfs=None),
            [("error", f"tpu-stack:{key}.region: ") for key in ("storage.bucket",) * 2 + ("images",) * 2],
        ),
        (a_stack(EUROPEAN, bucket=None, nfs=None), [("error", "tpu-stack:images.region: ")]),
    ],
)  # fmt: skip
def test_what_is_read_across_regions_is_refused_with_its_price(
    config: Config, found: list[tuple[str, str]]
) -> None:
    findings = list(risks.egress(config))
    assert [each.severity for each in findings] == [severity for severity, _ in found]
    for finding, (_, said) in zip(findings, found, strict=True):
        assert said in str(finding)


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
    assert risks.usd_per_gib(source, destination) == usd_per_gib
    assert risks.usd_per_gib(destination, source) == usd_per_gib
    assert ("not known" in risks.estimate(source, destination)) == (usd_per_gib is None)


# --- slices that may not come -----------------------------------------------------------------------------------


UNLISTED = Allowances(unlisted=True, billable=False, cross_region=False)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (a_stack(), []),
        (
            a_stack(a_slice("a"), a_slice("b", zone="us-west4-b"), allow=UNLISTED),
            [("warning", "tpu-stack:slices[1].zone: us-west4-b does not list v5litepod-16")],
        ),
        # One host of v2 is in more zones than a slice of it; and today's JAX may start on neither.
        (
            a_stack(a_slice(accelerator="v2-8", zone="us-central1-b")),
            [("warning", "slices[0].accelerator: v2: today's JAX may fail")],
        ),
        (
            a_stack(a_slice(accelerator="v2-32", zone="us-central1-b")),
            [("warning", "these do: us-central1-a, europe-west4-a"), ("warning", "JAX may fail")],
        ),
        (a_stack(a_slice(accelerator="v3-8", zone="us-central1-a")), [("warning", "JAX may fail")]),
        (a_stack(a_slice(accelerator="v4-8", zone="us-central2-b")), []),
        (
            a_stack(a_slice(accelerator="v6e-8", zone="us-south1-ai1b")),
            [("warning", "tpu-stack:slices[0].zone: us-south1-ai1b is an AI zone")],
        ),
        (
            a_stack(a_slice(capacity="on-demand", provisioning="direct", wait_s=5400)),
            [("warning", ("slices[0].provisioning: direct: a refused quota (HTTP 429) is retried without a word until "
              "wait, 1 h 30 min, is over; if `pulumi up` seems to hang, look at the quotas of Cloud TPU API in the "
              "console (IAM & Admin, Quotas, project my-project)"))],
        ),
        (
            a_stack(a_slice(provisioning="direct")),
            [("warning", "429"), ("warning", "slices[0].provisioning: direct: a spot node that is preempted is not")],
        ),
        # 64 chips of one slice: neither cores, nor all slices together, nor on demand.
        (a_stack(a_slice(accelerator="v5litepod-64")), [("note", "64 spot chips at once, which seldom come")]),
        (a_stack(a_slice(accelerator="v5litepod-32", count=8)), []),
        (a_stack(a_slice(accelerator="v4-64", zone="us-central2-b")), []),
        (a_stack(a_slice(accelerator="v5litepod-64", capacity="on-demand")), []),
        # What the reader takes although it is not known.
        (
            a_stack(
                a_slice(runtime_version="tpu-ubuntu2204-bas"),
                region="us-centrall1",
                nfs=an_nfs("us-central2-b", machine_type="e2-small"),
                grant=(a_grant(64, zone="us-centrall1-a"),),
            ),
            [
                ("warning", f'tpu-stack:{key}: "{value}" is not known here')
                for key, value in (
                    ("slices[0].runtime-version", "tpu-ubuntu2204-bas"),
                    ("grant[0].zone", "us-centrall1-a"),
                    ("storage.bucket.region", "us-centrall1"),
                    ("storage.nfs.machine-type", "e2-small"),
                    ("images.region", "us-centrall1"),
                )
            ],
        ),
    ],
)  # fmt: skip
def test_what_may_not_come_is_said_of_its_slice(config: Config, found: list[tuple[str, str]]) -> None:
    findings = list(risks.supply(config))
    assert [each.severity for each in findings] == [severity for severity, _ in found]
    for finding, (_, said) in zip(findings, found, strict=True):
        assert said in str(finding)
        assert ("allow-unlisted" in str(finding)) == (finding.severity == "error")


def test_every_type_can_be_had_without_a_refusal_somewhere() -> None:
    for made in catalogue.ACCELERATORS.values():
        found = risks.supply(a_stack(a_slice(accelerator=made.type_name, zone=made.zones[0])))
        assert "error" not in {each.severity for each in found}, made


# --- what is opened, what can be lost ---------------------------------------------------------------------------


def network(existing: str | None = None, *, external_addresses: bool = False) -> NetworkConfig:
    return NetworkConfig(existing=existing, subnetwork=None, external_addresses=external_addresses)


EXPOSED = network(external_addresses=True)
ROOT_ONLY = AccessConfig(members=(), administrators=("user:b@example.com",))


@pytest.mark.parametrize(
    "harmless", [a_stack(), a_stack(access=ROOT_ONLY)], ids=["the defaults", "only an administrator"]
)
def test_what_opens_nothing_is_no_finding(harmless: Config) -> None:
    assert list(risks.exposure(harmless)) == []


@pytest.mark.parametrize(
    ("slices", "changes", "path", "said", "unsaid"),
    [
        ({}, {"network": EXPOSED}, "network.external-addresses", "each of the 4 hosts", "more than"),
        ({"count": 2}, {"network": EXPOSED}, "network.external-addresses", ", of the 8 that", "more than"),
        ({"count": 3}, {"network": EXPOSED}, "network.external-addresses", ("12 hosts an address on the internet, more "
         "than the 8 that a project may use by default; the firewall still admits only IAP"), "of the 8"),
        ({}, {"network": network("shared")}, "network.existing", ('"shared" has firewall rules of its own that this '
         "stack leaves as they are: see what they admit; its subnets need Private Google Access, and "
         "Cloud NAT"), "internet"),
        ({}, {"network": network("default")}, "network.existing",
         "default-allow-ssh admits all of the internet to port 22", "see what"),
        ({}, {"access": AccessConfig(members=(), administrators=())}, "access", "names nobody", "admin"),
        ({"data_disks": (a_disk(),)}, {"protect": False}, "protect", ('false lets `pulumi destroy`, and a change that '
         'replaces them, delete bucket "my-project-dev-tpu-stack" (once it is empty), all data of the NFS server, data '
         "disks that were made with slices, the image repository"), "nothing"),
        ({}, {"protect": False, "bucket": None, "nfs": None}, "protect", "delete the image repository", "bucket"),
    ],
)  # fmt: skip
def test_what_is_open_or_can_be_lost_is_a_warning(
    slices: dict[str, Any], changes: dict[str, Any], path: str, said: str, unsaid: str
) -> None:
    finding = only(risks.exposure(a_stack(a_slice(**slices), **changes)))
    assert (finding.severity, finding.path) == ("warning", f"tpu-stack:{path}")
    assert said in finding.message and unsaid not in finding.message


def test_of_a_slice_with_several_zones_each_is_judged_and_its_runs_need_a_bucket() -> None:
    spread = a_slice(more_zones=("europe-west4-b", "us-central2-b"))
    found = [(each.severity, each.path, each.message) for each in risks.supply(a_stack(spread, bucket=None))]
    paths = "tpu-stack:slices[0].zones"
    assert [(severity, path) for severity, path, _ in found] == [("warning", paths), ("error", paths)]
    assert "us-central2-b does not list v5litepod-16" in found[0][2]
    assert "its runs have to be in a bucket" in found[1][2]
    crossing = [str(each) for each in risks.egress(a_stack(a_slice(more_zones=("europe-west4-b",))))]
    assert len(crossing) == 3  # bucket, NFS, images
    assert all(
        '"main" in europe-west4' in each and "write only zones of us-central1" in each for each in crossing
    )


def test_a_keeper_says_what_it_may_do_and_what_it_cannot_bring_back() -> None:
    def said(**changes: Any) -> list[tuple[str, str]]:
        found = risks.exposure(dataclasses.replace(a_stack(), keeper=True, **changes))
        return [(each.severity, each.message) for each in found if each.path == "tpu-stack:keeper"]

    ((severity, message),) = said()
    assert severity == "note" and "root on their hosts" in message
    ((severity, message),) = said(nfs=None)
    assert severity == "warning" and "fab keeper install --here" in message
    ((severity, message),) = said(nfs=None, slices=(a_slice(provisioning="node-pool"),))
    assert severity == "warning" and message.endswith("starts pods again and makes nodes anew; remove it")
    _, (severity, message) = said(slices=(a_slice("one", provisioning="direct"), a_slice("two")))
    assert severity == "warning" and message.startswith('slice "one": is not brought back')
    assert not [each for each in risks.exposure(a_stack()) if each.path == "tpu-stack:keeper"]
