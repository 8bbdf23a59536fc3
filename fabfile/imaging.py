"""The tasks about the images that jobs run in: built here, pushed to a stack, listed."""

from __future__ import annotations

import os
from typing import Any

from contracts.errors import RequestError
from fabfile import options
from fabfile.terminal import reported, task

PLATFORM = "tpu, or cpu for rehearsals and this machine"


@task(
    help={
        "framework": "frameworks, as jax,pytorch (default: all of images/)",
        "platform": f"{PLATFORM} (default: tpu)",
        "update_base": "first update the base's digest in images/base.txt",
        "stack": "the old name of --framework",
    }
)
@reported
def build(
    c: Any, framework: str = "", platform: str = "tpu", update_base: bool = False, stack: str = ""
) -> int:
    """Build the missing images of images/, and test them."""
    if stack:
        raise RequestError(
            f"--stack: a stack is a Pulumi stack, and images are built for frameworks; fab build --framework {stack} "
            f"(make images FRAMEWORK={stack})"
        )
    from launch.images import build as building

    return building.build(framework=framework, platform=platform, update_base=update_base, environ=os.environ)


@task(
    help={
        "framework": "frameworks, as jax,pytorch (default: all that are built)",
        "stack": "the Pulumi stack whose repository it is, or rehearsal (default: $TPU_STACK)",
        "platform": f"{PLATFORM} (default: tpu)",
        "image": "the old name of --framework",
    }
)
@reported
def push(c: Any, framework: str = "", stack: str = "", platform: str = "tpu", image: str = "") -> int:
    """Push images to a stack's repository, by digest."""
    if image:
        raise RequestError(f"--image: images are named by their framework; fab push --framework {image}")
    from launch.images import push as pushing

    chosen = stack or os.environ.get("TPU_STACK") or "local"
    if chosen == options.REHEARSAL:
        options.target(chosen)  # its environment has the `pulumi` that knows it
    return pushing.push(stack=chosen, framework=framework, platform=platform, environ=os.environ)


@task(help={"stack": options.STACK, "prune": "remove old images from this machine"})
@reported
def images(c: Any, stack: str = "", prune: bool = False) -> int:
    """List images, here and on a stack, and the runs that used them."""
    from launch.images import listing

    if prune:
        return listing.prune(environ=os.environ)
    target = options.target(stack)
    references = None if target.is_local else target.inventory.images
    return listing.show(folder=target.runs, references=references, environ=os.environ)
