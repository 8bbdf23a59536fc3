"""An image is tried: its own smoke test runs in a container that has no network, no rights and a read-only root."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence

import docker
import docker.errors

from contracts.device_nodes import DEVICE_GLOBS, VFIO_CONTAINER
from launch.images.docker_client import ImageError, asking, clean, command_environment
from launch.images.recipe import REPOSITORY, SMOKE_LABEL, Recipe

PROGRAM = "/opt/tpu-stack/smoke"
LIMIT_S = 1800
"""Each check imports its framework anew: beside a training run on the same two cores they took 12 minutes in all."""
LARGEST_ID = 2**31 - 1
LINES_OF_ERROR = 20
GOING = (404, 409)
"""What Docker answers who removes a container that is gone, or being removed."""
DEATHS = {137: "killed, most likely for want of memory", 139: "a crash in a library"}


def run_command(recipe: Recipe, image: str, nodes: Sequence[str], uid: int, gid: int) -> list[str]:
    """What `docker run` is told. nodes: of this machine's TPU, empty without one. Pure.

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
    limit_s: float = LIMIT_S,
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
