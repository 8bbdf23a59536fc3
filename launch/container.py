"""Whether a run's processes run bare or in a container: in which image, and what of the host they see there."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from contracts.errors import RequestError
from launch.target import Target

RUNTIMES = ("bare", "docker")
ACCESSES = ("devices", "privileged")
"""Of a container to its host: the platform's device nodes and nothing more, or all that the host's root may."""
SHM_BYTES = 8 * 2**30
"""Of /dev/shm, which data loaders share; memory is taken only as it is filled. Docker's own 64 MiB is too little."""

FindImage = Callable[[str, str], str]
"""The id of the image that was built here for a framework stack and a platform; raises RequestError."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Container:
    """image: by digest, or the id of one that was built on the host. mounts, read_only_mounts: paths of the host, in
    the container under the same name. access: one of ACCESSES."""

    image: str
    mounts: tuple[str, ...] = ()
    read_only_mounts: tuple[str, ...] = ()
    access: str = ACCESSES[0]


def choose(
    target: Target,
    stack: str,
    wanted: str | None,
    find_image: FindImage,
    before: Mapping[str, Any] | None = None,
    access: str | None = None,
) -> Container | None:
    """What the processes of a framework stack run in on this target; None: bare.

    wanted: as --runtime says it. Without it a run goes on as it was started (`before`, its run.json), and a new one
    runs in the image that the inventory has for the stack, if it has one. access: as --container-access says it;
    without it as the run was started, and a new one with the devices alone.

    Raises:
        RequestError: there is no such runtime or access, no image, or an access without a container.
    """
    if access not in (None, *ACCESSES):
        raise RequestError(
            f'--container-access: "{access}" is not an access; choose one of {", ".join(ACCESSES)}'
        )
    if wanted not in (None, *RUNTIMES):
        raise RequestError(f'--runtime: "{wanted}" is not a runtime; choose one of {", ".join(RUNTIMES)}')
    image: str | None
    if wanted is None and before is not None:
        image = before["image"] if before["runtime"] == "docker" else None
    elif wanted == "docker":
        image = find_image(stack, target.platform) if target.is_local else _of_inventory(target, stack)
    else:
        image = target.inventory.images.get(stack) if wanted is None else None
    if image is None:
        if access is not None:
            raise RequestError(
                f"--container-access {access}: the processes run in no container here; add --runtime docker, "
                "or leave it out"
            )
        return None
    share = target.inventory.storage.nfs_mount
    return Container(
        image=image,
        mounts=() if share is None else (share,),
        access=access or (before or {}).get("container_access") or ACCESSES[0],
    )


def way_out(container: Container | None, platform: str) -> str | None:
    """What to try where the processes of a TPU run did not come as far as the group; None where that is no help."""
    if container is None or platform != "tpu" or container.access == "privileged":
        return None
    return (
        "if the logs say that the TPU did not initialise: in a container it has its device nodes and nothing more; "
        "`--container-access privileged` gives it all that the host's root may (docs/images.md)"
    )


def built_here(stack: str, platform: str) -> str:
    """The id of the image of this checkout's files that `fab build` has made on this machine.

    Raises:
        RequestError: it has not been built, or there is no image for the platform, or no Docker.
    """
    if platform == "gpu":
        raise RequestError("--runtime docker: the images are for TPUs and CPUs; on a GPU leave --runtime out")
    from launch.images import here  # with it comes Docker's client, which few launches need

    return here.required(stack, platform).id


def _of_inventory(target: Target, stack: str) -> str:
    if stack not in target.inventory.images:
        raise RequestError(
            f"--runtime docker: the stack {target.name} has no image of {stack}; `fab build --stack {stack}`, "
            f"`fab push --stack {target.name} --image {stack}`, then `pulumi up`"
        )
    return target.inventory.images[stack]


def with_files(container: Container, config: Mapping[str, Any], cwd: str) -> Container:
    """The container on this machine, where the working directory and the files that the job's options name are seen.

    Raises:
        RequestError: an option names a file by "~", which is another folder in there.
    """
    texts = [value.removeprefix("file://") for value in config.values() if isinstance(value, str)]
    for text in texts:
        if text.startswith("~") and os.path.exists(os.path.expanduser(text)):
            raise RequestError(f"{text} means another folder in a container; write its path out")
    named = {os.path.normpath(os.path.join(cwd, text)) for text in texts if text and "\0" not in text}
    outside = sorted(path for path in named if os.path.exists(path) and not Path(path).is_relative_to(cwd))
    return dataclasses.replace(container, read_only_mounts=(cwd, *outside))
