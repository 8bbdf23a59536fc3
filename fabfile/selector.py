"""Where a command acts: the options of a target, and what it is in the end."""

from __future__ import annotations

import contextvars
import os
from typing import TYPE_CHECKING

from contracts.errors import RequestError
from fabfile.command_options import option, options

if TYPE_CHECKING:
    from contracts.inventory import Inventory
    from launch.runs import Run
    from launch.targets import PresetInventory, Target, TargetRequest

JSON = "print one JSON object, for programs"
RUN = 'a run of `fab runs`: its id, the beginning or end of it, its --name, or "latest"'
STACK = "where: local (this machine), a Pulumi stack, an inventory file, or rehearsal (default: $TPU_STACK)"
REHEARSAL = "rehearsal"

opened: contextvars.ContextVar[dict[str, Target]] = contextvars.ContextVar("opened")
"""The stacks that the task has been about so far, by name."""


@options
class Selector:
    """The options about hosts and slices. A command has those of them that it names."""

    stack: str | None = option(STACK)
    slice: str | None = option("a slice of the stack, by name (default: the only one)")
    hosts: str | None = option("which hosts, such as 0-3,5 (default: all; on this machine: how many)")
    platform: str | None = option("cpu, gpu or tpu")
    python: str | None = option("the interpreter on the hosts")
    runs: str | None = option("where runs are kept (default: where `fab train` keeps them)")

    @property
    def stack_name(self) -> str:
        return self.stack or os.environ.get("TPU_STACK") or "local"

    def request(self) -> TargetRequest:
        """Return what is asked for, before anything is looked up. Raises RequestError: no rehearsal is up."""
        from launch.targets import TargetRequest

        return TargetRequest(
            stack=self.stack_name,
            slice=self.slice or None,
            hosts=self.hosts or None,
            platform=self.platform or None,
            python=self.python or None,
            runs=self.runs or None,
            preset=_rehearsal() if self.stack_name == REHEARSAL else None,
        )

    def target(self, like: Run | None = None) -> Target:
        """Return the target. like: a run that is resumed there.

        Raises:
            RequestError: there is no such stack, slice or host, or no rehearsal is up.
        """
        from backends.resolve import resolve

        target = resolve(self.request(), like)
        if target.capabilities.is_billed and (stacks := opened.get(None)) is not None:
            stacks[target.name] = target
        return target

    def any_target(self) -> Target:
        """Return the target of one of the slices that may be meant, for what concerns the whole stack."""
        from backends.resolve import read_inventory, resolve, slice_targets

        request = self.request()
        return next(iter(slice_targets(read_inventory(request), request)), None) or resolve(request)

    def inventory(self) -> Inventory:
        """Return the stack's inventory, whether it has hosts or not. Raises RequestError: there is no such stack."""
        from launch import inventories

        request = self.request()
        if request.stack == "local":
            raise RequestError("this machine by itself has no inventory; say --stack as well")
        return request.preset.inventory if request.preset else inventories.read(request.stack)


def _rehearsal() -> PresetInventory:
    """Return the rehearsal that is up, and let its stand-ins replace Google's programs and bucket for this process."""
    from launch.inventories import parse
    from launch.targets import PresetInventory
    from rehearsal import state

    try:
        rehearsal = state.open_rehearsal()
    except state.RehearsalError as error:
        raise RequestError(f"--stack {REHEARSAL}: {error}") from None
    os.environ.update(rehearsal.environment)
    return PresetInventory(
        folder=state.rehearsal_folder(os.environ),
        inventory=parse(rehearsal.inventory_json, "the rehearsal"),
        platform=rehearsal.platform,
        python=rehearsal.python,
        stand_in_devices=tuple(rehearsal.device_globs),
    )
