"""The image of the rehearsal's hosts (rehearsal/images/host): its layout, and how it is built.

It is built again only if its contents have changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import docker
import docker.errors
import filelock
import requests

from contracts.aliases import Say
from rehearsal.machines import docker_engine
from rehearsal.machines.docker_engine import MachinesError, archive, asking
from rehearsal.state import user_cache

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "tpu-stack-rehearsal-host"

# Places in the image, and in what is made of it.
PYTHON = "/opt/jobs/bin/python"
DEVICE = "/run/tpu-stack/accel0"
HOST_KEY = "/etc/ssh/ssh_host_ed25519_key"
SETTINGS = "/etc/ssh/sshd_config.d/machine.conf"
FAKETIME = "/opt/tpu-stack/libfaketime.so"
USER = "sa_rehearsal"  # as OS Login calls a service account
HOME = f"/home/{USER}"
HOME_MIB = 1024
AUTHORIZED_KEYS = f"/etc/ssh/authorized_keys/{USER}"
SHARE = "/mnt/share"
# The share a second time, only for root: from here it is mounted again where it has been unmounted.
SPARE_SHARE = "/opt/tpu-stack/share"
DOCKER_DATA = "/var/lib/docker"
DOCKER_START = "/opt/tpu-stack/start-docker"

BASE_VARIABLE = "TPU_STACK_BASE_IMAGE"
# Name in the build context → file of this checkout.
FILES = {
    "Dockerfile": "rehearsal/images/host/Dockerfile",
    "sshd_config": "rehearsal/images/host/sshd_config",
    **{
        name: f"rehearsal/images/host/{name}"
        for name in ("start", "open-cgroups", "start-docker", "pause.py", "start-node")
    },
    "requirements/uv.txt": "requirements/uv.txt",
    "requirements/jobs.txt": "requirements/jobs.txt",
}
# Where this machine fetches from and how it gets out: the build has to go the same way.
PASSED_ON = (
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
    "PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL",
)  # fmt: skip
LABEL = "tpu-stack.rehearsal-image"
CONFLICT = 409
BUILD_LIMIT_S = 1800
BASE_LIMIT_S = 20
"""For a registry to say that it has the base."""
LINES_OF_ERROR = 15
STEP_WIDTH = 110
# Colours and whatever else would move a terminal's cursor.
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")

HostKind = Literal["plain", "docker", "kubernetes"]
"""A stage of the Dockerfile: a host without Docker, or with a daemon of its own, or a node of a cluster."""


def require_base(environ: Mapping[str, str], kind: HostKind) -> None:
    """Before anything is built that takes minutes: Docker answers, and the image is there, or its base is, or the base
    can be fetched. Raises MachinesError within seconds.
    """
    with contextlib.closing(docker_engine.connect(BASE_LIMIT_S)) as client:
        _require_base(client, environ, kind)


def _require_base(client: docker.DockerClient, environ: Mapping[str, str], kind: HostKind) -> None:
    contents = {name: (ROOT / path).read_bytes() for name, path in FILES.items()}
    chosen = environ.get(BASE_VARIABLE) or None
    base = chosen or official_base(contents["Dockerfile"].decode())
    if _is_there(client, image_name(contents, chosen, kind)) or _is_there(client, base):
        return
    try:
        client.images.get_registry_data(base)
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise MachinesError(
            f"the base of the hosts' image, {base}, is not on this machine"
            + (f" ({BASE_VARIABLE} names it)" if chosen else "")
            + f", and Docker cannot fetch it: {_reason(error)}\n"
            "  Behind a proxy, tell Docker's daemon of it. Where no registry can be reached, make a stand-in from "
            "Debian packages and this machine's Python (half a minute, as root), and name it:\n"
            f"    export {BASE_VARIABLE}=$(.venv/bin/python -m tools.stand_in_base)"
        ) from None


def official_base(dockerfile: str) -> str:
    """The base that the Dockerfile names itself."""
    match = re.search(r"^ARG BASE_IMAGE=(\S+)$", dockerfile, flags=re.MULTILINE)
    assert match is not None
    return match[1]


def find_or_build(client: docker.DockerClient, environ: Mapping[str, str], say: Say, kind: HostKind) -> str:
    """The image's name with its tag; minutes the first time. Raises MachinesError with the build's last lines."""
    contents = {name: (ROOT / path).read_bytes() for name, path in FILES.items()}
    base = environ.get(BASE_VARIABLE) or None
    tag = image_name(contents, base, kind)
    # Two rehearsals that begin at once build it once.
    with one_at_a_time(cache_folder(environ) / tag.partition(":")[2]):
        if _is_there(client, tag):
            return tag
        say(f"building the image of the hosts, {tag}; once, and then when the locks change …")
        arguments = build_arguments(environ, base)
        packed = archive({name: (content, 0o644) for name, content in contents.items()})
        with asking("building the image of the hosts"):
            answers = client.api.build(
                fileobj=io.BytesIO(packed), custom_context=True, tag=tag, buildargs=arguments, rm=True, forcerm=True,
                decode=True, timeout=BUILD_LIMIT_S, labels={LABEL: tag.partition(":")[2]}, target=kind,
            )  # fmt: skip
            follow(answers, say)
        for name in remove_old(
            client, keep={image_name(contents, base, host_kind) for host_kind in get_args(HostKind)}
        ):
            say(f"removed {name}, an older image of the hosts")
    return tag


def image_name(contents: Mapping[str, bytes], base: str | None, kind: HostKind) -> str:
    """Repository and tag, which is a hash of all that goes in. Pure."""
    digest = hashlib.sha256(repr((base, kind, sorted(contents.items()))).encode())
    return f"{REPOSITORY}:{digest.hexdigest()[:16]}"


def remove_old(client: docker.DockerClient, *, keep: Collection[str]) -> list[str]:
    """Remove the hosts' images, of over a gigabyte, that are not in `keep` and that no container uses; return names."""
    removed = []
    with asking("looking for older images of the hosts"):
        images = client.api.images(filters={"label": LABEL})
    for name in [tag for image in images for tag in image["RepoTags"] or [] if tag not in keep]:
        try:
            client.api.remove_image(name)
        except docker.errors.ImageNotFound:
            continue
        except docker.errors.APIError as error:
            if error.status_code != CONFLICT:  # a host of another rehearsal is made of it
                raise MachinesError(f"removing {name}: {error.explanation}") from None
        else:
            removed.append(name)
    return removed


def build_arguments(environ: Mapping[str, str], base: str | None) -> dict[str, str]:
    """Pure. Raises MachinesError on an index with a password: it would stay in the image (a proxy does not)."""
    arguments = {name: environ[name] for name in PASSED_ON if environ.get(name)}
    for name, value in arguments.items():
        if name.endswith(("_INDEX", "_INDEX_URL")) and "@" in value:
            raise MachinesError(
                f"{name} holds a password, which the image of the hosts would keep; name an index that needs none, or"
                " a mirror of it on this machine"
            )
    return arguments | ({"BASE_IMAGE": base} if base else {})


def follow(answers: Iterable[Mapping[str, Any]], say: Say) -> None:
    """Says each step of a build as it begins. Raises MachinesError with the build's last lines where it fails."""
    output = ""
    for answer in answers:
        if "error" in answer:
            lines = [plain for line in output.splitlines() if (plain := CONTROL.sub("", line).rstrip())]
            last = "\n  ".join(lines[-LINES_OF_ERROR:])
            raise MachinesError(
                f"building the image of the hosts failed: {answer['error'].strip()}\n  {last}\n"
                "It fetches a base image (Docker's registry), Debian packages and Python wheels. Behind a proxy or a"
                " mirror set HTTPS_PROXY, PIP_INDEX_URL, UV_DEFAULT_INDEX; where the registry cannot be reached, name"
                f" another base with Python 3.12 in {BASE_VARIABLE} (`python -m tools.stand_in_base` makes one)"
            )
        text = str(answer.get("stream") or "")
        output += text
        if text.startswith("Step "):
            say(f"  {textwrap.shorten(text, STEP_WIDTH, placeholder=' …')}")


def _reason(error: Exception) -> str:
    explanation = str(getattr(error, "explanation", None) or error).strip()
    return explanation.splitlines()[0][:300] if explanation else type(error).__name__


def _is_there(client: docker.DockerClient, tag: str) -> bool:
    with asking(f"looking for the image {tag}"):
        try:
            client.images.get(tag)
        except docker.errors.ImageNotFound:
            return False
    return True


@contextlib.contextmanager
def one_at_a_time(target: Path) -> Iterator[None]:
    """Hold the lock for building `target`. Raises MachinesError if another process holds it for too long."""
    try:
        lock = filelock.FileLock(f"{target}.lock").acquire(timeout=BUILD_LIMIT_S)
    except filelock.Timeout:
        raise MachinesError(
            f"another process holds {target}.lock for {BUILD_LIMIT_S // 60} minutes; end it"
        ) from None
    with lock:
        yield


def cache_folder(environ: Mapping[str, str]) -> Path:
    """This user's folder for what rehearsals share, made if missing."""
    folder = user_cache(environ) / "rehearsal-machines"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
