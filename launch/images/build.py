"""`fab build`: each image is built by BuildKit, tried, and only then named. Nothing is left of one that was not."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import docker
import docker.errors
import filelock

from contracts import atomic
from contracts.errors import RequestError
from jobs.runtime.cache import user_cache_dir
from launch.display import say, terminal
from launch.images import listing, local_images, smoke
from launch.images.docker_client import (
    ImageError,
    asking,
    buildkit,
    command_environment,
    connect,
    shown,
)
from launch.images.local_images import Made
from launch.images.recipe import (
    BASE_FILE,
    BASE_VARIABLE,
    REPOSITORY,
    Recipe,
    chosen,
    pinned_base,
    platform_of,
    read,
)
from launch.jobs import CHECKOUT, commit_of

OTHERS_LIMIT_S = 7200
"""So long another build of the same image is waited for."""
NO_SPACE = "no space left on device"

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Builder:
    """Makes images with the `docker` that has BuildKit; the same engine answers to client."""

    client: docker.DockerClient
    command: str
    environ: Mapping[str, str]
    say: Say

    def make(self, recipe: Recipe, commit: str | None = None) -> Made:
        """The image of the recipe: found, or built and tried. Two that want the same one at once build it once.

        Raises:
            ImageError: it cannot be built, or does not pass its smoke test.
            RequestError: Docker is gone, or another build of it takes hours.
        """
        found = local_images.of_recipe(self.client, recipe)
        if found is not None:
            return Made(image=found, done="was there")
        with one_at_a_time(recipe, self.environ, self.say):
            found = local_images.of_recipe(self.client, recipe)
            if found is not None:
                return Made(image=found, done="was there")
            began_s = time.monotonic()
            self.say(f"building {recipe.tag}")
            image = self.build(recipe, commit)
            built_s = time.monotonic()
            self.prove(recipe, image)
            found = local_images.of_recipe(self.client, recipe)
            if found is None:
                raise ImageError(f"{recipe.tag} was built and somebody removed it; build it again")
            return Made(
                image=found, done="built", build_s=built_s - began_s, smoke_s=time.monotonic() - built_s
            )

    def build(self, recipe: Recipe, commit: str | None) -> str:
        """The id of an image that has no name yet; Docker shows on standard error how far it is.

        Raises:
            ImageError: a step fails.
        """
        with tempfile.TemporaryDirectory(prefix="tpu-stack-build-") as scratch:
            context, image = Path(scratch, "context.tar"), Path(scratch, "image")
            context.write_bytes(recipe.context())
            arguments = recipe.arguments(self.environ)
            words = build_command(self.command, image, recipe.labels(commit), arguments)
            with context.open("rb") as file:
                code, said = shown(words, file.fileno(), {**command_environment(self.environ), **arguments})
            if code == 0:
                return image.read_text().strip()
        with asking(f"building {recipe.tag}"):
            root = str(self.client.info().get("DockerRootDir"))
        raise ImageError(failure(recipe.tag, said, root))

    def prove(self, recipe: Recipe, image: str) -> None:
        """Try it and name it. One that fails is kept under a name that says so, until one of its kind passes.

        Raises:
            ImageError: it fails.
        """
        self.say("smoke test")
        try:
            smoke.attempt(self.client, self.command, recipe, image, self.environ, self.say)
            self._name(recipe, image, recipe.tag)
        except ImageError as error:
            self._name(recipe, image, recipe.failed_tag)
            look = f"docker run --rm -it --entrypoint bash {recipe.failed_tag}"
            raise ImageError(f"{error}\nkept to look into: {look}") from None
        except BaseException:
            local_images.discard(self.client, image)
            raise
        for other in local_images.list_all(self.client):
            same = (other.framework, other.platform) == (recipe.framework, recipe.platform)
            if same and other.id != image and not other.has_passed and other.is_only_ours:
                local_images.remove(self.client, other)

    def _name(self, recipe: Recipe, image: str, tag: str) -> None:
        with asking(f"naming {tag}"):
            self.client.api.tag(image, f"{REPOSITORY}/{recipe.framework}", tag.rpartition(":")[2])


def build(*, framework: str, platform: str, update_base: bool, environ: Mapping[str, str]) -> int:
    """Build what is not there, show what there is then; 1 where an image failed, after all were tried.

    Raises:
        RequestError: no such framework or platform, no Docker, or none with BuildKit; nothing was built.
    """
    wanted, on = chosen("--framework", framework), platform_of(platform)
    console = terminal()
    tell = say(console)
    with _terminated_as_interrupted(), contextlib.closing(connect(environ)) as client:
        command = buildkit(client, environ)
        if update_base:
            if BASE_VARIABLE in environ:
                raise RequestError(
                    f"--update-base: {BASE_VARIABLE} names another base, in place of images/base.txt; unset it first"
                )
            renew_base(client, tell)
        recipes = [read(name, on, environ) for name in wanted]
        for recipe in recipes:
            recipe.arguments(environ)  # a mistake in them is found before anything is built
        commit = commit_of(CHECKOUT)
        revision = None if commit is None else f"{commit.hash}-dirty" if commit.is_dirty else commit.hash
        made: list[Made] = []
        failed: list[str] = []
        for recipe in recipes:
            builder = Builder(
                client=client, command=command, environ=environ, say=_naming(tell, recipe.framework)
            )
            try:
                made.append(builder.make(recipe, revision))
            except ImageError as error:
                failed.append(str(error))
        if made:
            layers = {each.image.id: local_images.layers(client, each.image.id) for each in made}
            console.print(listing.table_of_built(made, layers))
    for text in failed:
        tell(f"\nerror: {text}")
    return 1 if failed else 0


def _naming(tell: Say, name: str) -> Say:
    return lambda text: tell(f"{name}  {text}")


def renew_base(client: docker.DockerClient, tell: Say, file: Path = BASE_FILE) -> bool:
    """Ask the registry which digest the base's tag has now, and write it down; whether it moved.

    Raises:
        RequestError: the registry cannot be asked.
    """
    found = pinned_base(file)
    tag, old = found["tag"], found["digest"]
    with asking(f"asking the registry for {tag}"):
        new = client.images.get_registry_data(tag).id
    if new == old:
        tell(f"base {tag}: still {old}")
        return False
    atomic.write(file, f"{tag}@{new}\n")
    tell(f"base {tag}\n  was {old}\n  now {new}\n  in {file}; every image is built anew from it")
    return True


def build_command(
    command: str, image: Path, labels: Mapping[str, str], arguments: Mapping[str, str]
) -> list[str]:
    """`docker build` of the archive on its standard input. The arguments' values come from its environment. Pure."""
    said = [word for key, value in labels.items() for word in ("--label", f"{key}={value}")]
    told = [word for name in arguments for word in ("--build-arg", name)]
    return [command, "build", "--iidfile", str(image), *said, *told, "-"]


def failure(tag: str, said: str, docker_root: str) -> str:
    """Why `tag` was not built, and what to do; Docker has shown its own words. Pure."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    reason = lines[-1] if lines else "Docker ended the build without a word"
    words = said.lower()
    if NO_SPACE in words:
        return (
            f"{tag} was not built: the disk that Docker keeps images on ({docker_root}) is full; `fab images --prune` "
            "removes old images of ours, `docker builder prune` the cache of builds, `docker system df` shows what "
            "else there is"
        )
    return f"{tag} was not built: {reason}\n{_remedy(words)}"


def _remedy(words: str) -> str:
    of_base = (
        "manifest unknown",
        "pull access denied",
        "failed to resolve source",
        "> [internal] load metadata",
    )
    if any(each in words for each in of_base):
        return (
            "The base image comes from a registry; where that cannot be reached, name another base with Python 3.12 in"
            " TPU_STACK_BASE_IMAGE (`python -m tools.stand_in_base` makes one for tests)"
        )
    if "hash" in words and "mismatch" in words:
        return (
            "What the index holds is not what was locked: `make lock` renews the locks; look at what it shows"
        )
    if "no solution found" in words or "not found in the package registry" in words:
        return "A pin of the lock cannot be had: `make lock` renews the locks"
    return (
        "The build fetches Debian packages and Python wheels; behind a proxy or with a mirror set HTTPS_PROXY,"
        " PIP_INDEX_URL and UV_DEFAULT_INDEX"
    )


@contextlib.contextmanager
def one_at_a_time(recipe: Recipe, environ: Mapping[str, str], tell: Say) -> Iterator[None]:
    """Raises RequestError where another process holds it for hours."""
    folder = user_cache_dir(environ) / "images"
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / f"{recipe.framework}-{recipe.version}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        tell("another process builds it; waits")
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
