"""The inventory of a Pulumi stack, or of a file that somebody wrote."""

from __future__ import annotations

import os
from pathlib import Path

from contracts.errors import RequestError
from contracts.inventory import Inventory, InventoryError, from_json
from launch import pulumi_command

OUTPUT = "inventory"


def read(stack: str) -> Inventory:
    """The inventory that `stack` means: a file where it looks like a path, else the output of that Pulumi stack.

    Raises:
        RequestError: there is none, or this version cannot read it.
    """
    return read_file(Path(stack)) if is_file(stack) else parse(of_pulumi(stack), f"the stack {stack}")


def is_file(stack: str) -> bool:
    """Whether a --stack names a file: it has a slash in it, or ends as one."""
    return os.sep in stack or stack.endswith(".json")


def read_file(path: Path) -> Inventory:
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--stack {path}: {getattr(error, 'strerror', None) or error}") from None


def parse(text: str, where: str) -> Inventory:
    try:
        return from_json(text)
    except InventoryError as error:
        raise RequestError(f"{where}: {error}") from None


def of_pulumi(stack: str) -> str:
    """The text of a stack's `inventory`, asked of Pulumi.

    Raises:
        RequestError: Pulumi is not installed, knows no such stack, or the stack was never brought up.
    """
    return pulumi_command.output(OUTPUT, stack, otherwise="or give a file with an inventory")
