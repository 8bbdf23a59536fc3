"""Whatever a user writes, in whatever place, is read or answered: nothing else comes of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from infra.config import Config, ConfigError, durations, reader
from infra.config.fields import Section

MAIN = {"name": "main", "accelerator": "v5litepod-8"}
FULL: dict[str, object] = yaml.safe_load(Path(__file__).with_name("full.yaml").read_text())

KEYS = [
    "slices", "zone", "region", "storage", "network", "access", "images", "grant", "protect", "name", "accelerator",
    "generation", "topology", "capacity", "reservation", "provisioning", "count", "runtime-version", "valid-until",
    "guaranteed-for", "wait", "labels", "boot-disk", "kms-key", "size-gib", "data-disks", "type", "source", "mode",
    "bucket", "soft-delete-days", "temporary-days", "nfs", "kind", "machine-type", "mount", "existing", "subnetwork",
    "external-addresses", "members", "administrators", "repository", "keep", "references", "chips", "until",
    "allow-unlisted", "allow-billable", "allow-cross-region", "budget-usd-per-hour",
]  # fmt: skip
keys = st.sampled_from(KEYS) | st.text(max_size=6) | st.integers() | st.none() | st.booleans()
words = st.sampled_from(
    ["main", "v6e-8", "v5litepod-16", "us-central1-a", "us-central1", "spot", "reserved", "direct", "6h", "v5e", "4x4"]
)  # fmt: skip
scalars = (
    words
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


@pytest.mark.parametrize(
    ("written", "ask"),
    [
        (1, lambda section: section.text("key", None)),
        ("x", lambda section: section.choice("key", "a", ("a", "b"))),
        ("x", lambda section: section.integer("key", None, least=1, most=2)),
        (0, lambda section: section.number_above_zero("key")),
        ("x", lambda section: section.flag("key", default=True)),
        ("x", lambda section: section.duration("key", None, least_s=1, most_s=2)),
        ("9s", lambda section: section.duration("key", None, least_s=1, most_s=2)),
        ("x", lambda section: section.date("key")),
        ("x", lambda section: section.section("key")),
        ("x", lambda section: section.sections("key")),
        (["x"], lambda section: section.sections("key")),
        ([1], lambda section: section.texts("key", rule=lambda text: None)),
        (
            {"a": 1},
            lambda section: section.mapping("key", key_rule=lambda _: None, value_rule=lambda _: None),
        ),
        (
            {1: "a"},
            lambda section: section.mapping("key", key_rule=lambda _: None, value_rule=lambda _: None),
        ),
        (None, lambda section: section.text("key", None)),
    ],
)
def test_a_rule_over_several_keys_is_told_which_of_them_to_trust(
    written: object, ask: Callable[[Section], object]
) -> None:
    problems: list[str] = []
    section = Section({"key": written, "other": "x"}, prefix="at.", problems=problems)
    ask(section)
    assert section.text("other", None) == "x"
    assert (section.fine("key"), section.fine("other"), section.fine("other", "key")) == (False, True, False)
    assert len(problems) == 1
    assert problems[0].startswith("at.key")


def test_keys_and_values_are_shown_short_and_printable() -> None:
    problems: list[str] = []
    section = Section(
        {"": 1, "a\nb": 2, True: 3, "k" * 80: 4, "k" * 81: 5, "s": "v" * 80, "t": "v" * 81, "big": 2**201},
        prefix="at.",
        problems=problems,
    )
    for key in ("s", "t", "big"):
        section.refuse(key, "is wrong")
    section.close()
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


@given(st.integers(min_value=1, max_value=10**7))
def test_a_duration_that_is_spelled_out_reads_back(length_s: int) -> None:
    spelled = durations.spelled(length_s)
    assert durations.wrong(spelled) is None
    assert durations.seconds(spelled) == length_s
