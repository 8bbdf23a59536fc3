"""What pushing asks of a Pulumi stack: its image repository; and what it writes down there: an image's digest."""

from __future__ import annotations

from collections.abc import Mapping

from contracts.errors import RequestError
from launch import inventories

OUTPUT = "image_repository"
OTHERWISE = "it knows where images go"


def image_repository(stack: str, environ: Mapping[str, str]) -> str:
    """What the names of the stack's images begin with.

    Raises:
        RequestError: Pulumi is not there or does not answer, or the stack was never brought up.
    """
    return inventories.output(OUTPUT, stack, otherwise=OTHERWISE, environ=environ).rstrip("/")


def key_of(image: str) -> str:
    """Where the configuration names the image of a framework stack."""
    return f"tpu-stack:images.references.{image}"


def set_reference(stack: str, image: str, reference: str, environ: Mapping[str, str]) -> None:
    """Name the image in the stack's configuration; what else is in that file stays as it is, comments too.

    Raises:
        RequestError: Pulumi does not do it; with what a person has to write there.
    """
    try:
        words = ["config", "set", "--path", key_of(image), reference]
        inventories.ask(words, stack, otherwise=OTHERWISE, environ=environ)
    except RequestError as error:
        raise RequestError(
            f"{error}; it is pushed: note {key_of(image)}: {reference} in that configuration"
        ) from None
