"""What there is of images, as tables: built, here, there. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from contracts.durations import clock
from launch.images.builder import Made
from launch.images.here import Image
from launch.images.recipe import OUR_TAG
from launch.runs import Run

SHORT = 12
SHOWN_RUNS = 3


def built(made: Sequence[Made], layers: Mapping[str, int]) -> Table:
    """layers: of each image by its id."""
    table = _table("stack", "platform", "tag", "size>", "layers>", "build>", "smoke>", "image", "")
    for each in made:
        was_built = each.done == "built"
        table.add_row(
            each.image.stack,
            each.image.platform,
            _first(each.image.tags),
            size(each.image.size_bytes),
            str(layers[each.image.id]),
            clock(each.build_s) if was_built else "–",
            clock(each.smoke_s) if was_built else "–",
            short(each.image.id),
            each.done,
        )
    return table


def here(images: Iterable[Image], current: Iterable[str], runs: Sequence[Run]) -> Table:
    """What this machine has. current: the tags of this checkout's recipes."""
    known = set(current)
    table = _table("stack", "platform", "tag", "size>", "created", "state", "runs")
    for image in images:
        table.add_row(
            image.stack,
            image.platform,
            _first(image.tags),
            size(image.size_bytes),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(image.created_s)),
            state(image, known),
            used_by({image.id, *image.references}, runs),
        )
    return table


def there(
    references: Mapping[str, str], images: Sequence[Image], current: Iterable[str], runs: Sequence[Run]
) -> Table:
    """What a stack's inventory names, and what of it is known here."""
    known = set(current)
    table = _table("stack", "digest", "in", "here", "runs")
    for stack, reference in sorted(references.items()):
        repository, _, digest = reference.partition("@")
        found = next((image for image in images if reference in image.references), None)
        said = "not on this machine" if found is None else f"{_first(found.tags)}, {state(found, known)}"
        table.add_row(stack, short(digest), repository, said, used_by({reference}, runs))
    return table


def state(image: Image, current: Iterable[str]) -> str:
    """current: this checkout's recipe; old: another; failed: its smoke test; unnamed: a killed build left it."""
    if not image.tags:
        return "unnamed"
    if not image.has_passed:
        return "failed" if image.is_ours_alone else "other"
    return "current" if set(current).intersection(image.tags) else "old"


def used_by(names: Iterable[str], runs: Sequence[Run]) -> str:
    """The latest runs whose run.json names one of `names`; runs come latest first."""
    wanted = set(names)
    found = [run.run_id for run in runs if run.described.get("image") in wanted]
    more = f" and {len(found) - SHOWN_RUNS} more" if len(found) > SHOWN_RUNS else ""
    return ", ".join(found[:SHOWN_RUNS]) + more


def size(size_bytes: int) -> str:
    """As Docker says it: 1.25 GB."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.0f} MB"


def short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:SHORT]


def _first(tags: Sequence[str]) -> str:
    """Our own name on this machine before those in registries."""
    ours = [tag for tag in tags if OUR_TAG.fullmatch(tag)]
    return min(ours or tags, key=len, default="<none>")


def _table(*headings: str) -> Table:
    """A heading that ends with ">" has figures below it."""
    made = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        right = heading.endswith(">")
        made.add_column(heading.removesuffix(">"), justify="right" if right else "left", no_wrap=True)
    return made
