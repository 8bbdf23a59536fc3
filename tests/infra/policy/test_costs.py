"""List prices agree with docs/costs.md, every billable thing has its line, and totals are the sums of their lines."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra import catalogue
from infra.catalogue import zones
from infra.config import Config, NetworkConfig
from infra.policy import billing, costs
from infra.policy.billing import ListPrice
from infra.policy.costs import Cost, CostLine, Rate
from tests.infra.policy.stacks import a_disk, a_slice, a_stack, an_nfs

# --- list prices ------------------------------------------------------------------------------------------------


DOCS = (Path(__file__).resolve().parents[3] / "docs" / "costs.md").read_text()
PRICES = {name: value for name, value in vars(billing).items() if isinstance(value, ListPrice)}


@pytest.mark.parametrize("name", PRICES)
def test_a_price_has_a_source_and_a_date_stands_in_the_docs_with_them_and_is_used(name: str) -> None:
    price = PRICES[name]
    assert 0 < price.usd < 1
    assert price.source.startswith("https://") and re.search(r"20\d\d|unknown date", price.read)
    rows = [line for line in DOCS.splitlines() if line.startswith("|") and f"| {price.usd:.15g} |" in line]
    assert any(price.source.split(",")[0] in row and price.read in row for row in rows), (name, rows)
    folder = Path(billing.__file__).parent
    text = "".join(path.read_text() for path in sorted(folder.glob("*.py")))
    assert len(re.findall(rf"\b{name}\b", text)) > 1


def test_the_docs_have_the_prices_of_every_region() -> None:
    for region, prices in billing.REGIONAL.items():
        figures = " | ".join(f"{figure:.4g}" for figure in dataclasses.astuple(prices))
        assert f"| {region} | {figures} |" in DOCS, f"| {region} | {figures} |"
    assert billing.REGIONAL_READ in DOCS
    assert billing.REGIONAL_SOURCE.split(",")[0] in DOCS


def test_every_region_with_tpus_has_prices_but_us_central2_and_none_is_cheaper_than_the_stand_in() -> None:
    with_tpus = {catalogue.region_of(zone) for each in catalogue.GENERATIONS for zone in each.zones}
    assert with_tpus - set(billing.REGIONAL) == {"us-central2"}
    assert not billing.is_listed("us-central2")
    base = billing.regional("us-central2")
    assert base is billing.REGIONAL["us-central1"]
    for region, prices in billing.REGIONAL.items():
        pairs = zip(dataclasses.astuple(prices), dataclasses.astuple(base), strict=True)
        assert all(price >= of_base for price, of_base in pairs), region
        assert 0 < prices.bucket_usd < prices.pd_balanced_usd < 0.2, region
        assert 0.03 < prices.e2_usd_per_hour < 0.06, region


def test_the_docs_say_how_much_the_regions_differ() -> None:
    assert billing.regions_differ_by() == pytest.approx(0.5)
    assert "up to 50 %" in DOCS


@pytest.mark.parametrize(
    ("machine", "region", "usd_per_hour"),
    [
        ("e2-small", "europe-west4", 13.46 / 730),
        ("e2-standard-8", "europe-west4", 215.4 / 730),
        (zones.gateway_machine_type("us-central2-b"), "us-central2", 0.04749975),
        *(
            (machine, "us-central1", None)
            for machine in ("n2-standard-2", "e2-custom-4-4096", "e2-highcpu-4", "")
        ),
        ("n1-standard-1", "europe-west4", None),
    ],
)
def test_a_machine_costs_its_share_and_one_without_a_known_price_has_none(
    machine: str, region: str, usd_per_hour: float | None
) -> None:
    wanted = None if usd_per_hour is None else pytest.approx(usd_per_hour, rel=1e-3)
    assert billing.machine_usd_per_hour(machine, region) == wanted


@pytest.mark.parametrize(
    ("disk_type", "size_gib", "region", "usd_per_hour"),
    [
        ("pd-balanced", 730, "us-central1", 0.10),
        ("pd-balanced", 1460, "us-west4", 0.22),
        # Billed by more than their size.
        ("hyperdisk-balanced", 100, "us-central1", None),
        ("hyperdisk-ml", 100, "us-central1", None),
    ],
)
def test_a_disk_costs_by_size_and_region(
    disk_type: str, size_gib: int, region: str, usd_per_hour: float | None
) -> None:
    assert billing.disk_usd_per_hour(disk_type, size_gib, region) == pytest.approx(usd_per_hour)


def test_cloud_nat_costs_by_vm_up_to_32_and_no_more_beyond() -> None:
    address = billing.EXTERNAL_ADDRESS.usd
    assert billing.nat_usd_per_hour(1) == pytest.approx(0.0014 + address)
    assert billing.nat_usd_per_hour(32) == pytest.approx(32 * 0.0014 + address)
    assert billing.nat_usd_per_hour(33) == billing.nat_usd_per_hour(1000) == pytest.approx(0.044 + address)


# --- sums and table ---------------------------------------------------------------------------------------------


PRINTABLE = st.characters(min_codepoint=32, max_codepoint=126)

lines = st.builds(
    CostLine,
    what=st.text(PRINTABLE, min_size=1, max_size=40),
    quantity=st.text(PRINTABLE, max_size=30),
    usd_per_hour=st.none() | st.floats(0, 1e5),
    covered_by_grant=st.booleans(),
)


def a_cost(*made: CostLine, rates: Sequence[Rate] = (), assumptions: Sequence[str] = ()) -> Cost:
    return Cost(lines=made, rates=tuple(rates), assumptions=tuple(assumptions))


@given(made=st.lists(lines, max_size=8))
def test_a_total_is_the_sum_of_its_lines_in_any_order(made: list[CostLine]) -> None:
    cost = a_cost(*made)
    assert cost.usd_per_hour + cost.covered_usd_per_hour == pytest.approx(
        math.fsum(each.usd_per_hour or 0 for each in made)
    )
    assert cost.usd_per_hour == pytest.approx(
        math.fsum(each.usd_per_hour or 0 for each in made if not each.covered_by_grant)
    )
    backwards = a_cost(*reversed(made))
    assert (cost.usd_per_hour, cost.covered_usd_per_hour) == (
        backwards.usd_per_hour,
        backwards.covered_usd_per_hour,
    )


def test_only_what_is_billed_can_be_of_unknown_price() -> None:
    cost = a_cost(
        CostLine(what="a", quantity="", usd_per_hour=None),
        CostLine(what="b", quantity="", usd_per_hour=None, covered_by_grant=True),
    )
    assert cost.not_known == ("a",)


def test_the_table_has_aligned_columns_totals_rates_and_assumptions() -> None:
    cost = a_cost(
        CostLine(what="slice main", quantity="16 chips", usd_per_hour=1234.5, covered_by_grant=True),
        CostLine(what="gateway", quantity="1 e2-small", usd_per_hour=0.01675),
        CostLine(what="disk", quantity="8 GiB hyperdisk", usd_per_hour=None),
        rates=[Rate(what="bucket", usd=0.02, per="GiB and month")],
        assumptions=["List prices."],
    )
    assert costs.table(cost).splitlines() == [
        "Cost at list prices:",
        "what                  quantity          USD/hour    USD/day",
        "slice main            16 chips         1,234.500  29,628.00  grant",
        "gateway               1 e2-small           0.017       0.40",
        "disk                  8 GiB hyperdisk  not known  not known",
        "billed                                     0.017       0.40",
        "covered by the grant                   1,234.500  29,628.00",
        "and at prices that are not known: disk",
        "and bucket by use: 0.020 USD per GiB and month",
        "List prices.",
    ]


@given(made=st.lists(lines, min_size=1, max_size=8))
def test_the_table_has_a_row_for_each_line_with_its_prices_below_each_other(made: list[CostLine]) -> None:
    _, *rows = costs.table(a_cost(*made)).splitlines()
    end = rows[0].index("USD/hour") + len("USD/hour")
    for each, row in zip(made, rows[1:], strict=False):
        assert row.startswith(each.what.rstrip())
        assert row[end - 1] != " "
        assert row == row.rstrip()


# --- what is billed ---------------------------------------------------------------------------------------------


EXPOSED = NetworkConfig(existing=None, subnetwork=None, external_addresses=True)
EXISTING = NetworkConfig(existing="shared", subnetwork=None, external_addresses=False)


def cost(config: Config, *covered: int) -> Cost:
    return costs.cost_of(config, covered or (0,) * len(config.slices))


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


def test_the_disks_and_the_tier_that_are_priced_are_those_that_are_made() -> None:
    from infra import file_server

    assert file_server.BOOT_DISK_GIB == costs.GATEWAY_BOOT_GIB
    assert file_server.DATA_DISK_TYPE == costs.GATEWAY_DISK_TYPE
    assert file_server.TIER == "BASIC_HDD"


def test_a_gateway_of_another_kind_of_machine_has_a_price_that_is_not_known() -> None:
    config = a_stack(nfs=an_nfs("us-central1-a", machine_type="n2-standard-2"))
    assert cost(config).not_known == ("gateway: VM",)


def test_filestore_costs_by_size_and_has_no_gateway() -> None:
    config = a_stack(nfs=an_nfs("us-west1-a", kind="filestore", size_gib=1024))
    assert line(config, "Filestore").usd_per_hour == pytest.approx(1024 * 0.000274)
    assert not any(what.startswith("gateway") for what in named(config))


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
