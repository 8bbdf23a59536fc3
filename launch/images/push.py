"""`fab push`: images that were built here go to a stack's repository, and their digests into its configuration."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

import docker

from contracts.errors import RequestError
from launch.display import say, terminal
from launch.images import base, board, here
from launch.images.builder import Watch
from launch.images.engine import asking, connect, patient
from launch.images.errors import ImageError
from launch.images.here import Image
from launch.images.pulumi_stack import image_repository, key_of, set_reference
from launch.images.recipe import Recipe, chosen, platform_of, read
from launch.images.refusals import explained
from launch.images.tables import size

LOCAL = "local"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
LAYER = re.compile(r"[0-9a-f]{12}")
DONE = ("Pushed", "Layer already exists", "Mounted from")


class Layers:
    """How far a push is, from what Docker says of each layer. Pure."""

    def __init__(self) -> None:
        self.digest: str | None = None
        self.error: str | None = None
        self._bytes: dict[str, tuple[int, int]] = {}
        self._ended: set[str] = set()
        self._known: set[str] = set()

    def take(self, answer: Mapping[str, Any]) -> None:
        if "error" in answer:
            self.error = " ".join(str(answer["error"]).split())
        aux = answer.get("aux")
        if isinstance(aux, Mapping) and DIGEST.fullmatch(str(aux.get("Digest"))):
            self.digest = str(aux["Digest"])
        layer, status = str(answer.get("id") or ""), str(answer.get("status") or "")
        if LAYER.fullmatch(layer) is None:
            return
        self._known.add(layer)
        detail = answer.get("progressDetail") or {}
        if status == "Pushing" and "current" in detail:
            total = int(detail.get("total") or detail["current"])
            self._bytes[layer] = (min(int(detail["current"]), total), total)
        elif status.startswith(DONE):
            self._ended.add(layer)
            _, total = self._bytes.get(layer, (0, 0))
            self._bytes[layer] = (total, total)

    @property
    def text(self) -> str:
        sent = sum(current for current, _ in self._bytes.values())
        total = sum(total for _, total in self._bytes.values())
        of = f", {size(sent)} of {size(total)}" if total else ""
        return f"layer {len(self._ended)}/{len(self._known)}{of}"


def push(*, stack: str, image: str, platform: str, environ: Mapping[str, str]) -> int:
    """Push the images named (default: all that are built), and note their digests in the stack's configuration.

    Raises:
        RequestError: which stack, an image is not built, or no Docker; nothing was pushed.
    """
    if stack == LOCAL:
        raise RequestError("--stack: say to which stack's repository; `pulumi stack ls` lists them")
    names, on = chosen("--image", image), platform_of(platform)
    console = terminal()
    tell = say(console)
    with contextlib.closing(connect(environ)) as client:
        pinned = base.read(environ)
        wanted = built(client, [read(name, on, pinned) for name in names], all_of_them=bool(image))
        repository = image_repository(stack, environ)
        failed: list[str] = []
        pushed: dict[str, str] = {}
        with board.make(console, [recipe.stack for recipe in wanted]) as shown:
            for recipe in wanted:
                watch = shown.begin(recipe.stack)
                try:
                    reference = send(client, recipe, repository, stack, watch)
                    watch.state("notes the digest")
                    set_reference(stack, recipe.stack, reference, environ)
                    pushed[recipe.stack] = reference
                except ImageError as error:
                    failed.append(str(error))
                    shown.end(recipe.stack, "FAILED")
                    continue
                shown.end(recipe.stack, "pushed")
    for name, reference in pushed.items():
        tell(f"{key_of(name)}: {reference}")
    if pushed:
        tell(f"Now `pulumi up --stack {stack}`: then hosts pull {'this' if len(pushed) == 1 else 'these'}.")
    for text in failed:
        tell(f"error: {text}")
    return 1 if failed else 0


def built(client: docker.DockerClient, recipes: list[Recipe], *, all_of_them: bool) -> list[Recipe]:
    """Those whose image is here. all_of_them: were asked for by name, so that each has to be.

    Raises:
        RequestError: one that has to be here is not, or none is.
    """
    found: dict[str, Image | None] = {recipe.stack: here.of_recipe(client, recipe) for recipe in recipes}
    lacking = [name for name, image in found.items() if image is None]
    if lacking and (all_of_them or len(lacking) == len(found)):
        on = recipes[0].platform
        raise RequestError(
            f"{', '.join(lacking)} for {on}: not built here, or the recipe has changed since; "
            f"`fab build --stack {','.join(lacking)} --platform {on}`, or push another --platform"
        )
    return [recipe for recipe in recipes if found[recipe.stack] is not None]


def send(client: docker.DockerClient, recipe: Recipe, repository: str, stack: str, watch: Watch) -> str:
    """Push one image; its reference by digest there.

    Raises:
        ImageError: the registry does not take it; with what is missing.
    """
    name = f"{repository}/{recipe.stack}"
    reference = f"{name}:{recipe.version}"
    layers = Layers()
    with asking(f"pushing {reference}"), patient(client):
        client.api.tag(recipe.tag, name, recipe.version)
        for answer in client.api.push(name, tag=recipe.version, stream=True, decode=True):
            layers.take(answer)
            watch.progress(layers.text)
    if layers.error is not None or layers.digest is None:
        _untag(client, reference)
        raise ImageError(explained(layers.error or "it gave no digest", reference, stack))
    return f"{name}@{layers.digest}"


def _untag(client: docker.DockerClient, reference: str) -> None:
    """A name in a repository that does not have the image would be a lie."""
    with asking(f"taking the name {reference} away"):
        client.api.remove_image(reference, noprune=True)
