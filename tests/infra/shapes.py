"""The shapes of stack that the rules of `infra/` are looked at in."""

from __future__ import annotations

from typing import Any

import pytest

TWO_ZONES = [
    {"name": "a", "accelerator": "v5litepod-16", "capacity": "spot"},
    {"name": "b", "accelerator": "v5litepod-8", "provisioning": "direct"},
    {"name": "c", "accelerator": "v6e-8", "zone": "us-east1-d"},
]

SHAPES: dict[str, dict[str, Any]] = {
    "one slice": {},
    "three slices in two zones": {"slices": TWO_ZONES, "allow_cross_region": True},
    "multislice": {"slices": [{"name": "m", "accelerator": "v5litepod-16", "capacity": "spot", "count": 2}]},
    "existing network": {"network": {"existing": "default"}},
    "Filestore": {"storage": {"nfs": {"kind": "filestore"}}},
    "no slices": {"slices": []},
    "no storage at all": {"storage": {"bucket": False, "nfs": {"kind": "none"}}},
}

every_shape = pytest.mark.parametrize("values", SHAPES.values(), ids=SHAPES)
