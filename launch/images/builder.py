"""One image is made: built, tried, and only then named. Whatever interrupts it, nothing is left without a name."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import docker
import docker.errors
import filelock

from contracts.errors import RequestError
from jobs.runtime.cache import user_cache_dir
from launch.images import context, here, smoke
from launch.images.answers import Answers, failure
from launch.images.engine import LONG_LIMIT_S, asking
from launch.images.errors import ImageError
from launch.images.here import Image
from launch.images.recipe import REPOSITORY, Recipe

OTHERS_LIMIT_S = 7200
"""So long another build of the same image is waited for."""
CLEANUP_LIMIT_S = 20.0
CLEANUP_PAUSE_S = 0.2


class Watch(Protocol):
    """Who looks on."""

    def state(self, text: str) -> None:
        """What is being done, in place of what was."""
        ...

    def progress(self, text: str) -> None:
        """How far that is; comes often, and need not be shown each time."""
        ...

    def note(self, text: str) -> None:
        """A line that stays."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """done: built, or was there. smoke_s: how long the image was tried, of build_s in all."""

    image: Image
    done: str
    build_s: float
    smoke_s: float


def make(
    client: docker.DockerClient,
    recipe: Recipe,
    *,
    environ: Mapping[str, str],
    commit: str | None,
    watch: Watch,
) -> Made:
    """The image of the recipe: found, or built and tried. Two that want the same one at once build it once.

    Raises:
        ImageError: it cannot be built, or does not pass its smoke test.
        RequestError: Docker is gone, or another build of it takes hours.
    """
    began_s = time.monotonic()
    found = here.of_recipe(client, recipe)
    if found is None:
        arguments = context.build_arguments(recipe, environ)
        with one_at_a_time(recipe, environ, watch):
            found = here.of_recipe(client, recipe)
            if found is None:
                image = build(client, recipe, arguments, context.labels(recipe, commit), watch)
                smoke_s = prove(client, recipe, image, watch)
                found = here.of_recipe(client, recipe)
                if found is None:
                    raise ImageError(f"{recipe.tag} was built and somebody removed it; build it again")
                spent_s = time.monotonic() - began_s
                return Made(image=found, done="built", build_s=spent_s - smoke_s, smoke_s=smoke_s)
    return Made(image=found, done="was there", build_s=0.0, smoke_s=0.0)


def build(
    client: docker.DockerClient,
    recipe: Recipe,
    arguments: Mapping[str, str],
    labels: Mapping[str, str],
    watch: Watch,
) -> str:
    """The id of an image that has no name yet. One that was begun and not ended leaves nothing.

    Raises:
        ImageError: a step fails; with the last lines of the build.
    """
    answers = Answers()
    try:
        with asking(f"building {recipe.tag}"), _cut_off(client):
            for answer in client.api.build(
                fileobj=io.BytesIO(context.archive(recipe)), custom_context=True, buildargs=dict(arguments),
                labels=dict(labels), rm=True, forcerm=True, decode=True, timeout=LONG_LIMIT_S,
            ):  # fmt: skip
                if answers.take(answer):
                    place = f"step {answers.step}/{answers.steps}  " if answers.steps else ""
                    watch.state(f"{place}{answers.doing}")
        if answers.error is not None or answers.image is None:
            raise ImageError(failure(recipe.tag, answers, _root_of(client)))
    except BaseException:
        watch.state("cleans up")
        clean_up(client, answers.image or answers.last_image, answers.container)
        raise
    return answers.image


def prove(client: docker.DockerClient, recipe: Recipe, image: str, watch: Watch) -> float:
    """Try it and name it; how many seconds that took. One that fails is kept under a name that says so.

    Raises:
        ImageError: it fails.
    """
    began_s = time.monotonic()
    watch.state("smoke test")
    try:
        smoke.attempt(client, recipe, image, watch.note)
        _name(client, recipe, image, recipe.tag)
    except ImageError as error:
        _name(client, recipe, image, recipe.failed_tag)
        look = f"docker run --rm -it --entrypoint bash {recipe.failed_tag}"
        raise ImageError(f"{error}\nkept to look into: {look}") from None
    except BaseException:
        clean_up(client, image, None)
        raise
    for other in here.list_all(client):
        same = (other.stack, other.platform) == (recipe.stack, recipe.platform)
        if same and other.id != image and not other.has_passed and other.is_ours_alone:
            here.remove(client, other)
    return time.monotonic() - began_s


def _name(client: docker.DockerClient, recipe: Recipe, image: str, tag: str) -> None:
    with asking(f"naming {tag}"):
        client.api.tag(image, f"{REPOSITORY}/{recipe.stack}", tag.rpartition(":")[2])


def clean_up(client: docker.DockerClient, image: str | None, container: str | None) -> None:
    """Remove what a build that did not end has left: the container of its last step, and the images of its steps.

    Docker ends a build by itself when its client is gone, and removes its container; only that takes a moment.
    Images that others use, or are made from, stay: they are not removed by force.
    """
    with contextlib.suppress(docker.errors.APIError, RequestError), asking("cleaning up"):
        if container is not None:
            _wait_for_end(client, container)
        if image is None:
            return
        told = client.api.inspect_image(image)
        unseen = [
            each["Id"]
            for each in client.api.images(filters={"dangling": True})
            if each.get("ParentId") == told["Id"]
        ]
        has_name = told.get("RepoTags") or told.get("RepoDigests")
        left = [*unseen, *(() if has_name else (told["Id"],))]

        def remove_what_nobody_holds() -> bool:
            """Whether nothing is left. Docker may still begin a container of an image when its client has gone."""
            left[:] = [each for each in left if not _remove(client, each)]
            return not left

        _comes_true(remove_what_nobody_holds)


def _remove(client: docker.DockerClient, image: str) -> bool:
    """Whether it is settled: removed, or there is no container of it, so that something else holds it."""
    try:
        client.api.remove_image(image)
    except docker.errors.APIError:
        return not client.api.containers(all=True, filters={"ancestor": image})
    return True


def _wait_for_end(client: docker.DockerClient, container: str) -> None:
    def is_gone() -> bool:
        try:
            client.api.inspect_container(container)
        except docker.errors.NotFound:
            return True
        return False

    with contextlib.suppress(docker.errors.NotFound):
        if not _comes_true(is_gone):
            client.api.remove_container(container, force=True)


def _comes_true(is_so: Callable[[], bool]) -> bool:
    """Whether it is so within CLEANUP_LIMIT_S."""
    until_s = time.monotonic() + CLEANUP_LIMIT_S
    while not (found := is_so()) and time.monotonic() < until_s:
        time.sleep(CLEANUP_PAUSE_S)
    return found


@contextlib.contextmanager
def _cut_off(client: docker.DockerClient) -> Iterator[None]:
    """Close, in the end, the connection on which Docker answers: by that it learns that nobody waits any more."""
    responses: list[Any] = []

    def keep(response: Any, **_: Any) -> None:
        responses.append(response)

    hooks = client.api.hooks["response"]
    hooks.append(keep)
    try:
        yield
    finally:
        hooks.remove(keep)
        for response in responses:
            response.close()


@contextlib.contextmanager
def one_at_a_time(recipe: Recipe, environ: Mapping[str, str], watch: Watch) -> Iterator[None]:
    """Raises RequestError where another process holds it for hours."""
    folder = user_cache_dir(environ) / "images"
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / f"{recipe.stack}-{recipe.version}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        watch.state("another process builds it; waits")
        try:
            lock.acquire(timeout=OTHERS_LIMIT_S)
        except filelock.Timeout:
            raise RequestError(
                f"{recipe.tag}: another process builds it and is not done after {OTHERS_LIMIT_S // 3600} hours; end it"
            ) from None
    try:
        yield
    finally:
        lock.release()


def _root_of(client: docker.DockerClient) -> str:
    with contextlib.suppress(docker.errors.DockerException):
        return str(client.info().get("DockerRootDir"))
    return "/var/lib/docker"
