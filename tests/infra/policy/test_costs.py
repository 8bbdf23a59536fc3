"""List prices agree with docs/costs.md, every billable thing has its line, and totals are the sums of their lines."""

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra import catalogue
from infra.catalogue import zones
from infra.config import Config, NetworkConfig
from infra.policy import billing, costs
from infra.policy.billing import ListPrice
from infra.policy.costs import CostLine, HourlyCost
from tests.infra.policy.stacks import ZONE, a_disk, a_slice, a_stack, an_nfs

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


def test_every_region_with_tpus_has_its_prices_in_the_docs_too_and_none_is_cheaper_than_the_stand_in() -> (
    None
):
    with_tpus = {catalogue.zone_region(zone) for each in catalogue.GENERATIONS for zone in each.zones}
    assert with_tpus - set(billing.REGIONAL) == {"us-central2"}
    assert not billing.is_listed("us-central2")
    base = billing.regional("us-central2")
    assert base is billing.REGIONAL["us-central1"]
    for region, prices in billing.REGIONAL.items():
        row = f"| {region} | {' | '.join(f'{figure:.4g}' for figure in prices)} |"
        assert row in DOCS, row
        assert all(price >= least for price, least in zip(prices, base, strict=True)), region
        assert prices.bucket_usd < prices.pd_balanced_usd < 0.2 and prices.e2_usd_per_hour < 0.06, region
    assert billing.REGIONAL_READ in DOCS and billing.REGIONAL_SOURCE.split(",")[0] in DOCS
    assert billing.regions_differ_by() == pytest.approx(0.5) and "up to 50 %" in DOCS


@pytest.mark.parametrize(
    ("machine", "region", "usd_per_hour"),
    [
        ("e2-small", "europe-west4", 13.46 / 730),
        ("e2-standard-8", "europe-west4", 215.4 / 730),
        (zones.gateway_machine_type("us-central2-b"), "us-central2", 0.04749975),
        ("n1-standard-1", "europe-west4", None),
        *((machine, "us-central1", None) for machine in ("n2-standard-2", "e2-custom-4-4096", "e2-highcpu-4", "")),
    ],
)  # fmt: skip
def test_a_machine_costs_its_share_and_one_without_a_known_price_has_none(
    machine: str, region: str, usd_per_hour: float | None
) -> None:
    found = billing.machine_usd_per_hour(machine, region)
    assert found == (None if usd_per_hour is None else pytest.approx(usd_per_hour, rel=1e-3))


def test_cloud_nat_costs_by_vm_up_to_32_and_no_more_beyond() -> None:
    by_vms = [billing.nat_usd_per_hour(vms) - billing.EXTERNAL_ADDRESS.usd for vms in (1, 32, 33, 1000)]
    assert by_vms == pytest.approx([0.0014, 32 * 0.0014, 0.044, 0.044])


# --- sums ------------- ---------------------------------------------------------------------------------------------


PRINTABLE = st.characters(min_codepoint=32, max_codepoint=126)

lines = st.builds(
    CostLine,
    item=st.text(PRINTABLE, min_size=1, max_size=40),
    quantity=st.text(PRINTABLE, max_size=30),
    usd_per_hour=st.none() | st.floats(0, 1e5),
    covered_by_grant=st.booleans(),
)


@given(made=st.lists(lines, max_size=8))
def test_a_total_is_the_sum_of_its_lines_in_any_order_and_only_what_is_billed_can_be_of_unknown_price(
    made: list[CostLine],
) -> None:
    cost, backwards = (HourlyCost(lines=tuple(each), rates=(), assumptions=()) for each in (made, made[::-1]))
    billed = [each for each in made if not each.covered_by_grant]
    assert cost.usd_per_hour == backwards.usd_per_hour
    assert cost.usd_per_hour == pytest.approx(math.fsum(each.usd_per_hour or 0 for each in billed))
    both = cost.usd_per_hour + cost.covered_usd_per_hour
    assert both == pytest.approx(math.fsum(each.usd_per_hour or 0 for each in made))
    assert list(cost.not_known) == [each.item for each in billed if each.usd_per_hour is None]


# --- what is billed ---------------------------------------------------------------------------------------------


EXPOSED = NetworkConfig(existing=None, subnetwork=None, external_addresses=True)
EXISTING = NetworkConfig(existing="shared", subnetwork=None, external_addresses=False)
FILESTORE = an_nfs("us-west1-a", kind="filestore", size_gib=1024)
OLD_DISK = a_disk("old", size_gib=None, source="projects/p/zones/z/disks/d", mode="read-only")
HYPERDISK = a_disk(disk_type="hyperdisk-balanced")
TWO_REGIONS = a_stack(a_slice("a"), a_slice("b", zone="europe-west4-b", count=20))
IN_EUROPE = a_stack(region="europe-west4")


def cost(config: Config, *covered: int) -> HourlyCost:
    return costs.stack_cost(config, covered or (0,) * len(config.slices))


@pytest.mark.parametrize(
    ("config", "what", "quantity", "usd_per_hour"),
    [
        (a_stack(), "slice main: v5litepod-16, us-central1-a", "16 chips, spot", 16 * 0.24493),
        (a_stack(a_slice(capacity="on-demand")), "slice main: ", "16 chips, on-demand", 16 * 1.20),
        (a_stack(a_slice(count=3)), "slice main: 3 x v5litepod-16, us-central1-a", "48 chips, spot", 48 * 0.24493),
        (a_stack(a_slice(capacity="reserved")), "slice main: ", "16 chips, reserved", None),
        (IN_EUROPE, "gateway: VM", "1 e2-small", 0.03688602 / 2),
        (IN_EUROPE, "gateway: boot disk", "20 GiB pd-balanced", 20 * 0.11 / 730),
        (IN_EUROPE, "gateway: data disk", "200 GiB pd-balanced", 200 * 0.11 / 730),
        (a_stack(nfs=an_nfs(ZONE, machine_type="n2-standard-2")), "gateway: VM", "1 n2-standard-2", None),
        (a_stack(nfs=FILESTORE), "Filestore", "1024 GiB Basic HDD", 1024 * 0.000274),
        # One that exists is billed already; a hyperdisk by more than its size.
        (a_stack(a_slice(data_disks=(a_disk(), OLD_DISK))), "slice main: disk", "500 GiB pd-balanced", 50 / 730),
        (a_stack(a_slice(data_disks=(HYPERDISK,))), "slice main: disk data", "500 GiB hyperdisk-balanced", None),
        (a_stack(a_slice(count=2), a_slice("b", "v5litepod-8"), network=EXPOSED), "external", "9 hosts", 0.045),
        (TWO_REGIONS, "Cloud NAT, us-central1", "5 VMs, 1 address", 5 * 0.0014 + 0.005),
        (TWO_REGIONS, "Cloud NAT, europe-west4", "80 VMs, 1 address", 0.044 + 0.005),
        # Hosts with addresses do not use it, but the gateway does; Filestore is no VM.
        (a_stack(network=EXPOSED), "Cloud NAT", "1 VM, 1 address", 0.0014 + 0.005),
        (a_stack(nfs=FILESTORE), "Cloud NAT", "4 VMs, 1 address", 4 * 0.0014 + 0.005),
        (a_stack(keeper=True), "keeper", "3 requests a minute", 60 * (0.005 + 2 * 0.0004) / 1000),
    ],
)  # fmt: skip
def test_what_is_billed_has_a_line_and_a_price_that_is_not_known_is_not_zero(
    config: Config, what: str, quantity: str, usd_per_hour: float | None
) -> None:
    reviewed = cost(config)
    (line,) = [each for each in reviewed.lines if each.item.startswith(what)]
    assert line.quantity == quantity
    assert line.usd_per_hour == pytest.approx(usd_per_hour)
    assert (line.item in reviewed.not_known) == (usd_per_hour is None)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (a_stack(nfs=FILESTORE), "gateway"),
        (a_stack(network=EXPOSED, nfs=None), "Cloud NAT"),
        (a_stack(network=EXISTING), "Cloud NAT"),
        (a_stack(), "external addresses"),
        (a_stack(), "keeper"),
    ],
)
def test_what_a_stack_does_not_have_is_not_billed(config: Config, what: str) -> None:
    assert not any(each.item.startswith(what) for each in cost(config).lines)


def test_what_a_grant_covers_of_a_slice_is_a_line_of_its_own_and_needs_no_price() -> None:
    lines = [each for each in cost(a_stack(), 10).lines if each.item.startswith("slice main")]
    assert [(each.quantity, each.covered_by_grant) for each in lines] == [
        ("10 chips, spot", True),
        ("6 chips, spot", False),
    ]
    assert [each.usd_per_hour for each in lines] == pytest.approx([10 * 0.24493, 6 * 0.24493])
    assert cost(a_stack(a_slice(capacity="reserved")), 16).not_known == ()


def test_what_is_billed_by_use_has_its_rate() -> None:
    rates = cost(a_stack(region="us-west4")).rates
    assert [(each.item, each.usd) for each in rates] == [
        ("bucket", 0.023),
        ("images", 0.10),
        ("Cloud NAT", 0.045),
    ]
    assert [each.item for each in cost(a_stack(bucket=None, network=EXISTING)).rates] == ["images"]


def test_a_price_that_is_borrowed_from_another_region_is_said_to_be() -> None:
    unlisted = a_stack(a_slice(accelerator="v4-8", zone="us-central2-b"), region="us-central2")
    said = "us-central2: us-central1's is taken; other regions cost up to 50% more"
    assert said in " ".join(cost(unlisted).assumptions)
    elsewhere = a_stack(nfs=an_nfs(ZONE, kind="filestore", size_gib=1024))
    assert "Filestore in us-central1 is priced as in us-west1" in " ".join(cost(elsewhere).assumptions)
    assert len(cost(a_stack()).assumptions) == 1
