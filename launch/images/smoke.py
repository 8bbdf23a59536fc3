"""An image is tried: its own smoke test runs in a container that has no network, no rights and a read-only root."""

from __future__ import annotations

import glob
import json
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import docker
import docker.errors
import requests

from launch.images.answers import clean
from launch.images.context import SMOKE_LABEL
from launch.images.engine import asking, patient
from launch.images.errors import ImageError
from launch.images.recipe import Recipe

PROGRAM = "/opt/tpu-stack/smoke"
LIMIT_S = 900
"""Longest of all: importing TensorFlow and a first compilation on a machine with two busy cores take a minute."""
TPU_NODES = ("/dev/accel*", "/dev/vfio/[0-9]*")
SHM_BYTES = 2**30
LARGEST_ID = 2**31 - 1
LINES_OF_ERROR = 20


def options(recipe: Recipe, nodes: list[str], uid: int, gid: int) -> dict[str, Any]:
    """How the container is made. nodes: of this machine's TPU, empty without one. Pure.

    As a job's, so that what passes here runs there: any user, nothing but /tmp writable. With the TPU's image on a
    machine without one the framework is tried on the CPU; the device check is for machines that have it.
    """
    on_tpu = recipe.platform == "tpu" and bool(nodes)
    made: dict[str, Any] = {
        "command": [PROGRAM, "--platform", "tpu" if on_tpu else "cpu"],
        "labels": {SMOKE_LABEL: recipe.hash},
        "network_mode": "host" if on_tpu else "none",  # libtpu asks the metadata server
        "read_only": True,
        "tmpfs": {"/tmp": ""},
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "shm_size": SHM_BYTES,
    }
    if on_tpu:
        made["devices"] = [f"{node}:{node}:rwm" for node in nodes]
        made["ulimits"] = [{"Name": "memlock", "Soft": -1, "Hard": -1}]
    # Root's rights are not those of a job, and ids as large as OS Login's Docker does not take: the image's own user.
    if uid != 0 and max(uid, gid) <= LARGEST_ID:
        made["user"] = f"{uid}:{gid}"
    return made


def nodes_of_tpu() -> list[str]:
    """This machine's device nodes of TPUs; with vfio the control node as well."""
    found = sorted(node for pattern in TPU_NODES for node in glob.glob(pattern))
    return [*found, "/dev/vfio/vfio"] if any(node.startswith("/dev/vfio/") for node in found) else found


def attempt(
    client: docker.DockerClient,
    recipe: Recipe,
    image: str,
    note: Callable[[str], None],
    limit_s: float = LIMIT_S,
) -> dict[str, Any]:
    """Run the smoke test of `image`, its lines noted as they come; what it reports in the end.

    The container is gone afterwards, whatever happened.

    Raises:
        ImageError: it failed, or said nothing in the end.
    """
    sweep(client, recipe)
    with asking(f"trying {recipe.tag}"), patient(client, limit_s + 60):
        container = client.containers.create(
            image, **options(recipe, nodes_of_tpu(), os.getuid(), os.getgid())
        )
        out_of_time = threading.Event()
        watch = threading.Timer(limit_s, _end, (container, out_of_time))
        lines = []
        try:
            watch.start()
            container.start()
            for line in _lines(container.logs(stream=True, follow=True)):
                lines.append(line)
                if not line.startswith("{"):
                    note(line)
            code = int(container.wait()["StatusCode"])
        finally:
            watch.cancel()
            container.remove(force=True)
    if out_of_time.is_set():
        raise ImageError(
            f"{recipe.tag}: its smoke test was not done after {limit_s:.0f} s, and was ended" + _last(lines)
        )
    report = _report(lines)
    if code != 0 or report is None or report.get("ok") is not True:
        died = f" (exit code {code}: {_signal(code)})" if code > 128 else f" (exit code {code})"
        raise ImageError(f"{recipe.tag}: its smoke test failed{died}" + _last(lines))
    return report


def sweep(client: docker.DockerClient, recipe: Recipe) -> None:
    """Remove containers that a killed attempt at this recipe left. Who calls it holds the recipe's lock."""
    with asking("looking for containers that an earlier build left"):
        for left in client.containers.list(all=True, filters={"label": f"{SMOKE_LABEL}={recipe.hash}"}):
            try:
                left.remove(force=True)
            except docker.errors.NotFound:
                continue


def _end(container: Any, out_of_time: threading.Event) -> None:
    out_of_time.set()
    try:
        container.kill()
    except (docker.errors.APIError, requests.RequestException, OSError):  # it has just ended by itself
        return


def _lines(pieces: Iterator[bytes]) -> Iterator[str]:
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from (text for line in whole if (text := clean(line.decode(errors="replace")).rstrip()))
    if text := clean(rest.decode(errors="replace")).rstrip():
        yield text


def _report(lines: list[str]) -> dict[str, Any] | None:
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _last(lines: list[str]) -> str:
    said = [line for line in lines if not line.startswith("{")][-LINES_OF_ERROR:]
    return ":\n" + "\n".join(f"  {line}" for line in said) if said else "; it said nothing"


def _signal(code: int) -> str:
    return {137: "killed, most likely for want of memory", 139: "a crash in a library"}.get(
        code, f"ended by signal {code - 128}"
    )
