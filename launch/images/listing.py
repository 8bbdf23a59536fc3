"""`fab images`: what is here, what a stack's hosts pull, which runs used which; and old ones removed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from contracts.durations import clock
from launch import runs
from launch.display import say, terminal
from launch.images import local_images
from launch.images.docker_client import connect
from launch.images.local_images import Image, Made
from launch.images.recipe import OUR_TAG, current_tags
from launch.runs import Run, RunsFolder

SHORT = 12
SHOWN_RUNS = 3


def show(*, folder: RunsFolder, references: Mapping[str, str] | None, environ: Mapping[str, str]) -> int:
    """folder: of the runs. references: framework → image, of a stack's inventory; None for this machine.

    Raises:
        RequestError: no Docker.
    """
    console = terminal()
    tell = say(console)
    current = current_tags(environ)
    with contextlib.closing(connect(environ)) as client:
        images = local_images.list_all(client)
    known = runs.list_runs(folder)
    if images:
        console.print(table_of_local(images, current, known))
    else:
        tell("no images here yet; `fab build` makes them")
    if references is not None:
        tell("")
        if references:
            console.print(table_of_stack(references, images, current, known))
        else:
            tell("the stack names no images yet; `fab push --stack NAME` pushes them")
    return 0


def prune(*, environ: Mapping[str, str]) -> int:
    """Remove images of ours that are neither of this checkout's recipes nor used by a container, and say so.

    The size of each counts the layers that it shares with others, which are free only when the last of them is gone.

    Raises:
        RequestError: no Docker.
    """
    tell = say(terminal())
    with contextlib.closing(connect(environ)) as client:
        images, used = local_images.list_all(client), local_images.used(client)
        doomed = local_images.old(images, current=current_tags(environ), used=used)
        if not doomed:
            tell("no old images of ours here")
            return 0
        before = client.df()["LayersSize"]
        for image in doomed:
            name = (image.tags or (image.id,))[0]
            gone = local_images.remove(client, image)
            tell(f"removed {name}" if gone else f"kept {name}: something made from it is in use")
        tell(f"freed {size(max(0, before - client.df()['LayersSize']))}")
    return 0


def table_of_built(made: Sequence[Made], layers: Mapping[str, int]) -> Table:
    """What `fab build` has made. layers: of each image by its id."""
    table = _table("framework", "platform", "tag", "size>", "layers>", "build>", "smoke>", "image", "")
    for each in made:
        was_built = each.done == "built"
        table.add_row(
            each.image.framework,
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


def table_of_local(images: Iterable[Image], current: Iterable[str], known_runs: Sequence[Run]) -> Table:
    """What this machine has. current: the tags of this checkout's recipes."""
    known = set(current)
    table = _table("framework", "platform", "tag", "size>", "created", "state", "runs")
    for image in images:
        table.add_row(
            image.framework,
            image.platform,
            _first(image.tags),
            size(image.size_bytes),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(image.created_s)),
            state(image, known),
            used_by({image.id, *image.references}, known_runs),
        )
    return table


def table_of_stack(
    references: Mapping[str, str], images: Sequence[Image], current: Iterable[str], known_runs: Sequence[Run]
) -> Table:
    """What a stack's inventory names, and what of it is known here."""
    known = set(current)
    table = _table("framework", "digest", "in", "here", "runs")
    for framework, reference in sorted(references.items()):
        repository, _, digest = reference.partition("@")
        found = next((image for image in images if reference in image.references), None)
        said = "not on this machine" if found is None else f"{_first(found.tags)}, {state(found, known)}"
        table.add_row(framework, short(digest), repository, said, used_by({reference}, known_runs))
    return table


def state(image: Image, current: Iterable[str]) -> str:
    """current: this checkout's recipe; old: another; failed: its smoke test; unnamed: a killed build left it."""
    if not image.tags:
        return "unnamed"
    if not image.has_passed:
        return "failed" if image.is_only_ours else "other"
    return "current" if set(current).intersection(image.tags) else "old"


def used_by(names: Iterable[str], known_runs: Sequence[Run]) -> str:
    """The latest runs whose run.json names one of `names`; runs come latest first."""
    wanted = set(names)
    found = [run.run_id for run in known_runs if run.described.get("image") in wanted]
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
