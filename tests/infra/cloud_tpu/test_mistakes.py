"""What is wrong with a queued resource's properties, each by its name, all at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pulumi.output import Unknown

from infra.cloud_tpu import mistakes
from infra.queued_resource import QueuedResourceArgs
from tests.infra.cloud_tpu.lab import wanted_props

UNKNOWN = Unknown()  # type: ignore[no-untyped-call]
DISK = "projects/grant/zones/us-central1-a/disks/data"


def test_what_is_right_has_no_mistakes() -> None:
    assert mistakes.found_in(wanted_props()) == ()
    assert mistakes.found_in(wanted_props(__provider="gASV", data_disks=[{"source_disk": DISK}])) == ()


@pytest.mark.parametrize("owner", ["projects/other", "folders/123", "organizations/456"])
def test_an_ai_zone_and_any_reservation_of_whoever_shares_one_are_right(owner: str) -> None:
    zone = "us-south1-ai1b"
    any_reservation = f"{owner}/locations/{zone}/reservations/-"
    asked = wanted_props(zone=zone, capacity="reserved", reservation_name=any_reservation)
    assert mistakes.found_in(asked) == ()


def test_every_property_is_known() -> None:
    names = {field.name for field in dataclasses.fields(QueuedResourceArgs)}
    assert names == mistakes.KNOWN


@pytest.mark.parametrize(
    ("change", "mistake"),
    [
        ({"project": None}, ("project", "is missing")),
        ({"owner": None}, ("owner", "is missing")),
        ({"zone": "us-central1"}, ("zone", '"us-central1" is no zone; such as us-central1-a')),
        ({"owner": "A"}, ("owner", '"A" must be fit for a label')),
        ({"wait": 3}, ("wait", "is no property of a queued resource")),
        ({"wait_s": "3h"}, ("wait_s", '"3h" must be a whole number')),
        ({"wait_s": 1.5}, ("wait_s", "1.5 must be a whole number")),
        ({"wait_s": -1.0}, ("wait_s", "-1.0 must not be negative")),
        ({"valid_until_s": 0}, ("valid_until_s", "0 must be more than 0")),
        ({"node_count": 0}, ("node_count", "0 must be 1 to 256")),
        ({"node_count": True}, ("node_count", "True must be a whole number")),
        ({"capacity": "flex"}, ("capacity", '"flex" must be on-demand, spot, reserved')),
        ({"labels": {"Team": "x"}}, ("labels", '"Team: x" has letters that a label must not have')),
        ({"labels": {"tpu-stack-owner": "x"}}, ("labels", '"tpu-stack-owner" is set by itself, from owner')),
        ({"labels": {"team": 3}}, ("labels", "{'team': 3} must be a table of texts")),
        ({"tags": ["A"]}, ("tags", '"A" is no network tag: lower-case letters, digits and hyphens')),
        ({"external_addresses": "yes"}, ("external_addresses", '"yes" must be true or false')),
        (
            {"accelerator_type": None},
            ("accelerator_type", "is missing; or give accelerator_generation and topology"),
        ),
        ({"topology": "4x4"}, ("accelerator_type", "excludes topology: give one or the other")),
        (
            {"capacity": "reserved"},
            ("reservation_name", "must be projects/P/locations/Z/reservations/R for reserved capacity"),
        ),
        ({"reservation_name": "r"}, ("reservation_name", "goes with reserved capacity, not with spot")),
        (
            {"guaranteed_s": 60},
            ("guaranteed_s", "is not to be had for spot capacity, which can be taken at any time"),
        ),
        ({"data_disks": ["d"]}, ("data_disks[0]", "needs a source_disk, projects/P/zones/Z/disks/D")),
        (
            {"data_disks": [{"source_disk": DISK}], "node_count": 2},
            ("data_disks[0]", "can be written by one node only, and there are 2: use read-only"),
        ),
        (
            {"data_disks": [{"source_disk": DISK, "mode": "rw"}]},
            ("data_disks[0]", '"rw" must be read-write or read-only'),
        ),
    ],
)
def test_each_mistake_is_told_by_its_property(change: dict[str, Any], mistake: tuple[str, str]) -> None:
    assert mistakes.found_in({**wanted_props(), **change}) == (mistake,)


@pytest.mark.parametrize(
    ("accelerator_generation", "topology", "names"),
    [("V4", "2x2x4", []), ("v4", "2x2x4", ["accelerator_generation"]), ("V4", "2*2", ["topology"])],
)
def test_a_shape_is_a_generation_of_the_api_and_a_topology(
    accelerator_generation: str, topology: str, names: list[str]
) -> None:
    props = wanted_props(
        accelerator_type=None, accelerator_generation=accelerator_generation, topology=topology
    )
    assert [name for name, _ in mistakes.found_in(props)] == names


def test_a_name_leaves_room_for_the_numbers_of_its_nodes() -> None:
    assert mistakes.found_in(wanted_props(queued_resource_id="a" * 63)) == ()
    ((name, wrong),) = mistakes.found_in(wanted_props(queued_resource_id="a" * 63, node_count=11.0))
    assert (name, "at most 60" in wrong) == ("queued_resource_id", True)


def test_all_mistakes_come_at_once() -> None:
    found = mistakes.found_in(wanted_props(zone="nowhere", capacity="flex", wait_s=None))
    assert sorted(name for name, _ in found) == ["capacity", "wait_s", "zone"]


@pytest.mark.parametrize("name", sorted(mistakes.KNOWN))
def test_what_is_not_known_yet_is_no_mistake(name: str) -> None:
    assert mistakes.found_in({**wanted_props(), name: UNKNOWN}) == ()


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(mistakes.KNOWN)), ANYTHING))
def test_whatever_is_given_is_answered_by_mistakes_and_by_nothing_else(props: dict[str, Any]) -> None:
    assert isinstance(mistakes.found_in({**wanted_props(), **props}), tuple)
