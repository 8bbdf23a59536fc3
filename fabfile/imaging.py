"""The tasks about the images that jobs run in: built here, pushed to a stack, listed."""

from __future__ import annotations

import os
from typing import Any

from fabfile import options
from fabfile.terminal import reported, task

PLATFORM = "tpu, or cpu for rehearsals and this machine"


@task(
    help={
        "stack": "framework stacks, as jax,pytorch (default: all of images/)",
        "platform": f"{PLATFORM} (default: tpu)",
        "update_base": "first update the base's digest in images/base.txt",
    }
)
@reported
def build(c: Any, stack: str = "", platform: str = "tpu", update_base: bool = False) -> int:
    """Build the missing images of images/, and test them."""
    from launch.images import build as building

    return building.build(stack=stack, platform=platform, update_base=update_base, environ=os.environ)


@task(
    help={
        "image": "framework stacks, as jax,pytorch (default: all that are built)",
        "stack": "the Pulumi stack whose repository it is, or rehearsal (default: $TPU_STACK)",
        "platform": f"{PLATFORM} (default: tpu)",
    }
)
@reported
def push(c: Any, image: str = "", stack: str = "", platform: str = "tpu") -> int:
    """Push images to a stack's repository, by digest."""
    from launch.images import push as pushing

    chosen = stack or os.environ.get("TPU_STACK") or "local"
    if chosen == options.REHEARSAL:
        options.target(chosen)  # its environment has the `pulumi` that knows it
    return pushing.push(stack=chosen, image=image, platform=platform, environ=os.environ)


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
