"""The list prices agree with each other and with docs/costs.md, and every one has a source and a date."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from infra import catalogue
from infra.catalogue import zones
from infra.policy import billing
from infra.policy.billing import ListPrice

DOCS = (Path(__file__).resolve().parents[3] / "docs" / "costs.md").read_text()
PRICES = {name: value for name, value in vars(billing).items() if isinstance(value, ListPrice)}


@pytest.mark.parametrize("name", PRICES)
def test_a_price_is_positive_and_has_a_source_and_a_date(name: str) -> None:
    price = PRICES[name]
    assert 0 < price.usd < 1
    assert price.source.startswith("https://")
    assert re.search(r"20\d\d|unknown date", price.read)


@pytest.mark.parametrize("name", PRICES)
def test_a_price_stands_in_the_docs_with_its_source_and_date(name: str) -> None:
    price = PRICES[name]
    rows = [line for line in DOCS.splitlines() if line.startswith("|") and f"| {price.usd:.15g} |" in line]
    assert any(price.source.split(",")[0] in row and price.read in row for row in rows), (name, rows)


@pytest.mark.parametrize("name", PRICES)
def test_a_price_is_used_somewhere(name: str) -> None:
    infra = Path(billing.__file__).parent
    text = "".join(path.read_text() for path in sorted(infra.glob("*.py")))
    assert len(re.findall(rf"\b{name}\b", text)) > 1


def test_the_docs_have_the_prices_of_every_region() -> None:
    for region, prices in billing.REGIONAL.items():
        figures = " | ".join(f"{figure:.4g}" for figure in dataclasses.astuple(prices))
        assert f"| {region} | {figures} |" in DOCS, f"| {region} | {figures} |"
    assert billing.REGIONAL_READ in DOCS
    assert billing.REGIONAL_SOURCE.split(",")[0] in DOCS


def test_a_gib_of_a_disk_costs_more_than_one_in_a_bucket() -> None:
    for region, prices in billing.REGIONAL.items():
        assert 0 < prices.bucket_usd < prices.pd_balanced_usd < 0.2, region
        assert 0.03 < prices.e2_usd_per_hour < 0.06, region


def test_every_region_with_tpus_has_prices_but_us_central2() -> None:
    with_tpus = {catalogue.region_of(zone) for each in catalogue.GENERATIONS for zone in each.zones}
    assert with_tpus - set(billing.REGIONAL) == {"us-central2"}


def test_no_region_is_cheaper_than_the_one_that_stands_in() -> None:
    base = dataclasses.astuple(billing.REGIONAL[billing.STAND_IN])
    for region, prices in billing.REGIONAL.items():
        assert all(
            price >= of_base for price, of_base in zip(dataclasses.astuple(prices), base, strict=True)
        ), region


def test_the_docs_say_how_much_the_regions_differ() -> None:
    assert billing.regions_differ_by() == pytest.approx(0.5)
    assert "up to 50 %" in DOCS


def test_an_e2_machine_costs_as_much_as_its_share() -> None:
    small = billing.machine_usd_per_hour("e2-small", "europe-west4")
    large = billing.machine_usd_per_hour("e2-standard-8", "europe-west4")
    assert small == pytest.approx(13.46 / 730, rel=1e-3)
    assert large == pytest.approx(215.4 / 730, rel=1e-3)


@pytest.mark.parametrize("machine", ["n2-standard-2", "e2-custom-4-4096", "e2-highcpu-4", ""])
def test_a_machine_without_a_known_price_has_none(machine: str) -> None:
    assert billing.machine_usd_per_hour(machine, "us-central1") is None


def test_a_disk_costs_by_size_and_region() -> None:
    assert billing.disk_usd_per_hour("pd-balanced", 730, "us-central1") == pytest.approx(0.10)
    assert billing.disk_usd_per_hour("pd-balanced", 1460, "us-west4") == pytest.approx(0.22)


@pytest.mark.parametrize("disk_type", ["hyperdisk-balanced", "hyperdisk-ml", "unheard-of"])
def test_a_disk_that_is_billed_by_more_than_its_size_has_no_price(disk_type: str) -> None:
    assert billing.disk_usd_per_hour(disk_type, 100, "us-central1") is None


def test_cloud_nat_costs_by_vm_up_to_32_and_no_more_beyond() -> None:
    address = billing.EXTERNAL_ADDRESS.usd
    assert billing.nat_usd_per_hour(1) == pytest.approx(0.0014 + address)
    assert billing.nat_usd_per_hour(32) == pytest.approx(32 * 0.0014 + address)
    assert billing.nat_usd_per_hour(33) == billing.nat_usd_per_hour(1000) == pytest.approx(0.044 + address)


def test_a_region_without_prices_has_those_of_us_central1() -> None:
    assert not billing.is_listed("us-central2")
    assert billing.regional("us-central2") is billing.REGIONAL["us-central1"]


def test_the_gateway_of_the_zone_of_v4_has_a_price() -> None:
    assert (
        billing.machine_usd_per_hour(zones.gateway_machine_type("us-central2-b"), "us-central2") == 0.04749975
    )
    assert billing.machine_usd_per_hour("n1-standard-1", "europe-west4") is None
