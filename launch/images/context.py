"""What Docker is given to build an image: the context as an archive, build arguments, labels. Pure.

The archive is made from the recipe alone: nothing else of the checkout can get into an image.
"""

from __future__ import annotations

import io
import tarfile
import urllib.parse
from collections.abc import Mapping

from contracts.errors import RequestError
from launch.images.recipe import Recipe

INDEXES = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")
# Docker knows these without an ARG, and keeps them out of the image's history.
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
LICENSE = "Apache-2.0"

STACK_LABEL = "tpu-stack.stack"
PLATFORM_LABEL = "tpu-stack.platform"
RECIPE_LABEL = "tpu-stack.recipe"
LOCK_LABEL = "tpu-stack.lock"
SMOKE_LABEL = "tpu-stack.smoke"
"""Of the container in which an image is tried; its value is the recipe's hash."""


def archive(recipe: Recipe) -> bytes:
    """A tar; the same recipe gives the same bytes, so that Docker's cache finds its steps."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in sorted(recipe.files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def build_arguments(recipe: Recipe, environ: Mapping[str, str]) -> dict[str, str]:
    """What the Dockerfile is told, and how this machine reaches packages, which the build has to do in the same way.

    Raises:
        RequestError: a package index is named with a password: an argument stays in the image's history.
    """
    found = {name: environ[name] for name in (*INDEXES, *PROXIES) if environ.get(name)}
    for name in INDEXES:
        parts = urllib.parse.urlsplit(found.get(name, ""))
        if "@" in parts.netloc or parts.query:
            raise RequestError(
                f"{name} holds a password, which the image would keep in its history; name an index that needs none, or"
                " a mirror of it on this machine"
            )
    own = {"BASE_IMAGE": recipe.base, "STACK": recipe.stack, "PLATFORM": recipe.platform}
    return found | own


def labels(recipe: Recipe, commit: str | None) -> dict[str, str]:
    """What an image says of itself. commit: of the checkout, "-dirty" behind it where files differ; None: unknown."""
    said = {
        STACK_LABEL: recipe.stack,
        PLATFORM_LABEL: recipe.platform,
        RECIPE_LABEL: recipe.hash,
        LOCK_LABEL: recipe.lock_sha256,
        "org.opencontainers.image.title": f"tpu-stack {recipe.stack} for {recipe.platform}",
        "org.opencontainers.image.base.name": recipe.base,
        "org.opencontainers.image.licenses": LICENSE,
    }
    return said | ({"org.opencontainers.image.revision": commit} if commit else {})
