"""What a configuration opens to others, or lets be lost, is said."""

from __future__ import annotations

import pytest

from infra.config import AccessConfig, NetworkConfig
from infra.policy import exposure
from tests.infra.policy.stacks import a_slice, a_stack, only


def network(existing: str | None = None, *, external_addresses: bool = False) -> NetworkConfig:
    return NetworkConfig(existing=existing, subnetwork=None, external_addresses=external_addresses)


def test_the_defaults_open_nothing() -> None:
    assert exposure.findings(a_stack()) == ()


@pytest.mark.parametrize(
    ("count", "said"),
    [(1, "each of the 4 hosts"), (2, "of the 8 that"), (3, "12 hosts an address on the internet, more")],
)
def test_external_addresses_warn_with_their_number_and_the_quota(count: int, said: str) -> None:
    config = a_stack(a_slice(count=count), network=network(external_addresses=True))
    finding = only(exposure.findings(config))
    assert (finding.severity, finding.path) == ("warning", "tpu-stack:network.external-addresses")
    assert said in finding.message
    assert ("more than the 8" in finding.message) == (count > 2)
    assert "the firewall still admits IAP alone" in finding.message


def test_an_existing_network_warns_that_its_rules_are_not_ours_and_what_it_needs() -> None:
    finding = only(exposure.findings(a_stack(network=network("shared"))))
    assert (finding.severity, finding.path) == ("warning", "tpu-stack:network.existing")
    for part in ('"shared"', "rules of its own", "Private Google Access", "Cloud NAT"):
        assert part in finding.message
    assert "default-allow-ssh" not in finding.message


def test_the_default_network_is_said_to_admit_the_internet_to_ssh() -> None:
    finding = only(exposure.findings(a_stack(network=network("default"))))
    assert "default-allow-ssh admits all of the internet to port 22" in finding.message


def test_nobody_with_access_is_a_warning_and_anybody_is_enough() -> None:
    nobody = a_stack(access=AccessConfig(members=(), administrators=()))
    finding = only(exposure.findings(nobody))
    assert (finding.severity, finding.path) == ("warning", "tpu-stack:access")
    assert (
        exposure.findings(a_stack(access=AccessConfig(members=(), administrators=("user:b@example.com",))))
        == ()
    )


def test_without_protection_what_destroy_deletes_is_named() -> None:
    finding = only(exposure.findings(a_stack(protect=False)))
    assert (finding.severity, finding.path) == ("warning", "tpu-stack:protect")
    for part in ("pulumi destroy", 'bucket "my-project-dev-tpu-stack"', "NFS server", "image repository"):
        assert part in finding.message


def test_without_protection_only_what_there_is_can_be_lost() -> None:
    message = only(exposure.findings(a_stack(protect=False, bucket=None, nfs=None))).message
    assert "bucket" not in message
    assert "NFS" not in message
