"""`fab images`: what is here, what a stack's hosts pull, which runs used which; and old ones removed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import docker

from launch import runs
from launch.display import say, terminal
from launch.images import base, here, tables
from launch.images.engine import connect
from launch.images.recipe import PLATFORMS, read, stacks
from launch.runs import RunsFolder


def show(*, folder: RunsFolder, references: Mapping[str, str] | None, environ: Mapping[str, str]) -> int:
    """folder: of the runs. references: framework stack → image, of a stack's inventory; None for this machine.

    Raises:
        RequestError: no Docker.
    """
    console = terminal()
    tell = say(console)
    current = tags(environ)
    with contextlib.closing(connect(environ)) as client:
        images = here.list_all(client)
    known = runs.list_runs(folder)
    if images:
        console.print(tables.here(images, current, known))
    else:
        tell("no images here yet; `fab build` makes them")
    if references is not None:
        tell("")
        if references:
            console.print(tables.there(references, images, current, known))
        else:
            tell("the stack names no images yet; `fab push --stack NAME` pushes them")
    return 0


def prune(*, environ: Mapping[str, str]) -> int:
    """Remove images of ours that are neither of this checkout's recipes nor used by a container, and say so.

    Raises:
        RequestError: no Docker.
    """
    tell = say(terminal())
    with contextlib.closing(connect(environ)) as client:
        doomed = here.old(here.list_all(client), current=tags(environ), used=here.used(client))
        remove(client, doomed, tell)
    return 0


def remove(client: docker.DockerClient, doomed: Sequence[here.Image], tell: Callable[[str], None]) -> None:
    """Sizes are told as of each alone; of what layers they share, nothing is free before the last is gone."""
    before = client.df()["LayersSize"] if doomed else 0
    for image in doomed:
        name = (image.tags or (image.id,))[0]
        gone = here.remove(client, image)
        tell(f"removed {name}" if gone else f"kept {name}: something made from it is in use")
    freed = before - (client.df()["LayersSize"] if doomed else 0)
    tell(f"freed {tables.size(max(0, freed))}" if doomed else "no old images of ours here")


def tags(environ: Mapping[str, str]) -> set[str]:
    """What the images of this checkout's recipes are called, built or not."""
    pinned = base.read(environ)
    return {read(stack, platform, pinned).tag for stack in stacks() for platform in PLATFORMS}
