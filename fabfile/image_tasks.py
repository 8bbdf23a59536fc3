"""The tasks about images."""

from __future__ import annotations

import os

from fabfile.command import task
from fabfile.command_options import flag, group, option, options
from fabfile.selector import REHEARSAL, Selector

PLATFORM = "tpu, or cpu for rehearsals and this machine (default: tpu)"


@options
class Build:
    framework: str = option("frameworks, as jax,pytorch (default: all of images/)", default="")
    platform: str = option(PLATFORM, default="tpu")
    update_base: bool = flag("first update the base's digest in images/base.txt")


@task("fab build --framework jax --platform cpu")
def build(args: Build) -> int:
    """Build the missing images of images/, and test them."""
    from images import build as building

    return building.build(
        framework=args.framework,
        platform=args.platform,
        update_base=args.update_base,
        environ=os.environ,
    )


@options
class Push:
    framework: str = option("frameworks, as jax,pytorch (default: all that are built)", default="")
    selector: Selector = group(
        Selector, "stack", stack="the Pulumi stack whose repository it is, or rehearsal (default: $TPU_STACK)"
    )
    platform: str = option(PLATFORM, default="tpu")


@task("fab push --stack dev --framework jax")
def push(args: Push) -> int:
    """Push images to a stack's repository, by digest."""
    from images import push as pushing

    stack = args.selector.stack_name
    if stack == REHEARSAL:
        args.selector.target()  # its environment has the `pulumi` that knows it
    return pushing.push(stack=stack, framework=args.framework, platform=args.platform, environ=os.environ)


@options
class Images:
    selector: Selector = group(Selector, "stack")
    prune: bool = flag("remove old images from this machine")


@task("fab images --stack dev")
def images(args: Images) -> int:
    """List images, here and on a stack, and the runs that used them."""
    from images import local_images

    if args.prune:
        return local_images.prune(environ=os.environ)
    target = args.selector.target()
    references = target.inventory.images if target.capabilities.is_billed else None
    return local_images.show(folder=target.runs, references=references, environ=os.environ)
