"""`fab build`: each image is built by BuildKit, tried, and only then named. Nothing is left of one that was not.

It is tried by its own smoke test, in a container that has no network, no rights and a read-only root.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import docker
import docker.errors
import filelock

from contracts import atomic
from contracts.device_nodes import DEVICE_GLOBS, VFIO_CONTAINER
from contracts.errors import RequestError
from images import local_images
from images.docker_client import ImageError, asking, buildkit, clean, command_environment, connect, shown
from images.local_images import Made
from images.recipe import (
    BASE_FILE,
    BASE_VARIABLE,
    REPOSITORY,
    SMOKE_LABEL,
    Recipe,
    chosen,
    pinned_base,
    platform_of,
    read,
)
from jobs.runtime.cache import user_cache_dir
from launch.jobs import CHECKOUT, commit_of
from launch.output import say, terminal

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
        """Return the image of the recipe: found, or built and tried. Two that want the same one at once build it once.

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
        """Return the id of an image that has no name yet; Docker shows on standard error how far it is.

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
            attempt(self.client, self.command, recipe, image, self.environ, self.say)
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
    with contextlib.closing(connect(environ)) as client:
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
            console.print(local_images.table_of_built(made, layers))
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
    """Return why `tag` was not built, and what to do; Docker has shown its own words. Pure."""
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


PROGRAM = "/opt/tpu-stack/smoke"
SMOKE_LIMIT_S = 1800
"""Each check imports its framework anew: beside a training run on the same two cores they took 12 minutes in all."""
LARGEST_ID = 2**31 - 1
LINES_OF_ERROR = 20
GOING = (404, 409)
"""What Docker answers who removes a container that is gone, or being removed."""
DEATHS = {137: "killed, most likely for want of memory", 139: "a crash in a library"}


def run_command(recipe: Recipe, image: str, nodes: Sequence[str], uid: int, gid: int) -> list[str]:
    """Return what `docker run` is told. nodes: of this machine's TPU, empty without one. Pure.

    As a job's container, so that what passes here runs there: any user, nothing but /tmp writable. With the TPU's
    image on a machine without one the framework is tried on the CPU; the device check is for machines that have it.
    """
    on_tpu = recipe.platform == "tpu" and bool(nodes)
    devices = [word for node in nodes for word in ("--device", node)] if on_tpu else []
    # Root's rights are not those of a job, and ids as large as OS Login's Docker does not take: the image's own user.
    user = [f"--user={uid}:{gid}"] if uid != 0 and max(uid, gid) <= LARGEST_ID else []
    return [
        f"--label={SMOKE_LABEL}={recipe.hash}",
        f"--network={'host' if on_tpu else 'none'}",  # libtpu asks the metadata server
        *(
            "--read-only",
            "--tmpfs=/tmp",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
            "--shm-size=1g",
        ),
        *devices,
        *(["--ulimit=memlock=-1"] if on_tpu else []),
        *user,
        image,
        *(PROGRAM, "--platform", "tpu" if on_tpu else "cpu"),
    ]


def nodes_of_tpu() -> list[str]:
    """This machine's device nodes of TPUs; with vfio the control node as well."""
    found = sorted(node for pattern in DEVICE_GLOBS["tpu"] for node in glob.glob(pattern))
    return [*found, VFIO_CONTAINER] if any(node.startswith("/dev/vfio/") for node in found) else found


def attempt(
    client: docker.DockerClient,
    command: str,
    recipe: Recipe,
    image: str,
    environ: Mapping[str, str],
    note: Callable[[str], None],
    limit_s: float = SMOKE_LIMIT_S,
) -> None:
    """Run the smoke test of `image`, its lines noted as they come. The container is gone afterwards in any case.

    command: the `docker` of this machine.

    Raises:
        ImageError: it failed, or said nothing in the end.
    """
    sweep(client, recipe)  # of a killed attempt; who comes here holds the recipe's lock
    name = f"{REPOSITORY}-smoke-{recipe.hash}"
    words = run_command(recipe, image, nodes_of_tpu(), os.getuid(), os.getgid())
    out_of_time = threading.Event()

    def end() -> None:
        out_of_time.set()
        sweep(client, recipe)

    watch = threading.Timer(limit_s, end)
    lines: list[str] = []
    with subprocess.Popen(
        [command, "run", "--name", name, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env=command_environment(environ), text=True, errors="replace",
    ) as process:  # fmt: skip
        watch.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if text := clean(line).rstrip():
                    lines.append(text)
                    if not text.startswith("{"):
                        note(text)
            code = process.wait()
        finally:
            watch.cancel()
            watch.join()  # what it removes is gone then
            sweep(client, recipe)
    if out_of_time.is_set():
        raise ImageError(
            f"{recipe.tag}: its smoke test was not done after {limit_s:.0f} s, and was ended{_last(lines)}"
        )
    if code != 0 or not _says_ok(lines):
        died = f": {DEATHS.get(code, f'ended by signal {code - 128}')}" if code > 128 else ""
        raise ImageError(f"{recipe.tag}: its smoke test failed (exit code {code}{died}){_last(lines)}")


def sweep(client: docker.DockerClient, recipe: Recipe) -> None:
    """Remove the containers in which this recipe's image is or was tried."""
    with asking("removing the containers of a smoke test"):
        for left in client.containers.list(
            all=True, filters={"label": f"{SMOKE_LABEL}={recipe.hash}"}, ignore_removed=True
        ):
            try:
                left.remove(force=True)
            except docker.errors.APIError as error:
                if error.status_code not in GOING:
                    raise


def _says_ok(lines: list[str]) -> bool:
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("ok") is True


def _last(lines: list[str]) -> str:
    said = [line for line in lines if not line.startswith("{")][-LINES_OF_ERROR:]
    return ":\n" + "\n".join(f"  {line}" for line in said) if said else "; it said nothing"
