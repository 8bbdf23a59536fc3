"""`fab build`: each image is built by BuildKit, tested, and only then named. An image that fails leaves nothing behind.

Its own smoke test runs in a container without network and privileges, on a read-only root.
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
from contracts.aliases import Say
from contracts.errors import RequestError
from contracts.host_interface import DEVICE_GLOBS, VFIO_CONTAINER
from images import local_images
from images.docker_client import (
    ImageError,
    ImageUnreachable,
    asking,
    away_line,
    buildkit,
    clean,
    command_environment,
    connect,
    exit_code_of,
    shown,
)
from images.local_images import BuildResult
from images.recipe import (
    BASE_FILE,
    BASE_VARIABLE,
    REPOSITORY,
    SMOKE_LABEL,
    Recipe,
    chosen,
    image_platform,
    pinned_base,
    read,
)
from jobs.runtime.storage.cache import user_cache_dir
from launch.jobs import CHECKOUT, git_commit
from launch.output import say, terminal

OTHERS_LIMIT_S = 7200
"""So long another build of the same image is waited for."""
NO_SPACE = "no space left on device"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Builder:
    """Builds images with a `docker` that has BuildKit; `client` speaks to the same engine."""

    client: docker.DockerClient
    command: str
    environ: Mapping[str, str]
    say: Say

    def make(self, recipe: Recipe, commit: str | None = None) -> BuildResult:
        """Return the image of the recipe, after building and testing it if needed. Two processes at once build it once.

        Raises:
            ImageError: it cannot be built, or fails its smoke test.
            RequestError: Docker is gone, or another process builds it for hours.
        """
        image_here = local_images.find(self.client, recipe)
        if image_here is not None:
            return BuildResult(image=image_here, done="was there")
        with one_at_a_time(recipe, self.environ, self.say):
            image_here = local_images.find(self.client, recipe)
            if image_here is not None:
                return BuildResult(image=image_here, done="was there")
            began_s = time.monotonic()
            self.say(f"building {recipe.tag}")
            image = self.build(recipe, commit)
            built_s = time.monotonic()
            self.prove(recipe, image)
            image_here = local_images.find(self.client, recipe)
            if image_here is None:
                raise ImageError(f"{recipe.tag} was built and somebody removed it; build it again")
            return BuildResult(
                image=image_here, done="built", build_s=built_s - began_s, smoke_s=time.monotonic() - built_s
            )

    def build(self, recipe: Recipe, commit: str | None) -> str:
        """Build an image without a name, and return its id. Docker shows its progress on standard error.

        Raises:
            ImageError: a step fails.
        """
        with tempfile.TemporaryDirectory(prefix="tpu-stack-build-") as scratch:
            context, image = Path(scratch, "context.tar"), Path(scratch, "image")
            context.write_bytes(recipe.context())
            arguments = recipe.arguments(self.environ)
            docker_command = build_command(self.command, image, recipe.labels(commit), arguments)
            with context.open("rb") as file:
                code, output = shown(
                    docker_command, file.fileno(), {**command_environment(self.environ), **arguments}
                )
            if code == 0:
                return image.read_text().strip()
        with asking(f"building {recipe.tag}"):
            root = str(self.client.info().get("DockerRootDir"))
        raise failure(recipe.tag, output, root)

    def prove(self, recipe: Recipe, image: str) -> None:
        """Test an image and name it. One that fails is kept under a name that says so, until one of its kind passes.

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
        for listed in local_images.list_all(self.client):
            same = (listed.framework, listed.platform) == (recipe.framework, recipe.platform)
            if same and listed.id != image and not listed.has_passed and listed.is_only_ours:
                local_images.remove(self.client, listed)

    def _name(self, recipe: Recipe, image: str, tag: str) -> None:
        with asking(f"naming {tag}"):
            self.client.api.tag(image, f"{REPOSITORY}/{recipe.framework}", tag.rpartition(":")[2])


def build(*, framework: str, platform: str, update_base: bool, environ: Mapping[str, str]) -> int:
    """Build what is not there, show what there is then, and return the exit code: of what failed, after all were tried.

    Raises:
        RequestError: no such framework or platform, no Docker, or none with BuildKit; nothing was built.
    """
    frameworks, on = chosen("--framework", framework), image_platform(platform)
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
        recipes = [read(name, on, environ) for name in frameworks]
        for recipe in recipes:
            recipe.arguments(environ)  # a mistake in them is found before anything is built
        commit = git_commit(CHECKOUT)
        revision = None if commit is None else f"{commit.hash}-dirty" if commit.is_dirty else commit.hash
        results: list[BuildResult] = []
        failed: list[ImageError] = []
        for recipe in recipes:
            builder = Builder(
                client=client, command=command, environ=environ, say=_naming(tell, recipe.framework)
            )
            try:
                results.append(builder.make(recipe, revision))
            except ImageError as error:
                failed.append(error)
        if results:
            layers = {result.image.id: local_images.layers(client, result.image.id) for result in results}
            console.print(local_images.table_of_built(results, layers))
    for trouble in failed:
        tell(f"\nerror: {trouble}")
    return exit_code_of(failed)


def _naming(tell: Say, name: str) -> Say:
    return lambda text: tell(f"{name}  {text}")


def renew_base(client: docker.DockerClient, tell: Say, file: Path = BASE_FILE) -> bool:
    """Ask the registry for the current digest of the base's tag, and record it. Returns whether it has changed.

    Raises:
        RequestError: the registry cannot be asked.
    """
    base = pinned_base(file)
    tag, old = base["tag"], base["digest"]
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
    """The `docker build` command, which reads the archive from stdin and arguments' values from its environment."""
    label_arguments = [word for key, value in labels.items() for word in ("--label", f"{key}={value}")]
    build_arguments = [word for name in arguments for word in ("--build-arg", name)]
    return [command, "build", "--iidfile", str(image), *label_arguments, *build_arguments, "-"]


def failure(tag: str, output: str, docker_root: str) -> ImageError:
    """Return why `tag` was not built, and the remedy; Docker has shown its own output. Pure."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reason = lines[-1] if lines else "Docker ended the build without a word"
    output_lower = output.lower()
    if NO_SPACE in output_lower:
        return ImageError(
            f"{tag} was not built: the disk that Docker keeps images on ({docker_root}) is full; `fab images --prune` "
            "removes old images of ours, `docker builder prune` the cache of builds, `docker system df` shows what "
            "else there is"
        )
    if "hash" in output_lower and "mismatch" in output_lower:
        return ImageError(
            f"{tag} was not built: {reason}\nA package of the index has another hash than the lock: `make lock` renews "
            "the locks; look at what it changes"
        )
    away = away_line(output)
    kind = ImageUnreachable if away else ImageError
    return kind(f"{tag} was not built: {away or reason}\n{_remedy(output_lower, is_away=away is not None)}")


def _remedy(output: str, *, is_away: bool) -> str:
    base_errors = (
        "manifest unknown",
        "pull access denied",
        "failed to resolve source",
        "> [internal] load metadata",
    )
    if any(error_text in output for error_text in base_errors):
        return (
            "The base image comes from a registry; where that cannot be reached, name another base with Python 3.12 in"
            " TPU_STACK_BASE_IMAGE (`python -m tools.stand_in_base` makes one for tests)"
        )
    if not is_away and ("no solution found" in output or "not found in the package registry" in output):
        return "The index has no such version as the lock names: `make lock` renews the locks"
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
"""Docker's answers to the removal of a container that is gone or being removed."""
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
    """This machine's TPU device nodes; with vfio also its control node."""
    device_nodes = sorted(node for pattern in DEVICE_GLOBS["tpu"] for node in glob.glob(pattern))
    return (
        [*device_nodes, VFIO_CONTAINER]
        if any(node.startswith("/dev/vfio/") for node in device_nodes)
        else device_nodes
    )


def attempt(
    client: docker.DockerClient,
    command: str,
    recipe: Recipe,
    image: str,
    environ: Mapping[str, str],
    note: Callable[[str], None],
    limit_s: float = SMOKE_LIMIT_S,
) -> None:
    """Run the smoke test of `image`; `note` gets its lines as they come. The container is removed in any case.

    command: the `docker` of this machine.

    Raises:
        ImageError: it failed, or printed no result.
    """
    sweep(client, recipe)  # of a killed attempt; who comes here holds the recipe's lock
    name = f"{REPOSITORY}-smoke-{recipe.hash}"
    run_arguments = run_command(recipe, image, nodes_of_tpu(), os.getuid(), os.getgid())
    out_of_time = threading.Event()

    def end() -> None:
        out_of_time.set()
        sweep(client, recipe)

    watch = threading.Timer(limit_s, end)
    lines: list[str] = []
    with subprocess.Popen(
        [command, "run", "--name", name, *run_arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
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
        answer = json.loads(lines[-1]) if lines else None
    except ValueError:
        return False
    return isinstance(answer, dict) and answer.get("ok") is True


def _last(lines: list[str]) -> str:
    printed = [line for line in lines if not line.startswith("{")][-LINES_OF_ERROR:]
    return ":\n" + "\n".join(f"  {line}" for line in printed) if printed else "; it said nothing"
