"""List prices of TPU chips by generation and region. Data and one look-up, no I/O.

All from SkyPilot's price catalogue v8 (https://github.com/skypilot-org/skypilot-catalog, catalogs/v8/gcp/vms.csv at
commit 006059e), which is made from the SKUs of Google's billing API; read in November 2026. Spot prices float:
Google may change them every month. A reservation's price is between its owner and Google. Disks, addresses and traffic
are not in it.
"""

from __future__ import annotations

from typing import NamedTuple

from contracts.inventory import Capacity

READ_IN = "November 2026"


class Price(NamedTuple):
    """USD per chip and hour; spot is None where Google lists none."""

    on_demand_usd_per_chip_hour: float
    spot_usd_per_chip_hour: float | None

    def usd_per_chip_hour(self, capacity: Capacity) -> float | None:
        """The price for a kind of capacity; None where there is no list price for it."""
        if capacity == "on-demand":
            return self.on_demand_usd_per_chip_hour
        return self.spot_usd_per_chip_hour if capacity == "spot" else None


ONE_HOST: dict[str, dict[str, Price]] = {
    "v2": {
        "us-central1": Price(1.125, 0.3375),
        "europe-west4": Price(1.2375, 0.31556),
        "asia-east1": Price(1.305, 0.3915),
    },
    "v3": {
        "us-central1": Price(2.00, 0.51),
        "europe-west4": Price(2.20, 0.561),
    },
}
"""Generation → region → price, of generations that have another price on one host (v2-8, v3-8) than in a slice."""

PRICES: dict[str, dict[str, Price]] = {
    "v2": {
        "us-central1": Price(1.50, 0.3825),
        "europe-west4": Price(1.50, 0.3825),
    },
    "v3": {
        "europe-west4": Price(2.00, 0.66),
    },
    "v4": {
        "us-central2": Price(3.22, 0.9215),
    },
    "v5e": {
        "us-central1": Price(1.20, 0.24493),
        "us-south1": Price(1.416, 0.5664),
        "us-west1": Price(1.20, 0.24493),
        "us-west4": Price(1.20, 0.48),
        "europe-west4": Price(1.56, 0.44498),
    },
    "v5p": {
        "us-central1": Price(4.20, 0.8357),
        "us-east5": Price(4.20, 1.68),
        "europe-west4": Price(4.2525, 1.34849),
    },
    "v6e": {
        "us-central1": Price(2.70, 0.54421),
        "us-east1": Price(2.70, 0.54421),
        "us-east5": Price(2.70, 1.215),
        "europe-west4": Price(2.97, 1.03748),
        "asia-northeast1": Price(3.24, 0.94352),
        "asia-south1": Price(3.24, 2.27),
        "asia-southeast1": Price(2.97, 0.36292),
        # The catalogue's spot price here is a placeholder of 700 USD.
        "southamerica-west1": Price(2.70, None),
    },
}
"""Generation → region → price."""

DEAREST = "v5p"
"""Of the generations above."""


def lowest_usd_per_chip_hour(generation: str, capacity: Capacity) -> float | None:
    """The least that a chip of a generation costs in any region; None where no price is known.

    Where a newer generation has no price at all, the dearest of the others stands for it; for flex-start, which has
    none, spot does, which is no dearer.
    """
    as_known: Capacity = "spot" if capacity == "flex-start" else capacity
    table = PRICES[generation] if generation in PRICES else PRICES[DEAREST]
    known_prices = [price.usd_per_chip_hour(as_known) for price in table.values()]
    return min((usd for usd in known_prices if usd is not None), default=None)


def list_price(generation: str, region: str, *, hosts: int) -> Price | None:
    """The price of a chip in a slice of so many hosts; None where none is known."""
    table = ONE_HOST.get(generation, PRICES.get(generation, {})) if hosts == 1 else PRICES.get(generation, {})
    return table.get(region)
