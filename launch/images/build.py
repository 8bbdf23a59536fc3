"""`fab build`: the images of the stacks that are asked for, one after the other."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping

import docker

from contracts.errors import RequestError
from launch.display import say, terminal
from launch.images import base, board, builder, here, tables
from launch.images.builder import Made
from launch.images.context import build_arguments
from launch.images.engine import connect
from launch.images.errors import ImageError
from launch.images.recipe import chosen, platform_of, read
from launch.jobs import CHECKOUT, commit_of


def build(*, stack: str, platform: str, update_base: bool, environ: Mapping[str, str]) -> int:
    """Build what is not there, show what there is then; 1 where an image failed, after all were tried.

    Raises:
        RequestError: no such stack or platform, or no Docker; nothing was built.
    """
    wanted, on = chosen("--stack", stack), platform_of(platform)
    console = terminal()
    tell = say(console)
    client = connect(environ)
    with _terminated_as_interrupted(), contextlib.closing(client):
        if update_base:
            _update_base(client, environ)
        pinned = base.read(environ)
        recipes = {name: read(name, on, pinned) for name in wanted}
        for recipe in recipes.values():
            build_arguments(recipe, environ)  # a mistake in them is found before anything is built
        commit = _commit()
        made: list[Made] = []
        failed: list[str] = []
        with board.make(console, wanted) as shown:
            for name, recipe in recipes.items():
                watch = shown.begin(name)
                try:
                    found = builder.make(client, recipe, environ=environ, commit=commit, watch=watch)
                except ImageError as error:
                    failed.append(str(error))
                    shown.end(name, "FAILED")
                    continue
                made.append(found)
                shown.end(name, found.done)
        if made:
            console.print(
                tables.built(made, {each.image.id: here.layers(client, each.image.id) for each in made})
            )
    for text in failed:
        tell(f"\nerror: {text}")
    return 1 if failed else 0


def _update_base(client: docker.DockerClient, environ: Mapping[str, str]) -> None:
    if base.VARIABLE in environ:
        raise RequestError(
            f"--update-base: {base.VARIABLE} names another base, in place of images/base.txt; unset it first"
        )
    base.update(client, say(terminal()))


def _commit() -> str | None:
    found = commit_of(CHECKOUT)
    return None if found is None else f"{found.hash}-dirty" if found.is_dirty else found.hash


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM is Ctrl-C within it: what a build has begun is cleaned up before the process ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
