"""What a configuration comes to: defaults, what is derived of what, in which forms values arrive, anything at all."""

import copy
import dataclasses
import datetime
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pulumi
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from infra import catalogue, pulumi_program
from infra.config import Config, ConfigError, DataDisk, GrantLine, reader

MAIN = {"name": "main", "accelerator": "v5litepod-8"}
LEAST: dict[str, object] = {"zone": "us-central1-a", "slices": [MAIN]}

FULL: dict[str, object] = yaml.safe_load(Path(__file__).with_name("full.yaml").read_text())


def read(values: Mapping[str, object], *, project: str = "my-project", stack: str = "dev") -> Config:
    return reader.read(values, project=project, stack=stack)


def as_pulumi_has_it(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list | dict):
        return json.dumps(value, default=lambda date: f"{date} 00:00:00 +0000 UTC")
    return json.dumps(value)


# --- defaults -----------------------------------------------------------------------------------------------


def test_a_zone_and_a_type_are_enough_and_nothing_is_open_or_allowed_that_was_not_asked_for() -> None:
    config = read(LEAST)
    (main,) = config.slices
    assert (main.accelerator, main.zone) == (catalogue.accelerator("v5litepod-8"), "us-central1-a")
    assert (main.capacity, main.provisioning, main.count) == ("on-demand", "queued", 1)
    assert (main.runtime_version, main.wait_s) == ("v2-alpha-tpuv5-lite", 12 * 3600)
    assert (main.valid_until_s, main.guaranteed_s, main.reservation) == (None, None, None)
    assert config.bucket is not None
    assert (config.bucket.name, config.bucket.region) == ("my-project-dev-tpu-stack", "us-central1")
    assert (config.bucket.soft_delete_days, config.bucket.temporary_days) == (7, 7)
    assert config.nfs is not None
    assert (config.nfs.kind, config.nfs.zone, config.nfs.size_gib) == ("gateway", "us-central1-a", 200)
    assert (config.nfs.machine_type, config.nfs.mount) == ("e2-small", "/mnt/share")
    assert (config.images.repository, config.images.region) == ("tpu-stack-dev", "us-central1")
    assert (config.images.keep, config.images.references) == (10, {})
    assert (config.keeper, config.notify.secrets) == (False, ())
    assert (config.grant, config.budget_usd_per_hour, config.protect) == ((), None, True)
    assert dataclasses.astuple(config.network) == (None, None, False)
    assert dataclasses.astuple(config.access) == ((), ())
    assert dataclasses.astuple(config.allow) == (False, False, False)


A, B = {"name": "a", "accelerator": "v5litepod-8"}, {"name": "b", "accelerator": "v6e-8"}
V4 = {"name": "v4", "accelerator": "v4-8"}


@pytest.mark.parametrize(
    ("values", "zones", "nfs_zone", "machine_type"),
    [
        # A slice's own place goes before that of the stack; what is not a slice is where the first one is.
        (
            {"zone": "us-west4-a", "slices": [A | {"zone": "europe-west4-b"}, B | {"zone": "us-central1-b"}]},
            ["europe-west4-b", "us-central1-b"], "europe-west4-b", "e2-small",
        ),
        (
            {"zone": "us-central1-a", "slices": [A, {**A, "name": "two", "region": "us-south1"}]},
            ["us-central1-a", "us-south1-a"], "us-central1-a", "e2-small",
        ),
        # A region stands for its only zone that lists the type.
        ({"region": "us-central1", "slices": [A, B]}, ["us-central1-a", "us-central1-b"], "us-central1-a", "e2-small"),
        # The gateway is what its zone has, an AI zone's in the zone beside it.
        ({"slices": [V4 | {"zone": "us-central2-b"}]}, ["us-central2-b"], "us-central2-b", "n1-standard-1"),
        ({"slices": [B | {"zone": "us-south1-ai1b"}]}, ["us-south1-ai1b"], "us-south1-b", "e2-small"),
    ],
)  # fmt: skip
def test_a_place_is_the_slice_s_own_or_the_stack_s(
    values: dict[str, object], zones: list[str], nfs_zone: str, machine_type: str
) -> None:
    config = read(values)
    assert config.bucket and config.nfs
    assert [each.zone for each in config.slices] == zones
    assert (config.nfs.zone, config.nfs.machine_type) == (nfs_zone, machine_type)
    assert config.bucket.region == config.images.region == catalogue.zone_region(nfs_zone)


GRANT = [
    {"type": "v5e", "zone": "us-central1-a", "chips": 64, "capacity": "spot"},
    {"type": "v5e", "zone": "us-west4-a", "chips": 8, "capacity": "spot"},
    {"type": "v5e", "zone": "us-west1-c", "chips": 64, "capacity": "on-demand"},
    {"type": "v5litepod", "zone": "europe-west4-b", "chips": 32, "capacity": "spot"},
    {"type": "v6e", "zone": "us-east1-d", "chips": 64, "capacity": "spot"},
]


@pytest.mark.parametrize(
    ("written", "zones", "how"),
    [
        ({"zones": ["us-west4-a", "us-central1-a"]}, ("us-west4-a", "us-central1-a"), ("first", 1800)),
        ({"zones": ["us-west4-a"]}, ("us-west4-a",), ("first", 0)),
        # Where the grant has enough of it, in the grant's order.
        (
            {"anywhere-in-grant": True, "zone-wait": "10m"},
            ("us-central1-a", "us-west4-a", "europe-west4-b"), ("first", 600),
        ),
        ({"anywhere-in-grant": True, "count": 4}, ("us-central1-a", "europe-west4-b"), ("first", 1800)),
        ({"anywhere-in-grant": True, "count": 5, "strategy": "race"}, ("us-central1-a",), ("race", 0)),
        ({"anywhere-in-grant": False, "zone": "us-west4-a"}, ("us-west4-a",), ("first", 0)),
    ],
)  # fmt: skip
def test_a_slice_may_be_in_the_zones_that_are_named_or_in_those_of_the_grant(
    written: dict[str, object], zones: tuple[str, ...], how: tuple[str, int]
) -> None:
    config = read({"zone": "us-south1-a", "slices": [{**A, "capacity": "spot", **written}], "grant": GRANT})
    (main,) = config.slices
    assert (main.zones, (main.strategy, main.zone_wait_s)) == (zones, how)
    # All that is no slice is where the first zone is, and every region has a subnet.
    assert config.bucket is not None and config.bucket.region == catalogue.zone_region(zones[0])
    assert set(config.regions) == {catalogue.zone_region(zone) for zone in zones}


FULL_NAME = "projects/my-project/locations/us-central1-a/reservations/"
ANY_THERE = "projects/other-project/locations/us-central1-a/reservations/-"
SHARED = "organizations/456/locations/us-central1-a/reservations/shared"


@pytest.mark.parametrize(
    ("written", "comes_to"),
    [
        # An up waits as long as the queue may take.
        ({}, {"wait_s": 12 * 3600}),
        ({"valid-until": "6h"}, {"wait_s": 6 * 3600}),
        ({"provisioning": "direct"}, {"wait_s": 900}),
        ({"wait": "25h1m"}, {"wait_s": 90060}),
        # A runtime version is taken as written unless it names another chip.
        ({"runtime-version": "v2-alpha-tpuv5-lite"}, {"runtime_version": "v2-alpha-tpuv5-lite"}),
        ({"runtime-version": "tpu-vm-tf-2.17.0-pod-pjrt"}, {"runtime_version": "tpu-vm-tf-2.17.0-pod-pjrt"}),
        # A reservation may be any, or another project's, a folder's or an organisation's.
        *(
            ({"capacity": "reserved", "reservation": short}, {"reservation": full})
            for short, full in (
                ("mine", f"{FULL_NAME}mine"),
                ("-", f"{FULL_NAME}-"),
                ("projects/my-project/reservations/mine", f"{FULL_NAME}mine"),
                (ANY_THERE, ANY_THERE),
                ("folders/123/reservations/-", "folders/123/locations/us-central1-a/reservations/-"),
                (SHARED, SHARED),
            )
        ),
        # What only looks like another type stays text.
        ({"labels": {"year": "2026", "on": "true"}}, {"labels": {"year": "2026", "on": "true"}}),
    ],
)  # fmt: skip
def test_what_is_written_of_a_slice_comes_to(written: dict[str, object], comes_to: dict[str, object]) -> None:
    (found,) = read({**LEAST, "slices": [{**MAIN, **written}]}).slices
    assert {name: getattr(found, name) for name in comes_to} == comes_to


def test_what_is_newer_than_the_lists_is_taken_where_that_is_said() -> None:
    newer = {"zone": "mars-north1-a", "runtime-version": "v2-alpha-tpuv5-litepod-next"}
    nfs = {"zone": "mars-north1-b", "machine-type": "e2-huge"}
    storage = {"bucket": {"region": "mars-south1"}, "nfs": nfs}
    config = read({"allow-unlisted": True, "slices": [{**MAIN, **newer}], "storage": storage})
    assert config.nfs is not None and config.bucket is not None
    assert (config.slices[0].region, config.bucket.region) == ("mars-north1", "mars-south1")
    assert config.slices[0].runtime_version == "v2-alpha-tpuv5-litepod-next"
    assert (config.nfs.zone, config.nfs.machine_type) == ("mars-north1-b", "e2-huge")


def test_a_slice_may_be_called_like_the_first_part_of_one_that_has_no_parts() -> None:
    two = [MAIN, {**MAIN, "name": "main-0"}, {**MAIN, "name": "main-2", "count": 2}]
    assert [each.name for each in read({**LEAST, "slices": two}).slices] == ["main", "main-0", "main-2"]


LENGTHS = ("1m", "60s", "30d")
OF_A_SLICE: list[dict[str, Any]] = [
    *({"count": count} for count in (1, 256)),
    *({key: length} for key in ("wait", "valid-until", "guaranteed-for") for length in LENGTHS),
    {"valid-until": "6h", "wait": "6h"},
    *({"data-disks": [{"name": "d", "size-gib": size}]} for size in (10, 65536)),
    {"accelerator": "v6e-8", "zone": "us-central1-b", "data-disks": [{"name": "d", "size-gib": 4}]},
    {"name": "a" * 30},
]
POOLS = "iam.googleapis.com/locations/global/workforcePools/p/subject/ada"
WORKLOADS = "iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/*"
PRINCIPALS = ["domain:example.com", "serviceAccount:a@p.iam.gserviceaccount.com", f"principal://{POOLS}"]
OF_A_STACK: list[dict[str, Any]] = [
    *({"storage": {"bucket": {"soft-delete-days": days}}} for days in (0, 7, 90)),
    *({"storage": {"bucket": {"temporary-days": days}}} for days in (1, 365)),
    *({"storage": {"bucket": {"name": name}}} for name in ("abc", "a" * 63, "1_a")),
    *({"storage": {"nfs": {"size-gib": size}}} for size in (10, 65536)),
    *({"storage": {"nfs": {"kind": "filestore", "size-gib": size}}} for size in (1024, 65433)),
    *({"storage": {"nfs": {"mount": mount}}} for mount in ("/data", "/srv/shared", "/mnt/a.b_c-D/e")),
    *({"images": {"keep": keep}} for keep in (1, 1000)),
    *({"budget-usd-per-hour": usd} for usd in (0.01, 1, 1_000_000)),
    {"access": {"members": [*PRINCIPALS, f"principalSet://{WORKLOADS}"]}},
]


@pytest.mark.parametrize("written", [*({"slices": [{**MAIN, **each}]} for each in OF_A_SLICE), *OF_A_STACK])
def test_the_limits_themselves_are_taken(written: dict[str, object]) -> None:
    assert read({**LEAST, **written})


def test_a_disk_that_exists_has_a_full_name_is_read_only_unless_asked_otherwise_and_may_be_shared() -> None:
    full = "projects/my-project/zones/us-central1-a/disks/"
    disks = [{"name": "a", "source": "a"}, {"name": "b", "source": f"{full}b", "mode": "read-write"}]
    two = [{**MAIN, "data-disks": disks}, {**MAIN, "name": "two", "data-disks": disks[:1]}]
    main, other = read({**LEAST, "slices": two}).slices
    assert [(disk.source, disk.mode) for disk in main.data_disks] == [
        (f"{full}a", "read-only"),
        (f"{full}b", "read-write"),
    ]
    assert [disk.source for disk in other.data_disks] == [f"{full}a"]


@pytest.mark.parametrize(
    ("accelerator", "disk_type"),
    [("v3-8", "pd-balanced"), ("v5litepod-8", "pd-balanced"), ("v6e-8", "hyperdisk-balanced")],
)
def test_a_new_disk_is_of_a_type_that_the_generation_takes(accelerator: str, disk_type: str) -> None:
    disks = [{"name": "scratch", "size-gib": 100}]
    written = {"name": "main", "accelerator": accelerator, "zone": "europe-west4-a", "data-disks": disks}
    (disk,) = read({**LEAST, "slices": [written]}).slices[0].data_disks
    assert disk == DataDisk(name="scratch", disk_type=disk_type, size_gib=100, source=None, mode="read-write")


def test_a_stack_can_do_without_storage_and_filestore_begins_with_the_least_that_google_makes() -> None:
    without = read({**LEAST, "storage": {"bucket": False, "nfs": {"kind": "none"}}})
    assert (without.bucket, without.nfs) == (None, None)
    nfs = read({**LEAST, "storage": {"nfs": {"kind": "filestore"}}}).nfs
    assert nfs is not None and nfs.size_gib == reader.LEAST_GIB["filestore"]


@pytest.mark.parametrize("name", ["v5e", "v5litepod"])
@pytest.mark.parametrize(
    "until", [datetime.date(2026, 12, 31), "2026-12-31", "2026-12-31 00:00:00 +0000 UTC", None]
)
def test_a_grant_is_read_as_google_and_the_types_name_it_and_its_end_as_yaml_and_pulumi_write_it(
    name: str, until: object
) -> None:
    line = {"type": name, "zone": "us-central1-a", "chips": 64, "capacity": "on-demand"}
    end = {"until": until} if until else {}
    (found,) = read({**LEAST, "grant": [line | end]}).grant
    assert dataclasses.replace(found, until=None) == GrantLine(
        generation="v5e", zone="us-central1-a", chips=64, capacity="on-demand", until=None
    )
    assert found.until == (datetime.date(2026, 12, 31) if until else None)


@given(
    st.from_regex(r"[a-z][-a-z0-9]{4,28}[a-z0-9]", fullmatch=True), st.from_regex(r"[-._a-zA-Z0-9]{1,100}")
)
def test_the_default_bucket_has_a_name_that_google_takes_or_is_refused(project: str, stack: str) -> None:
    try:
        bucket = read(LEAST, project=project, stack=stack).bucket
    except ConfigError as error:
        assert all(re.match(r"stack: |tpu-stack:storage\.bucket\.name: ", each) for each in error.problems)
        return
    assert bucket is not None
    assert re.fullmatch(r"[a-z0-9][-a-z0-9]{1,61}[a-z0-9]", bucket.name)
    assert not re.search(r"^goog|google", bucket.name)


# --- how values arrive --------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [LEAST, FULL])
def test_texts_as_pulumi_hands_them_over_are_read_like_the_yaml_they_are_made_of(
    values: dict[str, object],
) -> None:
    assert read({key: as_pulumi_has_it(value) for key, value in values.items()}) == read(values)


def test_a_running_stack_is_read_from_what_pulumi_has_unknown_keys_secrets_and_the_providers_zone_included(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pulumi, "get_stack", lambda: "dev")
    monkeypatch.delenv("PULUMI_CONFIG", raising=False)
    written = {f"tpu-stack:{key}": as_pulumi_has_it(value) for key, value in FULL.items()}
    others = {
        "tpu-stack:slices": json.dumps([{"name": "main", "accelerator": "v6e-8"}]),
        "tpu-stack:zoen": "x",
    }
    try:
        pulumi.runtime.set_all_config({**written, "gcp:project": "my-project", "other:key": "1"}, [])
        assert pulumi_program.configuration() == read(FULL)
        wrong = {**others, "tpu-stack:protect": "true", "gcp:zone": "us-west1-b"}
        pulumi.runtime.set_all_config(wrong, ["tpu-stack:protect"])
        with pytest.raises(ConfigError) as error:
            pulumi_program.configuration()
    finally:
        pulumi.runtime.set_all_config({}, [])
    assert [each.partition(": ")[::2] for each in error.value.problems] == [
        ("tpu-stack:protect", "is kept as a secret, nothing here is one; set it anew without --secret"),
        ("gcp:project", "missing; name your project: `pulumi config set gcp:project PROJECT-ID`"),
        (
            "tpu-stack:slices[0].zone",
            ("missing; write it here, or tpu-stack:zone for all slices "
            "(gcp:zone is the provider's own and not read for this)"),
        ),
        ("tpu-stack:zoen", "unknown key; did you mean zone?"),
    ]  # fmt: skip


# --- anything at all is read or answered ------------------------------------------------------------------------


keys = (
    st.sampled_from(["name", "zone", "type", "source", "count", "labels"])
    | st.text(max_size=6)
    | st.integers()
    | st.none()
    | st.booleans()
)
scalars = (
    st.sampled_from(
        ["main", "v6e-8", "us-central1-a", "us-central1", "spot", "reserved", "direct", "6h", "4x4"]
    )
    | st.text(max_size=8)
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.booleans()
    | st.none()
    | st.dates()
    | st.datetimes()
    | st.binary(max_size=3)
)
garbage = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=5),
    max_leaves=20,
)


def places(value: object, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*place, key)
        yield from places(each, (*place, key))


def mistakes(values: Any, project: str | None = "my-project", stack: str = "dev") -> tuple[str, ...]:
    """Every one on a line that can be shown."""
    try:
        config = reader.read(values, project=project, stack=stack)
    except ConfigError as error:
        assert error.problems
        assert [each for each in error.problems if not each.isprintable() or len(each) > 1000] == []
        return error.problems
    assert config.regions
    return ()


@given(st.sampled_from(sorted(places(FULL), key=repr)), garbage | garbage.map(str))
def test_a_value_that_is_replaced_by_anything_at_all_is_read_or_is_a_mistake_with_a_place(
    place: tuple[Any, ...], value: object
) -> None:
    values: Any = copy.deepcopy(FULL)
    holder = values
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    assert all(each.startswith("tpu-stack:") for each in mistakes(values))


@given(st.dictionaries(keys.map(str), garbage, max_size=4), st.none() | st.text(), st.text())
@example({"storage": "[" * 100_000, "slices": "{"}, "my-project", "dev")
@example({"budget-usd-per-hour": "1" * 5000, "\ud800\n": 1, "slices": [{"\x00": {}}]}, "my-project", "dev")
@example({"protect": 10**4000, "slices": [{**MAIN, 10**4000: 1}]}, None, "dev")
def test_any_keys_any_project_and_any_stack_are_a_configuration_or_a_list_of_mistakes(
    values: dict[str, object], project: str | None, stack: str
) -> None:
    mistakes({**LEAST, **values}, project, stack)
