"""The simulated Compute Engine on a frozen clock, with our provider in front of it."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from contracts.aliases import Json
from infra import naming
from infra.compute_slice import ComputeSliceProvider
from rehearsal.simulated_cloud import Clock, SimulatedCloud
from tests.infra.cloud_tpu.lab import OWNER, Cloud

A, B = ZONES = ("us-east5-a", "us-central1-b")
REGIONS = {zone: zone.rpartition("-")[0] for zone in ZONES}
SPOT = {zone: f"{zone}:v6e:spot" for zone in ZONES}
MODELS = {
    "spot": "SPOT",
    "flex-start": "FLEX_START",
    "reserved": "RESERVATION_BOUND",
    "on-demand": "STANDARD",
}


def link(region: str, collection: str, name: str) -> str:
    return f"projects/grant/regions/{region}/{collection}/{name}"


def compute_props(**more: Any) -> Json:
    """Properties of a spot slice of 16 chips, 4 hosts, as the engine hands them over."""
    capacity, hosts = more.get("capacity", "spot"), more.get("hosts", 4)
    kind = f"{capacity}-{more.get('machine_type', 'ct6e-standard-4t')}"
    props = {
        "api": "compute",
        "project": "grant",
        "zone": A,
        "slice_id": "main",
        "owner": OWNER,
        "accelerator_type": f"v6e-{4 * hosts}",
        "generation": "v6e",
        "topology": "4x4",
        "machine_type": "ct6e-standard-4t",
        "hosts": hosts,
        "count": 1,
        "capacity": capacity,
        "wait_s": 3600,
        "templates": {region: link(region, "instanceTemplates", kind) for region in REGIONS.values()},
        "policies": {region: link(region, "resourcePolicies", "p-4x4") for region in REGIONS.values()}
        if hosts > 1
        else None,
    }
    return {name: value for name, value in (props | more).items() if value is not None}


class ComputeLab(Cloud):
    """A cloud whose provider makes slices on Compute Engine."""

    def __init__(self, api: SimulatedCloud, clock: Clock) -> None:
        super().__init__(api, clock, ComputeSliceProvider(), compute_props)
        for region in REGIONS.values():
            for capacity in MODELS:
                self.put_template(region, capacity)
            policy = {"type": "HIGH_THROUGHPUT", "acceleratorTopology": "4x4"}
            self._post(region, "resourcePolicies", {"name": "p-4x4", "workloadPolicy": policy})

    def put_template(self, region: str, capacity: str, name: str = "", **more: Any) -> None:
        scheduling: Json = {"provisioningModel": MODELS[capacity], "onHostMaintenance": "TERMINATE"}
        if capacity == "flex-start":
            scheduling |= {"instanceTerminationAction": "DELETE", "maxRunDuration": {"seconds": "86400"}}
        properties = {
            "machineType": "ct6e-standard-4t",
            "labels": {"tpu-stack": "dev"},
            "scheduling": scheduling,
            "networkInterfaces": [{"network": "n", "subnetwork": "s"}],
            **more,
        }
        name = name or f"{capacity}-ct6e-standard-4t"
        self._post(region, "instanceTemplates", {"name": name, "properties": properties})

    def _post(self, region: str, collection: str, body: Json) -> None:
        path = f"/compute/v1/projects/grant/regions/{region}/{collection}"
        answered = self.api.server.answer("POST", path, json.dumps(body).encode())
        assert answered is not None and answered[0] == 200, answered

    # --- what there is ----------------------------------------------------------------------------------------------

    def groups(self) -> dict[str, str]:
        """Zone/name → state of each group."""
        return {_short(path): state for path, state in self.control.alive()["groups"].items()}

    def machines(self) -> dict[str, str]:
        """Zone/name → status of each instance."""
        return {_short(path): status for path, status in self.control.alive()["instances"].items()}

    def put_group(self, zone: str, name: str, owner: str = "someone-else") -> None:
        """A group of somebody else's making."""
        region = REGIONS[zone]
        self.session.clients.compute.insert_group(
            "grant",
            zone,
            {
                "name": name,
                "baseInstanceName": f"{name}-w-#",
                "description": f"{naming.OWNER_LABEL}={owner}",
                "instanceTemplate": link(region, "instanceTemplates", "spot-ct6e-standard-4t"),
                "allInstancesConfig": {"properties": {"labels": {naming.OWNER_LABEL: owner}}},
                "targetSize": 4,
                "targetSizePolicy": {"mode": "BULK"},
                "resourcePolicies": {"workloadPolicy": link(region, "resourcePolicies", "p-4x4")},
            },
        )


def _short(path: str) -> str:
    _, _, _, zone, _, name = path.split("/")
    return f"{zone}/{name}"


@contextlib.contextmanager
def opened_lab(capacity: Mapping[str, int] | None = None) -> Iterator[ComputeLab]:
    clock = Clock(frozen_at=1_800_000_000.0)
    with SimulatedCloud(clock=clock, capacity=dict(capacity or {})) as api:
        lab = ComputeLab(api, clock)
        try:
            yield lab
        finally:
            lab.session.clients.close()
