"""What a configuration comes to: defaults, what is derived of what, in which forms values arrive, anything at all."""

from __future__ import annotations

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
from infra.config.section import Section

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
    assert (config.grant, config.budget_usd_per_hour, config.protect) == ((), None, True)
    assert dataclasses.astuple(config.network) == (None, None, False)
    assert dataclasses.astuple(config.access) == ((), ())
    assert dataclasses.astuple(config.allow) == (False, False, False)


A, B = {"name": "a", "accelerator": "v5litepod-8"}, {"name": "b", "accelerator": "v6e-8"}


@pytest.mark.parametrize(
    ("values", "zones", "storage_zone"),
    [
        # A slice's own place goes before that of the stack; what is not a slice is where the first one is.
        (
            {"zone": "us-west4-a", "slices": [A | {"zone": "europe-west4-b"}, B | {"zone": "us-central1-b"}]},
            ["europe-west4-b", "us-central1-b"],
            "europe-west4-b",
        ),
        (
            {"zone": "us-central1-a", "slices": [A, {**A, "name": "two", "region": "us-south1"}]},
            ["us-central1-a", "us-south1-a"],
            "us-central1-a",
        ),
        # A region stands for its only zone that lists the type.
        ({"region": "us-central1", "slices": [A, B]}, ["us-central1-a", "us-central1-b"], "us-central1-a"),
    ],
)
def test_a_place_is_the_slice_s_own_or_the_stack_s(
    values: dict[str, object], zones: list[str], storage_zone: str
) -> None:
    config = read(values)
    assert config.bucket and config.nfs
    assert [each.zone for each in config.slices] == zones
    assert config.nfs.zone == storage_zone
    assert config.bucket.region == config.images.region == catalogue.region_of(storage_zone)


@pytest.mark.parametrize(
    ("written", "wait_s"),
    [({}, 12 * 3600), ({"valid-until": "6h"}, 6 * 3600), ({"provisioning": "direct"}, 900), ({"wait": "25h1m"}, 90060)],
)  # fmt: skip
def test_an_up_waits_as_long_as_the_queue_may_take(written: dict[str, object], wait_s: int) -> None:
    assert read({**LEAST, "slices": [{**MAIN, **written}]}).slices[0].wait_s == wait_s


@pytest.mark.parametrize(
    ("version", "newer"),
    [
        ("v2-alpha-tpuv5-lite", {}),
        ("tpu-vm-tf-2.17.0-pod-pjrt", {}),
        ("v2-alpha-tpuv5-litepod-next", {"allow-unlisted": True}),
    ],
)
def test_a_runtime_version_is_taken_as_written_unless_it_names_another_chip(
    version: str, newer: dict[str, Any]
) -> None:
    values = {**LEAST, **newer, "slices": [{**MAIN, "runtime-version": version}]}
    assert read(values).slices[0].runtime_version == version


def test_what_is_newer_than_the_lists_is_taken_where_that_is_said() -> None:
    values = {
        "allow-unlisted": True,
        "slices": [{**MAIN, "zone": "mars-north1-a"}],
        "storage": {
            "bucket": {"region": "mars-south1"},
            "nfs": {"zone": "mars-north1-b", "machine-type": "e2-huge"},
        },
    }
    config = read(values)
    assert config.nfs is not None and config.bucket is not None
    assert (config.slices[0].region, config.bucket.region) == ("mars-north1", "mars-south1")
    assert (config.nfs.zone, config.nfs.machine_type) == ("mars-north1-b", "e2-huge")


@pytest.mark.parametrize(
    ("zone", "accelerator", "nfs_zone", "machine_type"),
    [
        ("us-central1-a", "v5litepod-8", "us-central1-a", "e2-small"),
        ("us-central2-b", "v4-8", "us-central2-b", "n1-standard-1"),
        ("us-south1-ai1b", "v6e-8", "us-south1-b", "e2-small"),
    ],
)
def test_the_gateway_is_by_default_what_its_zone_has(
    zone: str, accelerator: str, nfs_zone: str, machine_type: str
) -> None:
    config = read({"slices": [{**MAIN, "zone": zone, "accelerator": accelerator}]})
    assert config.nfs is not None and config.bucket is not None
    assert (config.nfs.zone, config.nfs.machine_type) == (nfs_zone, machine_type)
    assert config.bucket.region == zone.rpartition("-")[0]


def test_a_slice_may_be_called_like_the_first_part_of_one_that_has_no_parts() -> None:
    two = [MAIN, {**MAIN, "name": "main-0"}, {**MAIN, "name": "main-2", "count": 2}]
    assert [each.name for each in read({**LEAST, "slices": two}).slices] == ["main", "main-0", "main-2"]


OF_A_SLICE: list[dict[str, Any]] = [
    *({"count": count} for count in (1, 256)),
    *({key: length} for key in ("wait", "valid-until", "guaranteed-for") for length in ("1m", "60s", "30d")),
    {"valid-until": "6h", "wait": "6h"},
    *({"data-disks": [{"name": "d", "size-gib": size}]} for size in (10, 65536)),
    {"accelerator": "v6e-8", "zone": "us-central1-b", "data-disks": [{"name": "d", "size-gib": 4}]},
    {"name": "a" * 30},
]
OF_A_STACK: list[dict[str, Any]] = [
    *({"storage": {"bucket": {"soft-delete-days": days}}} for days in (0, 7, 90)),
    *({"storage": {"bucket": {"temporary-days": days}}} for days in (1, 365)),
    *({"storage": {"bucket": {"name": name}}} for name in ("abc", "a" * 63, "1_a")),
    *({"storage": {"nfs": {"size-gib": size}}} for size in (10, 65536)),
    *({"storage": {"nfs": {"kind": "filestore", "size-gib": size}}} for size in (1024, 65433)),
    *({"storage": {"nfs": {"mount": mount}}} for mount in ("/data", "/srv/shared", "/mnt/a.b_c-D/e")),
    *({"images": {"keep": keep}} for keep in (1, 1000)),
    *({"budget-usd-per-hour": usd} for usd in (0.01, 1, 1_000_000)),
    {"access": {"members": ["domain:example.com", "serviceAccount:a@p.iam.gserviceaccount.com"]}},
    {
        "access": {
            "members": [
                "principal://iam.googleapis.com/locations/global/workforcePools/p/subject/ada",
                "principalSet://iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/*",
            ]
        }
    },
]


@pytest.mark.parametrize("written", [*({"slices": [{**MAIN, **each}]} for each in OF_A_SLICE), *OF_A_STACK])
def test_the_limits_themselves_are_taken(written: dict[str, object]) -> None:
    assert read({**LEAST, **written})


@pytest.mark.parametrize(
    ("written", "full"),
    [
        ("mine", "projects/my-project/locations/us-central1-a/reservations/mine"),
        ("-", "projects/my-project/locations/us-central1-a/reservations/-"),
        (
            "projects/other-project/reservations/theirs",
            "projects/other-project/locations/us-central1-a/reservations/theirs",
        ),
        ("projects/other-project/locations/us-central1-a/reservations/-",) * 2,
        ("folders/123/reservations/-", "folders/123/locations/us-central1-a/reservations/-"),
        ("organizations/456/locations/us-central1-a/reservations/shared",) * 2,
    ],
)
def test_a_reservation_may_be_any_or_another_project_s_or_a_folder_s(written: str, full: str) -> None:
    reserved = {**MAIN, "capacity": "reserved", "reservation": written}
    assert read({**LEAST, "slices": [reserved]}).slices[0].reservation == full


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
    written = {"name": "main", "accelerator": accelerator, "data-disks": disks}
    (disk,) = read({**LEAST, "slices": [written]}).slices[0].data_disks
    assert disk == DataDisk(name="scratch", disk_type=disk_type, size_gib=100, source=None, mode="read-write")


def test_a_stack_can_do_without_a_bucket_and_nfs_and_filestore_begins_with_the_least_that_google_makes() -> (
    None
):
    without = read({**LEAST, "storage": {"bucket": False, "nfs": {"kind": "none"}}})
    assert (without.bucket, without.nfs) == (None, None)
    nfs = read({**LEAST, "storage": {"nfs": {"kind": "filestore"}}}).nfs
    assert nfs is not None
    assert (nfs.kind, nfs.size_gib) == ("filestore", reader.LEAST_GIB["filestore"])


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


# --- every field --------------------------------------------------------------------------------------------


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Every field with what it holds; of an accelerator the type and topology only."""
    if isinstance(value, catalogue.Accelerator):
        yield path, (value.type_name, value.topology)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        for each in value:
            yield from leaves(each, path)
    else:
        yield path, value


def test_every_field_of_a_configuration_can_be_set() -> None:
    line = {"type": "v6e", "zone": "us-east1-d", "chips": 8, "capacity": "on-demand"}
    disk = {"name": "d", "size-gib": 10}
    plain = {**LEAST, "slices": [{**MAIN, "data-disks": [disk]}], "grant": [line]}
    other_nfs = {**FULL, "storage": {"nfs": {"kind": "filestore"}}}
    before: dict[str, list[object]] = {}
    for path, value in leaves(read(plain)):
        before.setdefault(path, []).append(value)
    changed = set()
    for config in (read(FULL, project="other-project", stack="prod"), read(other_nfs)):
        changed |= {path for path, value in leaves(config) if value not in before[path]}
    assert set(before) - changed == set()


# --- how values arrive --------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [LEAST, FULL])
def test_texts_as_pulumi_hands_them_over_are_read_like_the_yaml_they_are_made_of(
    values: dict[str, object],
) -> None:
    assert read({key: as_pulumi_has_it(value) for key, value in values.items()}) == read(values)


def test_a_text_that_only_looks_like_another_type_stays_a_text() -> None:
    config = read({**LEAST, "slices": [{**MAIN, "labels": {"year": "2026", "on": "true"}}]})
    assert config.slices[0].labels == {"year": "2026", "on": "true"}


@pytest.fixture
def of_pulumi(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pulumi, "get_stack", lambda: "dev")
    monkeypatch.delenv("PULUMI_CONFIG", raising=False)
    yield
    pulumi.runtime.set_all_config({}, [])


def test_a_running_stack_is_read_from_what_pulumi_has(of_pulumi: None) -> None:
    written = {f"tpu-stack:{key}": as_pulumi_has_it(value) for key, value in FULL.items()}
    pulumi.runtime.set_all_config({**written, "gcp:project": "my-project", "other:key": "1"}, [])
    assert pulumi_program.configuration() == read(FULL)


def test_a_running_stack_finds_keys_that_nobody_asked_for_secrets_and_the_providers_zone(
    of_pulumi: None,
) -> None:
    slices = json.dumps([{"name": "main", "accelerator": "v6e-8"}])
    pulumi.runtime.set_all_config(
        {
            "tpu-stack:slices": slices,
            "tpu-stack:zoen": "x",
            "tpu-stack:protect": "true",
            "gcp:zone": "us-west1-b",
        },
        ["tpu-stack:protect"],
    )
    with pytest.raises(ConfigError) as error:
        pulumi_program.configuration()
    assert [each.partition(": ")[::2] for each in error.value.problems] == [
        ("tpu-stack:protect", "is kept as a secret, nothing here is one; set it anew without --secret"),
        ("gcp:project", "missing; name your project: `pulumi config set gcp:project PROJECT-ID`"),
        (
            "tpu-stack:slices[0].zone",
            (
                "missing; write it here, or tpu-stack:zone for all slices "
                "(gcp:zone is the provider's own and not read for this)"
            ),
        ),
        ("tpu-stack:zoen", "unknown key; did you mean zone?"),
    ]


# --- anything at all is read or answered ------------------------------------------------------------------------


KEYS = [
    "slices", "zone", "region", "storage", "network", "access", "images", "grant", "protect", "name", "accelerator",
    "generation", "topology", "capacity", "reservation", "provisioning", "count", "runtime-version", "valid-until",
    "guaranteed-for", "wait", "labels", "boot-disk", "kms-key", "size-gib", "data-disks", "type", "source", "mode",
    "bucket", "soft-delete-days", "temporary-days", "nfs", "kind", "machine-type", "mount", "existing", "subnetwork",
    "external-addresses", "members", "administrators", "repository", "keep", "references", "chips", "until",
    "allow-unlisted", "allow-billable", "allow-cross-region", "budget-usd-per-hour",
]  # fmt: skip
keys = st.sampled_from(KEYS) | st.text(max_size=6) | st.integers() | st.none() | st.booleans()
a_word = st.sampled_from(
    ["main", "v6e-8", "v5litepod-16", "us-central1-a", "us-central1", "spot", "reserved", "direct", "6h", "v5e", "4x4"]
)  # fmt: skip
scalars = (
    a_word
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
near_slices = st.lists(
    st.dictionaries(keys, garbage, max_size=8).map(lambda found: {**MAIN, **found}), max_size=3
)


@given(
    st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=6), garbage | garbage.map(str), max_size=6),
    near_slices | garbage,
    st.none() | st.just("my-project") | st.text(),
    st.just("dev") | st.text(),
)
@example({"storage": "[" * 100_000}, "{", "my-project", "dev")
@example({"budget-usd-per-hour": "1" * 5000, "\ud800\n": 1}, [{"\x00": {}}], "my-project", "dev")
@example({"zone": "us-central1-a", "protect": 10**4000}, [{**MAIN, 10**4000: 1}], None, "dev")
def test_anything_at_all_is_a_configuration_or_a_list_of_mistakes_on_one_line_each(
    values: dict[str, object], slices: object, project: str | None, stack: str
) -> None:
    try:
        config = reader.read(
            {"zone": "us-central1-a", **values, "slices": slices}, project=project, stack=stack
        )
    except ConfigError as error:
        assert error.problems
        assert [each for each in error.problems if not each.isprintable() or len(each) > 1000] == []
    else:
        assert isinstance(config, Config)
        assert config.regions


def places(value: object, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*place, key)
        yield from places(each, (*place, key))


@given(st.sampled_from(sorted(places(FULL), key=repr)), garbage)
def test_one_value_that_is_replaced_by_anything_gives_no_mistake_without_a_place(
    place: tuple[Any, ...], value: object
) -> None:
    values: Any = copy.deepcopy(FULL)
    holder = values
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    try:
        reader.read(values, project="my-project", stack="dev")
    except ConfigError as error:
        assert [
            each for each in error.problems if not each.startswith("tpu-stack:") or not each.isprintable()
        ] == []


def test_keys_and_values_are_shown_short_and_printable() -> None:
    problems: list[str] = []
    section = Section(
        {"": 1, "a\nb": 2, True: 3, "k" * 80: 4, "k" * 81: 5, "s": "v" * 80, "t": "v" * 81, "big": 2**201},
        prefix="at.",
        problems=problems,
    )
    with section:
        for key in ("s", "t", "big"):
            section.refuse(key, "is wrong")
    known = "unknown key; the keys here are s, t, big"
    assert problems == [
        f'at.s: "{"v" * 80}" is wrong',
        f'at.t: "{"v" * 80}…" is wrong',
        "at.big: a huge number is wrong",
        f'at."": {known}',
        f'at."a\\nb": {known}',
        f"at.true: {known}",
        f"at.{'k' * 80}: {known}",
        f'at."{"k" * 80}…": {known}',
    ]
