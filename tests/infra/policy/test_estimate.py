"""Every billable thing of a configuration has its line, and nothing else has."""

from __future__ import annotations

import pytest

from infra.config import Config, NetworkConfig
from infra.policy import estimate
from infra.policy.costs import Cost, CostLine
from tests.infra.policy.stacks import a_disk, a_slice, a_stack, an_nfs

EXPOSED = NetworkConfig(existing=None, subnetwork=None, external_addresses=True)
EXISTING = NetworkConfig(existing="shared", subnetwork=None, external_addresses=False)


def cost(config: Config, *covered: int) -> Cost:
    return estimate.cost_of(config, covered or (0,) * len(config.slices))


def line(config: Config, what: str, *covered: int) -> CostLine:
    (found,) = [each for each in cost(config, *covered).lines if each.what.startswith(what)]
    return found


def named(config: Config) -> list[str]:
    return [each.what for each in cost(config).lines]


def test_a_slice_costs_its_chips_at_the_list_price_of_its_region_and_capacity() -> None:
    spot = line(a_stack(a_slice()), "slice main")
    assert (spot.what, spot.quantity) == ("slice main: v5litepod-16, us-central1-a", "16 chips, spot")
    assert spot.usd_per_hour == pytest.approx(16 * 0.24493)
    on_demand = line(a_stack(a_slice(capacity="on-demand")), "slice main")
    assert on_demand.usd_per_hour == pytest.approx(16 * 1.20)


def test_equal_slices_cost_as_many_times() -> None:
    found = line(a_stack(a_slice(count=3)), "slice main")
    assert (found.what, found.quantity) == ("slice main: 3 x v5litepod-16, us-central1-a", "48 chips, spot")
    assert found.usd_per_hour == pytest.approx(48 * 0.24493)


def test_what_a_grant_covers_of_a_slice_is_a_line_of_its_own() -> None:
    lines = [each for each in cost(a_stack(a_slice()), 10).lines if each.what.startswith("slice main")]
    assert [(each.quantity, each.covered_by_grant) for each in lines] == [
        ("10 chips, spot", True),
        ("6 chips, spot", False),
    ]
    assert [each.usd_per_hour for each in lines] == pytest.approx([10 * 0.24493, 6 * 0.24493])


def test_a_slice_that_is_covered_whole_has_nothing_billed() -> None:
    assert line(a_stack(a_slice()), "slice main", 16).covered_by_grant


def test_a_price_that_is_not_known_is_said_and_is_not_zero() -> None:
    config = a_stack(a_slice(capacity="reserved"))
    assert line(config, "slice main").usd_per_hour is None
    assert cost(config).not_known == ("slice main: v5litepod-16, us-central1-a",)


def test_a_reservation_that_a_grant_covers_needs_no_price() -> None:
    assert cost(a_stack(a_slice(capacity="reserved")), 16).not_known == ()


def test_the_gateway_is_a_vm_with_two_disks() -> None:
    config = a_stack(region="europe-west4")
    assert line(config, "gateway: VM").usd_per_hour == pytest.approx(0.03688602 / 2)
    assert line(config, "gateway: boot disk").usd_per_hour == pytest.approx(20 * 0.11 / 730)
    assert line(config, "gateway: data disk").usd_per_hour == pytest.approx(200 * 0.11 / 730)


def test_the_gateways_disks_are_those_that_are_made() -> None:
    from infra import gateway

    assert gateway.BOOT_DISK_GIB == estimate.GATEWAY_BOOT_GIB
    assert gateway.DATA_DISK_TYPE == estimate.GATEWAY_DISK_TYPE


def test_filestore_is_of_the_tier_that_is_made() -> None:
    from infra import filestore

    assert filestore.TIER == "BASIC_HDD"


def test_a_gateway_of_another_kind_of_machine_has_a_price_that_is_not_known() -> None:
    config = a_stack(nfs=an_nfs("us-central1-a", machine_type="n2-standard-2"))
    assert cost(config).not_known == ("gateway: VM",)


def test_filestore_costs_by_size_and_has_no_gateway() -> None:
    config = a_stack(nfs=an_nfs("us-west1-a", kind="filestore", size_gib=1024))
    assert line(config, "Filestore").usd_per_hour == pytest.approx(1024 * 0.000274)
    assert not any(what.startswith("gateway") for what in named(config))


def test_without_nfs_there_is_neither() -> None:
    assert named(a_stack(nfs=None)) == ["slice main: v5litepod-16, us-central1-a", "Cloud NAT, us-central1"]


def test_a_disk_that_is_made_is_billed_and_one_that_exists_is_not_again() -> None:
    disks = (a_disk(), a_disk("old", size_gib=None, source="projects/p/zones/z/disks/d", mode="read-only"))
    config = a_stack(a_slice(accelerator="v5litepod-8", data_disks=disks), nfs=None)
    assert line(config, "slice main: disk data").usd_per_hour == pytest.approx(500 * 0.10 / 730)
    assert not any("old" in what for what in named(config))


def test_a_hyperdisk_is_not_known() -> None:
    disks = (a_disk(disk_type="hyperdisk-balanced"),)
    config = a_stack(a_slice(accelerator="v6e-8", zone="us-central1-b", data_disks=disks))
    assert cost(config).not_known == ("slice main: disk data",)


def test_external_addresses_cost_for_every_host_of_every_slice() -> None:
    config = a_stack(a_slice("a", count=2), a_slice("b", "v5litepod-8"), network=EXPOSED)
    found = line(config, "external addresses")
    assert found.quantity == "9 hosts"
    assert found.usd_per_hour == pytest.approx(9 * 0.005)


def test_by_default_there_are_no_external_addresses() -> None:
    assert "external addresses" not in named(a_stack())


def test_cloud_nat_costs_in_each_region_by_the_vms_without_an_address() -> None:
    config = a_stack(a_slice("a"), a_slice("b", zone="europe-west4-b", count=20))
    here, there = line(config, "Cloud NAT, us-central1"), line(config, "Cloud NAT, europe-west4")
    assert here.quantity == "5 VMs, 1 address"
    assert here.usd_per_hour == pytest.approx(5 * 0.0014 + 0.005)
    assert there.usd_per_hour == pytest.approx(0.044 + 0.005)


def test_hosts_with_addresses_do_not_use_cloud_nat_but_the_gateway_does() -> None:
    assert line(a_stack(network=EXPOSED), "Cloud NAT").quantity == "1 VM, 1 address"
    assert not any(what.startswith("Cloud NAT") for what in named(a_stack(network=EXPOSED, nfs=None)))


def test_filestore_is_no_vm_behind_cloud_nat() -> None:
    config = a_stack(nfs=an_nfs("us-west1-a", kind="filestore", size_gib=1024))
    assert line(config, "Cloud NAT, us-central1").quantity == "4 VMs, 1 address"
    assert "Cloud NAT, us-west1" not in named(config)


def test_an_existing_network_has_its_own_nat() -> None:
    config = a_stack(network=EXISTING)
    assert not any(what.startswith("Cloud NAT") for what in named(config))
    assert [rate.what for rate in cost(config).rates] == ["bucket", "images"]


def test_what_is_billed_by_use_has_its_rate() -> None:
    rates = cost(a_stack(region="us-west4")).rates
    assert [(each.what, each.usd) for each in rates] == [
        ("bucket", 0.023),
        ("images", 0.10),
        ("Cloud NAT", 0.045),
    ]
    assert [each.what for each in cost(a_stack(bucket=None)).rates] == ["images", "Cloud NAT"]


def test_a_region_without_prices_is_said_to_borrow_those_of_us_central1() -> None:
    v4 = a_slice(accelerator="v4-8", zone="us-central2-b")
    assumptions = cost(a_stack(v4, region="us-central2")).assumptions
    assert any("us-central2: us-central1's is taken" in each and "50% more" in each for each in assumptions)
    assert not any("is taken" in each for each in cost(a_stack()).assumptions)


def test_filestore_outside_of_us_west1_is_said_to_have_its_price() -> None:
    here = a_stack(nfs=an_nfs("us-west1-a", kind="filestore", size_gib=1024))
    there = a_stack(nfs=an_nfs("us-central1-a", kind="filestore", size_gib=1024))
    assert not any("Filestore" in each for each in cost(here).assumptions)
    assert any(
        "Filestore in us-central1 is priced as in us-west1" in each for each in cost(there).assumptions
    )
