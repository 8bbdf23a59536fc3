"""The example, Pulumi.yaml and the page of documentation say of the keys what the reader does with them."""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.config import Config, ConfigError, reader

ROOT = Path(__file__).parents[3]
EXAMPLE = (ROOT / "Pulumi.example.yaml").read_text()
DOCS = (ROOT / "docs" / "configuration.md").read_text()
OURS = "tpu-stack:"

BASE = {"slices": [{"name": "main", "accelerator": "v5litepod-8", "zone": "us-central1-a"}]}


def read(text: str) -> Config:
    written: dict[str, object] = yaml.safe_load(text)["config"]
    return reader.read(
        {key.removeprefix(OURS): written[key] for key in written if key.startswith(OURS)},
        project=str(written["gcp:project"]),
        stack="dev",
    )


# --- which keys there are -----------------------------------------------------------------------------------

NO_KEY = "qqqqqqqq"


def inside(values: Any, section: str) -> Any:
    """The mapping at a path, made where it is not there."""
    for name, is_list in re.findall(r"([a-z-]+)(\[0\])?", section):
        values = values.setdefault(name, [{}] if is_list else {})
        values = values[0] if is_list else values
    return values


def answers(section: str, key: str, value: object) -> tuple[str, ...]:
    """What the reader says of a value at a key."""
    values: Any = {"slices": [dict(BASE["slices"][0])]}
    inside(values, section)[key] = value
    try:
        reader.read(values, project="my-project", stack="dev")
    except ConfigError as error:
        return error.problems
    return ()


def keys_of(section: str) -> list[str]:
    """The keys that the reader asks for, as it lists them itself when it meets one that is none."""
    at = f"{OURS}{section}{'.' if section else ''}{NO_KEY}: unknown key; the keys here are "
    (said,) = [each for each in answers(section, NO_KEY, 1) if each.startswith(at)]
    return said.removeprefix(at).split(", ")


FREE = {("slices[0]", "labels"), ("images", "references")}
"""Mappings whose keys are the user's own."""


def sections(section: str = "") -> Iterator[str]:
    """The path of every mapping of the configuration, found by what the reader says of a value that is none."""
    yield section
    for key in keys_of(section):
        path = f"{section}.{key}" if section else key
        if (section, key) in FREE:
            continue
        if any(f"{OURS}{path}: 1 is not a mapping" in each for each in answers(section, key, 1)):
            yield from sections(path)
        elif any(f"{OURS}{path}[0]: 1 is not a mapping" in each for each in answers(section, key, [1])):
            yield from sections(f"{path}[0]")


def chapter(section: str) -> str:
    """The one of the documentation that has a mapping's keys."""
    return section.partition(".")[0].removesuffix("[0]").capitalize() or "The stack"


def in_its_chapter(section: str, key: str) -> str:
    """How a chapter calls a key: without the part that its title says."""
    inside = section.partition(".")[2].removeprefix("data-disks[0]")
    return f"{inside}.{key}" if inside else key


ALL_KEYS = [(section, key) for section in sections() for key in keys_of(section)]


# --- the example --------------------------------------------------------------------------------------------


SAME = ("generation", "topology", "region")
"""Other ways to say what the example says already."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Commented-out lines that belong together. first: the number of the first; above: the comment that explains it."""

    first: int
    lines: tuple[str, ...]
    above: str

    @property
    def key(self) -> str:
        return self.lines[0].split("#: ")[1].partition(": ")[0].removesuffix(":").removeprefix(OURS)

    @property
    def is_default(self) -> bool:
        return "(e.g.)" not in self.above


def blocks() -> list[Block]:
    """Flags stand below each other, each a block; everything else in a block is deeper than its first line."""
    found: list[Block] = []
    above: list[str] = []
    before = ""
    for number, line in enumerate(EXAMPLE.splitlines()):
        kind = line.lstrip()[:2]
        if kind == "# ":
            above = [*above, line] if before == kind else [line]
        elif kind == "#:" and line.split("#: ")[1].startswith(" "):
            found[-1] = dataclasses.replace(found[-1], lines=(*found[-1].lines, line))
        elif kind == "#:":
            explained = "\n".join(above) if before in ("# ", "#:") else ""
            found.append(Block(first=number, lines=(line,), above=explained))
        before = kind
    return found


BLOCKS = blocks()

ON_COMPUTE = (
    r"^      accelerator: .*$",
    "      accelerator: v6e-16\n      provisioning: compute\n      zone: us-central1-b",
)
RESERVED_THERE = (
    r"^      accelerator: .*$([\s\S]*?)capacity: spot$",
    ON_COMPUTE[1] + r"\1capacity: reserved\n      reservation: mine",
)
TOGETHER = {
    "image": ON_COMPUTE,
    "max-run-duration": ON_COMPUTE,
    "size-gib": ON_COMPUTE,
    "reservation-bound": RESERVED_THERE,
    "region": (r"^  tpu-stack:zone: .*$", ""),
    "generation": (r"^      accelerator: .*$", "      topology: 4x4"),
    "topology": (r"^      accelerator: .*$", "      generation: v5e"),
    "reservation": (r"capacity: spot$", "capacity: reserved"),
    "strategy": (r"^      #: zones: ", "      zones: "),
    "zone-wait": (r"^      #: zones: ", "      zones: "),
    "notify": (r"^  #: tpu-stack:keeper: false$", "  tpu-stack:keeper: true"),
    "guaranteed-for": (r"capacity: spot$", "capacity: on-demand"),
    "scale-to-zero": (r"^      #: provisioning: queued$", "      provisioning: node-pool"),
}
"""What has to change with an example of what excludes something else, or needs it."""


def used(block: Block, *, examples: bool = True) -> str:
    """The example with a block in use; without `examples` only the defaults in it."""
    lines = EXAMPLE.splitlines()
    kept: list[str] = []
    skip: int | None = None
    for line in block.lines:
        depth = len(line.split("#:")[1]) - len(line.split("#:")[1].lstrip())
        skip = None if skip is not None and depth <= skip else skip
        if skip is None and not examples and "(e.g.)" in line:
            skip = depth
        if skip is None:
            kept.append(line.replace("#: ", "", 1))
    lines[block.first : block.first + len(block.lines)] = kept
    text = "\n".join(lines)
    inside_slice = block.lines[0].startswith("      ")
    if block.key == "region" and inside_slice:
        return text
    if "size-gib" in "".join(block.lines) and block.key == "data-disks":
        return text.replace("v5litepod-16", "v5litepod-8", 1)
    key = "size-gib" if "size-gib" in "".join(block.lines) and block.key == "boot-disk" else block.key
    if key in TOGETHER:
        pattern, other = TOGETHER[key]
        text, changed = re.subn(pattern, other, text, count=1, flags=re.MULTILINE)
        assert changed == 1
    return text


def test_the_example_is_a_configuration_whose_slice_its_grant_covers() -> None:
    config = read(EXAMPLE)
    (main,) = config.slices
    (line, _) = config.grant
    asked = (main.accelerator.generation.name, main.zone, main.capacity)
    assert asked == (line.generation, line.zone, line.capacity)
    assert main.chips <= line.chips and main.zone in main.accelerator.zones


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.key}:{block.first}")
def test_what_is_commented_out_is_read_when_used_and_changes_nothing_where_it_is_a_default(
    block: Block,
) -> None:
    as_it_is, in_use = read(EXAMPLE), read(used(block))
    if block.is_default:
        assert read(used(block, examples=False)) == as_it_is
    elif block.key not in SAME:
        assert in_use != as_it_is


def test_every_key_is_explained_in_the_example_and_in_a_table_of_its_chapter_and_no_other_is_in_one() -> None:
    assert {f"{section}.{key}" if section else key for section, key in ALL_KEYS} <= shown()
    for title in {chapter(section) for section, _ in ALL_KEYS}:
        read_there = {in_its_chapter(section, key) for section, key in ALL_KEYS if chapter(section) == title}
        assert set(documented(title)) - {"gcp:project"} == read_there


@functools.cache
def shown() -> frozenset[str]:
    """The path of every key in the example, in use or commented out."""
    texts = [EXAMPLE, *(used(block) for block in BLOCKS)]
    return frozenset(path for text in texts for path in paths(yaml.safe_load(text)["config"]))


def paths(value: object, at: str = "") -> Iterator[str]:
    """Every key in a configuration, the first of every list standing for all."""
    if isinstance(value, list):
        for each in value:
            yield from paths(each, f"{at}[0]")
    elif isinstance(value, Mapping):
        for key, each in value.items():
            inner = f"{at}.{key}" if at else str(key).removeprefix(OURS)
            yield inner
            yield from paths(each, inner)


# --- the documentation --------------------------------------------------------------------------------------


def documented(title: str) -> list[str]:
    found = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", DOCS, flags=re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return re.findall(r"^\| `([^`]+)` \|", found[1], flags=re.MULTILINE)


@pytest.mark.parametrize("text", re.findall(r"^```yaml$(.*?)^```$", DOCS, flags=re.MULTILINE | re.DOTALL))
def test_every_example_of_the_documentation_is_a_configuration(text: str) -> None:
    config = read(text)
    assert all(each.zone in each.accelerator.zones for each in config.slices)
