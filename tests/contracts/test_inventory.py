"""Contract 1: what infra writes launch reads back whole, and anything else is refused with its place and its rule."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.inventory import Gateway, Host, Inventory, InventoryError, Slice, Storage, from_json, to_json

HOST = Host(
    index=0,
    name="w-0",
    internal_address="10.0.0.2",
    external_address=None,
    user="tpu",
    host_keys=("ssh-ed25519 AAAA",),
    reach="gateway",
)
SLICE = Slice(
    name="main",
    accelerator_type="v5litepod-16",
    generation="v5e",
    topology="4x4",
    zone="europe-west4-b",
    capacity="spot",
    origin="queued-resource main",
    count=1,
    devices_per_host=4,
    hosts=(HOST,),
)
WHOLE = Inventory(
    stack="dev",
    project="project",
    storage=Storage(bucket_url="gs://b", bucket_region="europe-west4", nfs_source=None, nfs_mount=None),
    images={"jax": "registry/jax@sha256:0"},
    gateway=Gateway(
        name="gateway", zone="europe-west4-b", address="10.0.0.9", host_keys=("ssh-ed25519 BBBB",), user="tpu"
    ),
    slices=(SLICE,),
)


@settings(max_examples=30)
@given(st.builds(Inventory, version=st.just(1)))
def test_what_is_written_is_read_back_the_same(inventory: Inventory) -> None:
    assert from_json(to_json(inventory)) == inventory


def said(value: Any) -> str:
    with pytest.raises(InventoryError) as error:
        from_json(value if isinstance(value, str) else json.dumps(value))
    return str(error.value)


def changed(**places: Any) -> dict[str, Any]:
    """The whole inventory's JSON with values put at `slices__0__zone` and the like; ... takes the key away."""
    value: dict[str, Any] = json.loads(to_json(WHOLE))
    for path, new in places.items():
        *parents, last = (int(part) if part.isdigit() else part for part in path.split("__"))
        place: Any = value
        for parent in parents:
            place = place[parent]
        if new is ...:
            del place[last]
        else:
            place[last] = new
    return value


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_refused_with_what_to_do(version: Any) -> None:
    text = said(changed(version=version))
    assert f"version {version!r} cannot be read" in text
    assert "reads version 1; run `pulumi up` and `fab` from the same checkout" in text


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"text"', "\ufeff{}"])
def test_what_is_no_inventory_at_all_is_refused(text: str) -> None:
    assert said(text).startswith("inventory: ")


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"version": True}, "version: True is not of type int"),
        ({"version": 1.0}, "version: 1.0 is not of type int"),
        ({"slices__0__zone": ...}, "inventory.slices[0].zone is missing"),
        ({"slices__0__hosts__0__reach": ...}, "inventory.slices[0].hosts[0].reach is missing"),
        ({"storage__bucket": "x"}, "inventory.storage.bucket is not known"),
        (
            {"slices__0__zone": ..., "slices__0__zome": 1},
            "slices[0].zone is missing; inventory.slices[0].zome is not",
        ),
        (
            {"slices__0__capacity": "cheap"},
            "slices[0].capacity: 'cheap' is not one of on-demand, spot, reserved",
        ),
        ({"slices__0__capacity": ["spot"]}, "slices[0].capacity: ['spot'] is not one of"),
        ({"slices__0__devices_per_host": "4"}, "slices[0].devices_per_host: '4' is not of type int"),
        ({"slices__0__hosts": {}}, "slices[0].hosts: {} is not a list"),
        ({"slices__0__hosts__0": "w-0"}, "slices[0].hosts[0]: 'w-0' is not an object"),
        ({"slices__0__hosts__0__host_keys__0": None}, "hosts[0].host_keys[0]: None is not of type str"),
        ({"images__jax": None}, "inventory.images.jax: None is not of type str"),
        ({"images": []}, "inventory.images: [] is not an object"),
        ({"gateway": {}}, "inventory.gateway.address is missing"),
        ({"stack": None}, "inventory.stack: None is not of type str"),
    ],
)
def test_a_mistake_is_told_with_its_place_and_its_rule(places: dict[str, Any], message: str) -> None:
    assert message in said(changed(**places))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
leaves = st.sampled_from(
    ["stack", "project", "storage", "images", "gateway", "slices", "storage__nfs_mount", "gateway__user"]
    + [f"slices__0__{field.name}" for field in dataclasses.fields(Slice)]
    + [f"slices__0__hosts__0__{field.name}" for field in dataclasses.fields(Host)]
)


@given(leaves, json_values)
def test_whatever_stands_in_a_place_is_read_or_refused_with_a_message(place: str, value: Any) -> None:
    text = json.dumps(changed(**{place: value}))
    try:
        read = from_json(text)
    except InventoryError as error:
        assert str(error).startswith("inventory")
    else:
        assert json.loads(to_json(read)) == json.loads(text)
