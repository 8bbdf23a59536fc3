"""Images of ours on this machine: listed by their labels, found by recipe, removed when they are old."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Iterable, Mapping
from typing import Any

import docker
import docker.errors

from contracts.errors import RequestError
from launch.images.docker_client import asking, connect
from launch.images.recipe import (
    FRAMEWORK_LABEL,
    OUR_TAG,
    PLATFORM_LABEL,
    RECIPE_LABEL,
    Recipe,
    platform_of,
    read,
)

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
class Made:
    """An image that `fab build` has seen to.

    done: built, or was there. smoke_s: how long the image was tried, of build_s in all.
    """

    image: Image
    done: str
    build_s: float = 0.0
    smoke_s: float = 0.0


def required(framework: str, platform: str, environ: Mapping[str, str] = os.environ) -> Image:
    """The image of this checkout's recipe, which was built here and has passed.

    Raises:
        RequestError: it is not there, Docker does not answer, or there is no such framework or platform.
    """
    recipe = read(framework, platform_of(platform), environ)
    with contextlib.closing(connect(environ)) as client:
        found = of_recipe(client, recipe)
    if found is None:
        raise RequestError(
            f"the image of {framework} for {platform} is not built here, or its recipe has changed since; "
            f"`fab build --framework {framework} --platform {platform}`"
        )
    return found


def of_recipe(client: docker.DockerClient, recipe: Recipe) -> Image | None:
    """The image with the recipe's tag, which only one that has passed has."""
    with asking(f"looking for the image {recipe.tag}"):
        try:
            return _image(client.api.inspect_image(recipe.tag))
        except docker.errors.ImageNotFound:
            return None


def list_all(client: docker.DockerClient) -> list[Image]:
    """All of ours by framework and platform, the latest first, with those unnamed that a killed build left."""
    with asking("listing the images of this machine"):
        found = client.api.images(filters={"label": PLATFORM_LABEL})
        images = [_image(client.api.inspect_image(each["Id"])) for each in found]
    return sorted(images, key=lambda image: (image.framework, image.platform, -image.created_s))


def _image(told: Mapping[str, Any]) -> Image:
    labels = told["Config"].get("Labels") or {}
    created = datetime.datetime.fromisoformat(str(told["Created"])[:19]).replace(tzinfo=datetime.UTC)
    return Image(
        id=str(told["Id"]),
        framework=labels.get(FRAMEWORK_LABEL) or labels.get(OLD_FRAMEWORK_LABEL, "?"),
        platform=labels.get(PLATFORM_LABEL, "?"),
        recipe=labels.get(RECIPE_LABEL, "?"),
        tags=tuple(tag for tag in told.get("RepoTags") or () if tag != "<none>:<none>"),
        references=tuple(told.get("RepoDigests") or ()),
        size_bytes=int(told["Size"]),
        created_s=created.timestamp(),
    )


def layers(client: docker.DockerClient, image: str) -> int:
    """How many a host pulls that has none of them."""
    with asking(f"looking at {image}"):
        return len(client.api.inspect_image(image)["RootFS"]["Layers"])


def old(images: Iterable[Image], *, current: Iterable[str], used: Iterable[str]) -> list[Image]:
    """What may go: neither of a recipe of this checkout, nor used by a container, nor named by somebody. Pure.

    current: tags; used: ids of images that a container has, running or not.
    """
    keep, busy = set(current), set(used)
    return [
        image
        for image in images
        if image.is_only_ours and image.id not in busy and not keep.intersection(image.tags)
    ]


def used(client: docker.DockerClient) -> set[str]:
    """The ids of all images that a container has, running or not."""
    with asking("listing the containers of this machine"):
        return {str(each["ImageID"]) for each in client.api.containers(all=True)}


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
    """Remove an image that a build made and nobody has named; one that is named or in use stays."""
    with contextlib.suppress(docker.errors.APIError, RequestError), asking("cleaning up"):
        told = client.api.inspect_image(image)
        if not (told.get("RepoTags") or told.get("RepoDigests")):
            client.api.remove_image(image)
