"""This project's images on this machine: found by recipe, listed with the runs that used them, removed when old."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import docker
import docker.errors
from rich.table import Table

from contracts.durations import clock
from contracts.errors import RequestError
from images.docker_client import asking, connect
from images.recipe import (
    FRAMEWORK_LABEL,
    OUR_TAG,
    PLATFORM_LABEL,
    RECIPE_LABEL,
    Recipe,
    current_tags,
    image_platform,
    read,
)
from launch import runs
from launch.output import say, terminal
from launch.runs import Run, RunsFolder

OLD_FRAMEWORK_LABEL = "tpu-stack.stack"
"""What images were labelled with before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Image:
    """id: as Docker names it, sha256:…. tags: its names here; references: by digest, where it was pushed or pulled."""

    id: str
    framework: str
    platform: str
    recipe: str
    tags: tuple[str, ...]
    references: tuple[str, ...]
    size_bytes: int
    created_s: float

    @property
    def has_passed(self) -> bool:
        """Whether its smoke test did: only then it has a name without "-failed"."""
        return any((match := OUR_TAG.fullmatch(tag)) and not match["failed"] for tag in self.tags)

    @property
    def is_only_ours(self) -> bool:
        """Whether nobody gave it a name of their own."""
        return all(OUR_TAG.fullmatch(tag) for tag in self.tags)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildResult:
    """The result of `fab build` for one image.

    done: "built" or "was there". smoke_s: the duration of the smoke test, after build_s of building.
    """

    image: Image
    done: str
    build_s: float = 0.0
    smoke_s: float = 0.0


def required(framework: str, platform: str) -> Image:
    """Return the image of this checkout's recipe, if it was built here and has passed.

    Raises:
        RequestError: it is not there, Docker does not answer, or there is no such framework or platform.
    """
    recipe = read(framework, image_platform(platform), os.environ)
    with contextlib.closing(connect(os.environ)) as client:
        image = find(client, recipe)
    if image is None:
        raise RequestError(
            f"the image of {framework} for {platform} is not built here, or its recipe has changed since; "
            f"`fab build --framework {framework} --platform {platform}`"
        )
    return image


def find(client: docker.DockerClient, recipe: Recipe) -> Image | None:
    """Return the image with the recipe's tag, which only an image that has passed has."""
    with asking(f"looking for the image {recipe.tag}"):
        try:
            return _image(client.api.inspect_image(recipe.tag))
        except docker.errors.ImageNotFound:
            return None


def list_all(client: docker.DockerClient) -> list[Image]:
    """Return all our images by framework and platform, the latest first, and unnamed ones that a killed build left."""
    with asking("listing the images of this machine"):
        listed = client.api.images(filters={"label": PLATFORM_LABEL})
        images = [_image(client.api.inspect_image(entry["Id"])) for entry in listed]
    return sorted(images, key=lambda image: (image.framework, image.platform, -image.created_s))


def _image(details: Mapping[str, Any]) -> Image:
    labels = details["Config"].get("Labels") or {}
    created = datetime.datetime.fromisoformat(str(details["Created"])[:19]).replace(tzinfo=datetime.UTC)
    return Image(
        id=str(details["Id"]),
        framework=labels.get(FRAMEWORK_LABEL) or labels.get(OLD_FRAMEWORK_LABEL, "?"),
        platform=labels.get(PLATFORM_LABEL, "?"),
        recipe=labels.get(RECIPE_LABEL, "?"),
        tags=tuple(tag for tag in details.get("RepoTags") or () if tag != "<none>:<none>"),
        references=tuple(details.get("RepoDigests") or ()),
        size_bytes=int(details["Size"]),
        created_s=created.timestamp(),
    )


def layers(client: docker.DockerClient, image: str) -> int:
    """Return how many a host pulls that has none of them."""
    with asking(f"looking at {image}"):
        return len(client.api.inspect_image(image)["RootFS"]["Layers"])


def old(images: Iterable[Image], *, current: Iterable[str], used: Iterable[str]) -> list[Image]:
    """Return what may go: neither of a recipe of this checkout, nor used by a container, nor named by somebody. Pure.

    current: tags; used: ids of images that a container has, running or not.
    """
    keep, busy = set(current), set(used)
    return [
        image
        for image in images
        if image.is_only_ours and image.id not in busy and not keep.intersection(image.tags)
    ]


def used(client: docker.DockerClient) -> set[str]:
    """Return the ids of all images that a container uses, running or not."""
    with asking("listing the containers of this machine"):
        return {str(container["ImageID"]) for container in client.api.containers(all=True)}


def remove(client: docker.DockerClient, image: Image) -> bool:
    """Take all its names away and with them the image; whether it is gone. Never by force: one in use stays."""
    with asking(f"removing the image {(image.tags or (image.id,))[0]}"):
        for name in (*image.tags, *image.references, image.id):
            try:
                client.api.remove_image(name)
            except docker.errors.ImageNotFound:
                continue
            except docker.errors.APIError as error:
                if error.status_code != 409:
                    raise
                return False
    return True


def discard(client: docker.DockerClient, image: str) -> None:
    """Remove an image that a build has made, unless it has a name or is in use."""
    with contextlib.suppress(docker.errors.APIError, RequestError), asking("cleaning up"):
        details = client.api.inspect_image(image)
        if not (details.get("RepoTags") or details.get("RepoDigests")):
            client.api.remove_image(image)


SHORT = 12
SHOWN_RUNS = 3


def show(*, folder: RunsFolder, references: Mapping[str, str] | None, environ: Mapping[str, str]) -> int:
    """Show the images. folder: of the runs. references: framework → image of a stack's inventory; None: this machine.

    Raises:
        RequestError: no Docker.
    """
    console = terminal()
    tell = say(console)
    current = current_tags(environ)
    with contextlib.closing(connect(environ)) as client:
        images = list_all(client)
    known_runs = runs.list_runs(folder)
    if images:
        console.print(table_of_local(images, current, known_runs))
    else:
        tell("no images here yet; `fab build` makes them")
    if references is not None:
        tell("")
        if references:
            console.print(table_of_stack(references, images, current, known_runs))
        else:
            tell("the stack names no images yet; `fab push --stack NAME` pushes them")
    return 0


def prune(*, environ: Mapping[str, str]) -> int:
    """Remove our images that are neither of this checkout's recipes nor used by a container, and print each.

    The size of each counts the layers that it shares with others, which are free only when the last of them is gone.

    Raises:
        RequestError: no Docker.
    """
    tell = say(terminal())
    with contextlib.closing(connect(environ)) as client:
        doomed = old(list_all(client), current=current_tags(environ), used=used(client))
        if not doomed:
            tell("no old images of ours here")
            return 0
        before = client.df()["LayersSize"]
        for image in doomed:
            name = (image.tags or (image.id,))[0]
            is_removed = remove(client, image)
            tell(f"removed {name}" if is_removed else f"kept {name}: something made from it is in use")
        tell(f"freed {size(max(0, before - client.df()['LayersSize']))}")
    return 0


def table_of_built(results: Sequence[BuildResult], layers: Mapping[str, int]) -> Table:
    """Return the table of what `fab build` has built. layers: the number of layers, by image id."""
    table = _table("framework", "platform", "tag", "size>", "layers>", "build>", "smoke>", "image", "")
    for result in results:
        was_built = result.done == "built"
        table.add_row(
            result.image.framework,
            result.image.platform,
            _first(result.image.tags),
            size(result.image.size_bytes),
            str(layers[result.image.id]),
            clock(result.build_s) if was_built else "–",
            clock(result.smoke_s) if was_built else "–",
            short(result.image.id),
            result.done,
        )
    return table


def table_of_local(images: Iterable[Image], current: Iterable[str], known_runs: Sequence[Run]) -> Table:
    """Return the table of this machine's images. current: the tags of this checkout's recipes."""
    current_set = set(current)
    table = _table("framework", "platform", "tag", "size>", "created", "state", "runs")
    for image in images:
        table.add_row(
            image.framework,
            image.platform,
            _first(image.tags),
            size(image.size_bytes),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(image.created_s)),
            state(image, current_set),
            used_by({image.id, *image.references}, known_runs),
        )
    return table


def table_of_stack(
    references: Mapping[str, str], images: Sequence[Image], current: Iterable[str], known_runs: Sequence[Run]
) -> Table:
    """Return the table of the images in a stack's inventory, and whether they are on this machine."""
    current_set = set(current)
    table = _table("framework", "digest", "in", "here", "runs")
    for framework, reference in sorted(references.items()):
        repository, _, digest = reference.partition("@")
        local = next((image for image in images if reference in image.references), None)
        local_text = (
            "not on this machine" if local is None else f"{_first(local.tags)}, {state(local, current_set)}"
        )
        table.add_row(framework, short(digest), repository, local_text, used_by({reference}, known_runs))
    return table


def state(image: Image, current: Iterable[str]) -> str:
    """current: this checkout's recipe; old: another; failed: its smoke test; unnamed: a killed build left it."""
    if not image.tags:
        return "unnamed"
    if not image.has_passed:
        return "failed" if image.is_only_ours else "other"
    return "current" if set(current).intersection(image.tags) else "old"


def used_by(names: Iterable[str], known_runs: Sequence[Run]) -> str:
    """Return the latest runs whose run.json names one of `names`; runs come latest first."""
    name_set = set(names)
    run_ids = [run.run_id for run in known_runs if run.described.get("image") in name_set]
    more = f" and {len(run_ids) - SHOWN_RUNS} more" if len(run_ids) > SHOWN_RUNS else ""
    return ", ".join(run_ids[:SHOWN_RUNS]) + more


def size(size_bytes: int) -> str:
    """A size as Docker writes it: 1.25 GB."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.0f} MB"


def short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:SHORT]


def _first(tags: Sequence[str]) -> str:
    """Our own name on this machine before those in registries."""
    ours = [tag for tag in tags if OUR_TAG.fullmatch(tag)]
    return min(ours or tags, key=len, default="<none>")


def _table(*headings: str) -> Table:
    """A heading that ends with ">" has figures below it."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        right = heading.endswith(">")
        table.add_column(heading.removesuffix(">"), justify="right" if right else "left", no_wrap=True)
    return table
